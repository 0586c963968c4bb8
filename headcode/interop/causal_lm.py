"""headcode's language models as Hugging Face models. Importing this module registers them with the Auto classes.

    from headcode.interop import HeadcodeForCausalLM
    model = HeadcodeForCausalLM.from_transformer(headcode.load("runs/lm-small-hyla-seed0"), end_token=0)
    model.save_pretrained("model")                                  # config.json, model.safetensors and a model card
    model = AutoModelForCausalLM.from_pretrained("model")           # in any process that imported this module
    model.generate(tokens, max_new_tokens=50)
    model(tokens, output_attentions=True).attentions                # the codes of each layer

`generate` keeps keys and values, or for the method `linear` with rotary (or no) positions a state of constant size.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from headcode.interop.hf_config import HeadcodeConfig  # first: it says how to install transformers

# isort: split
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationMixin,
)
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from headcode.interop.hf_cache import HeadcodeCache, as_decoding_cache
from headcode.interop.hf_inputs import ABSOLUTE, has_pairs, read_inputs
from headcode.interop.hf_model import HeadcodeModel, HeadcodePreTrainedModel, refuse
from headcode.nn import Transformer
from headcode.nn.plain import why_called

_LOSS_OPTIONS = ("num_items_in_batch", "shift_labels", "ignore_index")


class HeadcodeForCausalLM(HeadcodePreTrainedModel, GenerationMixin):
    """A causal `Transformer` with the interface of Hugging Face: (B, T) tokens to (B, T, vocab_size) logits.

    The logits are products with `lm_head.weight`, which is the table of the embeddings (`tie_word_embeddings=False`
    gives them another), times `logit_scale`.
    """

    _tied_weights_keys = {"lm_head.weight": "model.transformer.embedding.weight"}  # noqa: RUF012 - the library's own
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012

    def __init__(self, config: HeadcodeConfig) -> None:
        super().__init__(config)
        self.model = HeadcodeModel(config)
        # Models with output_dim have a projection of their own at the end of the transformer.
        self.lm_head: nn.Module | None = None
        if config.output_dim is None:
            self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.post_init()

    @property
    def transformer(self) -> Transformer:  # type: ignore[override]
        return self.model.transformer

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: Any = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **loss_options: Any,
    ) -> Any:
        """Logits, and with `labels` (the tokens themselves; -100 is left out) the mean loss of the next token.

        Args as in `HeadcodeModel.forward`, and:
            logits_to_keep: how many of the last positions have logits (0: all), or which ones.
            loss_options: num_items_in_batch, shift_labels, ignore_index.
        """
        if loss_options:
            refuse({name: value for name, value in loss_options.items() if name not in _LOSS_OPTIONS})
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        found: Any = None
        if inputs_embeds is None and not output_attentions and not output_hidden_states:
            found = self._logits_at_once(
                input_ids, attention_mask, position_ids, past_key_values, use_cache, logits_to_keep
            )
        if found is None:
            arguments = (input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache)
            body = self.model(*arguments, output_attentions, output_hidden_states, return_dict=True)
            logits = self._logits(_kept(body.last_hidden_state, logits_to_keep))
            found = logits, body.past_key_values, body.hidden_states, body.attentions
        logits, cache, states, codes = found
        loss = None if labels is None else self._loss(logits, labels, **loss_options)
        outputs = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=cache, hidden_states=states, attentions=codes
        )
        whole = self.config.return_dict if return_dict is None else return_dict
        return outputs if whole else outputs.to_tuple()

    def _logits_at_once(
        self,
        input_ids: Any,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past_key_values: Any,
        use_cache: bool | None,
        logits_to_keep: Any,
    ) -> Any:
        """What the transformer makes of tokens by itself, in its own kernels; None if the parts have to be called.

        Every token of `generate` comes through here, so parts are read from where modules keep them.
        """
        parts: Any = self._modules
        model, head = parts["model"], parts.get("lm_head")
        transformer = model._modules["transformer"]
        if (
            not isinstance(input_ids, Tensor)
            or input_ids.dim() != 2  # what is wrong is said where the parts are called
            or type(logits_to_keep) is not int
            or (model.gradient_checkpointing and model.training)
            or why_called(model, HeadcodeModel) is not None
        ):
            return None
        if head is not None and not _is_the_table(head, transformer):
            return None
        cache = past_key_values
        if cache is None:
            cache = model.find_cache(None, use_cache, has_pairs(attention_mask))
        decoding = as_decoding_cache(cache, transformer.config)
        inputs = read_inputs(transformer.config, input_ids.shape, attention_mask, position_ids, decoding)
        if inputs.options or inputs.positions is not None:
            return None
        logits = transformer(
            input_ids,
            queries=slice(-logits_to_keep, None) if logits_to_keep else None,
            key_padding_mask=inputs.padding,
            cache=decoding,
        )
        return logits, cache, None, None

    def _logits(self, hidden: Tensor) -> Tensor:
        transformer, head = self.transformer, self.lm_head
        if head is None:
            return transformer.output_proj(hidden)  # type: ignore[misc]
        hidden = hidden / transformer.config.logit_divisor
        if _is_the_table(head, transformer):
            return hidden @ transformer.token_table(hidden.device).T
        return head(hidden)

    def _loss(self, logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        if logits.shape[:2] != labels.shape[:2]:
            given = f"{tuple(labels.shape)} for logits {tuple(logits.shape)}"
            raise ValueError(f"labels must have one entry per logit, got {given}.")
        options = {name: value for name, value in options.items() if value is not None and name in _LOSS_OPTIONS}
        return self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **options)

    def get_output_embeddings(self) -> nn.Module:
        return self.transformer.output_proj if self.lm_head is None else self.lm_head  # type: ignore[return-value]

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        if self.lm_head is not None:
            self.lm_head = new_embeddings
            return
        self.transformer.output_proj = new_embeddings  # type: ignore[assignment]
        self.config.output_dim = new_embeddings.out_features
        self.transformer.config = self.transformer.config.replace(output_dim=new_embeddings.out_features)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Our own cache, unless one was given or a kind of cache was asked for."""
        given = model_kwargs.get("past_key_values") is not None or generation_config.cache_implementation is not None
        if given or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
            return
        cache = HeadcodeCache(self, recurrent=False if generation_config.output_attentions else None)
        if getattr(generation_config, "is_assistant", False):
            cache.activate_past_recording()
        model_kwargs["past_key_values"] = cache

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> Any:
        """None where positions are the order of the tokens, or only their distances count."""
        mask = model_kwargs.get("attention_mask")
        if self.config.position not in ABSOLUTE or mask is None or bool((mask != 0).all()):
            return None
        return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)

    def init_continuous_batching(self, *args: Any, **options: Any) -> Any:
        """Also called by `generate_batch` and by servers."""
        raise NotImplementedError(
            "headcode models have no paged cache for continuous batching: call generate with a padded batch."
        )

    def create_masks_for_generate(self, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
        """The mask as it is, for static caches too."""
        return attention_mask


class _HeadOnModel(HeadcodePreTrainedModel):
    """A base model `model`, to which the library adds a head."""

    @property
    def transformer(self) -> Transformer:  # type: ignore[override]
        return self.model.transformer


class HeadcodeForSequenceClassification(GenericForSequenceClassification, _HeadOnModel):
    """Labels read from the last token that is not padding: (B, T) tokens to (B, num_labels)."""


class HeadcodeForTokenClassification(GenericForTokenClassification, _HeadOnModel):
    """A label for each token, from what is read up to it: (B, T) tokens to (B, T, num_labels)."""


class HeadcodeForQuestionAnswering(GenericForQuestionAnswering, _HeadOnModel):
    """Where an answer begins and ends in the text: (B, T) tokens to start and end logits (B, T)."""

    get_input_embeddings = HeadcodePreTrainedModel.get_input_embeddings  # the library's head looks for another name
    set_input_embeddings = HeadcodePreTrainedModel.set_input_embeddings


def _is_the_table(head: Any, transformer: Any) -> bool:
    """Whether the logits are read with the embeddings, which may have an adapter; else `head` must be called."""
    embedding = transformer._modules["embedding"]
    table = embedding._parameters.get("weight")
    if table is None:
        table = getattr(embedding, "weight", None)  # an adapter shows the table that it changes
    weight = head._parameters.get("weight")
    return weight is not None and weight is table and why_called(head, nn.Linear) is None


def _kept(hidden: Tensor, kept: int | Tensor) -> Tensor:
    """The last so many positions (0: all); or those of (positions,), (B, positions), or a boolean (B, T)."""
    if isinstance(kept, int):
        return hidden[:, -kept:] if kept else hidden
    if kept.dim() == 1:
        return hidden[:, kept]
    return hidden[kept] if kept.dtype == torch.bool else torch.take_along_dim(hidden, kept[..., None], 1)


AutoConfig.register(HeadcodeConfig.model_type, HeadcodeConfig, exist_ok=True)
AutoModel.register(HeadcodeConfig, HeadcodeModel, exist_ok=True)
AutoModelForCausalLM.register(HeadcodeConfig, HeadcodeForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(HeadcodeConfig, HeadcodeForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(HeadcodeConfig, HeadcodeForTokenClassification, exist_ok=True)
AutoModelForQuestionAnswering.register(HeadcodeConfig, HeadcodeForQuestionAnswering, exist_ok=True)


def _name_parts_for_peft() -> None:
    """What adapters change where nothing else is asked for: as in other decoders."""
    from peft.utils import constants

    kind, feedforward = HeadcodeConfig.model_type, ["feedforward.output_proj"]
    for name, mapping in vars(constants).items():
        if name.endswith("_TARGET_MODULES_MAPPING") and mapping.get("llama") == ["q_proj", "v_proj"]:
            mapping.setdefault(kind, ["query_proj", "value_proj"])
    constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING.setdefault(kind, feedforward)
    constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING.setdefault(
        kind, ["key_proj", "value_proj", *feedforward]
    )


if importlib.util.find_spec("peft") is not None:
    _name_parts_for_peft()
