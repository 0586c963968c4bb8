"""headcode's language models as Hugging Face models. Importing this module registers them with the Auto classes.

    from headcode.interop import HeadcodeForCausalLM
    model = HeadcodeForCausalLM.from_transformer(headcode.load("runs/lm-small-hyla-seed0"), end_token=0)
    model.save_pretrained("model")                                  # config.json and model.safetensors
    model = AutoModelForCausalLM.from_pretrained("model")           # in any process that imported this module
    model.generate(tokens, max_new_tokens=50)

`generate` keeps keys and values, or for the method `linear` with rotary (or no) positions a state of constant size.
"""

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headcode.nn import DecodingCache, FastWeightState, HyperAttention, ModelConfig, RelativeBias, Transformer
from headcode.nn.config import can_recur
from headcode.nn.generation import longest_sequence
from headcode.nn.initialisation import reset_linear

try:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
    from transformers.cache_utils import Cache
    from transformers.modeling_outputs import CausalLMOutputWithPast
except ModuleNotFoundError:
    raise ModuleNotFoundError("Hugging Face models need transformers: pip install 'headcode[hf]'.") from None

# The library keeps max_length for generation, so ours goes by the library's name for it.
_LENGTH = "max_position_embeddings"
_SKIPPED = ("input_dim", "max_length")
_FIELDS = {field.name: field.default for field in dataclasses.fields(ModelConfig) if field.name not in _SKIPPED}
_IGNORED_LABEL = -100


class HeadcodeConfig(PretrainedConfig):
    """The fields of a `ModelConfig` of tokens, as a Hugging Face configuration."""

    model_type = "headcode"
    attribute_map = {  # noqa: RUF012 - the library's own convention
        "hidden_size": "dim",
        "intermediate_size": "mlp_dim",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
    }

    def __init__(self, **values: Any) -> None:
        own = {name: values.pop(name) for name in list(values) if name in (*_FIELDS, _LENGTH)}
        defaults = {**_FIELDS, "vocab_size": 2048, _LENGTH: 128, "causal": True}
        for name, default in defaults.items():
            setattr(self, name, own.get(name, default))
        values.setdefault("tie_word_embeddings", False)  # the logits are read with the embedding: nothing to tie
        super().__init__(**values)

    def to_model_config(self) -> ModelConfig:
        """Checked: a wrong value is one clear sentence."""
        config = ModelConfig(max_length=getattr(self, _LENGTH), **{name: getattr(self, name) for name in _FIELDS})
        if not config.causal or config.vocab_size is None:
            raise ValueError("HeadcodeForCausalLM needs a causal model of tokens: causal=True and a vocab_size.")
        return config


class HeadcodeCache(Cache):
    """What `generate` hands from token to token: our own cache behind the library's interface."""

    def __init__(self, model: Transformer, recurrent: bool | None = None) -> None:
        super().__init__(layers=[])
        self.decoding: DecodingCache = model.new_cache(
            recurrent=can_recur(model.config) if recurrent is None else recurrent
        )

    def get_seq_length(self, layer_idx: int = 0, *args: Any, **kwargs: Any) -> int:
        return self.decoding.length

    def get_max_cache_shape(self, layer_idx: int = 0, *args: Any, **kwargs: Any) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for layer in self.decoding.layers:
            layer.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for layer in self.decoding.layers:
            layer.reorder(torch.arange(layer.batch_size or 0).repeat_interleave(repeats))

    def crop(self, max_length: int) -> None:
        raise ValueError("This cache cannot go back; assisted generation is not supported.")


class HeadcodeForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal `Transformer` with the interface of Hugging Face: (B, T) tokens to (B, T, vocab_size) logits."""

    config_class = HeadcodeConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules = ["TransformerBlock"]  # noqa: RUF012 - the library's own convention

    def __init__(self, config: HeadcodeConfig) -> None:
        super().__init__(config)
        self.model = Transformer(config.to_model_config())
        self.post_init()

    @classmethod
    def from_transformer(cls, model: Transformer, end_token: int | None = None) -> "HeadcodeForCausalLM":
        """The same weights (a copy) as a Hugging Face model; generation stops at `end_token`."""
        values = {name: getattr(model.config, name) for name in _FIELDS} | {_LENGTH: model.config.max_length}
        ends = {"eos_token_id": end_token, "pad_token_id": end_token, "bos_token_id": end_token}
        made = cls(HeadcodeConfig(**values, **ends)).to(next(model.parameters()).dtype)
        made.model.load_state_dict(model.state_dict())
        return made.train(model.training)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: HeadcodeCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **ignored: Any,
    ) -> Any:
        """Logits, and with `labels` (the tokens themselves; -100 is left out) the mean loss of the next token.

        `attention_mask` (B, T so far) has 0 where a token is padding; on the left for generation.
        """
        if past_key_values is None and use_cache and not torch.is_grad_enabled():
            past_key_values = HeadcodeCache(self.model)
        if past_key_values is not None and not isinstance(past_key_values, HeadcodeCache):
            raise ValueError(f"past_key_values must be a HeadcodeCache, got {type(past_key_values).__name__}.")
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        self._check_length(past + input_ids.shape[1])
        logits = self.model(
            input_ids,
            queries=slice(-logits_to_keep, None) if logits_to_keep else None,
            key_padding_mask=self._padding(attention_mask, past, input_ids.shape[1], past_key_values),
            cache=None if past_key_values is None else past_key_values.decoding,
        )
        loss = None if labels is None else _next_token_loss(logits, labels, num_items_in_batch)
        if return_dict is False:
            return tuple(part for part in (loss, logits, past_key_values) if part is not None)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        assert isinstance(value, nn.Embedding)
        self.model.embedding = value
        # The library resizes embeddings by putting another one here; the checks of tokens must know of it.
        self.model.config = self.model.config.replace(vocab_size=value.num_embeddings)

    def _check_length(self, length: int) -> None:
        limit = longest_sequence(self.model.config)
        if limit is not None and length > limit:
            raise ValueError(
                f"This model (position {self.model.config.position!r}) has places for {limit} tokens, got {length}; "
                f"shorten the prompt or max_new_tokens."
            )

    def _padding(
        self, attention_mask: Tensor | None, past: int, length: int, cache: HeadcodeCache | None
    ) -> Tensor | None:
        if attention_mask is None or bool((attention_mask != 0).all()):
            return None
        if attention_mask.dim() != 2:
            raise ValueError(f"attention_mask must be (batch, tokens so far), got {tuple(attention_mask.shape)}.")
        if self.model.config.position in ("learned", "sinusoidal", "relative_learned") and bool(
            (attention_mask[:, 0] == 0).any()
        ):
            raise ValueError(
                f"Padding on the left would shift the places of a model with position "
                f"{self.model.config.position!r}; give prompts of one length, or pad on the right to train."
            )
        padding = attention_mask == 0
        # A state has the past's padding behind it already; keys and values are masked anew each time.
        keeps_a_state = cache is not None and isinstance(cache.decoding.layers[0], FastWeightState)
        return padding[:, -length:] if keeps_a_state else padding[:, -(past + length) :]

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = HeadcodeCache(self.model)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """What a checkpoint did not bring is made as in `Transformer.reset_parameters`."""
        if isinstance(module, RelativeBias):
            module.fill_buckets()  # in no checkpoint, whatever the weights are
        if all(getattr(parameter, "_is_hf_initialized", False) for parameter in module.parameters(recurse=False)):
            return
        if isinstance(module, nn.Linear):
            reset_linear(module)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=math.sqrt(1 / module.embedding_dim))
        elif isinstance(module, (nn.LayerNorm, nn.RMSNorm, RelativeBias)):
            module.reset_parameters()
        elif isinstance(module, HyperAttention):
            module.reset_middle_layer()
        elif isinstance(module, Transformer) and module.positions is not None:
            nn.init.normal_(module.positions, std=0.02)


def _next_token_loss(logits: Tensor, labels: Tensor, num_items: Tensor | int | None) -> Tensor:
    """Cross-entropy of each next token: the mean, or over accumulated batches the sum divided by all their tokens."""
    if logits.shape[1] != labels.shape[1]:
        raise ValueError(f"labels must have one entry per logit, got {labels.shape[1]} for {logits.shape[1]} tokens.")
    targets = labels[:, 1:].flatten().to(logits.device)
    rows = logits[:, :-1].flatten(0, 1).float()
    if num_items is None:
        return F.cross_entropy(rows, targets, ignore_index=_IGNORED_LABEL)
    return F.cross_entropy(rows, targets, ignore_index=_IGNORED_LABEL, reduction="sum") / num_items


AutoConfig.register(HeadcodeConfig.model_type, HeadcodeConfig, exist_ok=True)
AutoModelForCausalLM.register(HeadcodeConfig, HeadcodeForCausalLM, exist_ok=True)
