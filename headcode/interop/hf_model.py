"""`HeadcodeModel`: a `Transformer` as a Hugging Face base model, and what models with a head share with it."""

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import can_return_tuple, logging

from headcode.interop.hf_cache import HeadcodeCache, as_decoding_cache
from headcode.interop.hf_card import write_card
from headcode.interop.hf_config import FIELDS, LENGTH, HeadcodeConfig
from headcode.interop.hf_inputs import Inputs, has_pairs, is_compiling, read_inputs
from headcode.nn import DecodingCache, HyperAttention, RelativeBias, Transformer, capture_codes, edit_codes
from headcode.nn.cache import unchanged_on_error
from headcode.nn.capture import find_attentions
from headcode.nn.initialisation import reset_linear

logger = logging.get_logger(__name__)
_HARMLESS = ("return_dict", "num_items_in_batch")
"""Options that heads of the library's hand down, and have dealt with themselves."""


class HeadcodePreTrainedModel(PreTrainedModel):
    """Weights, embeddings and files, the same for every headcode model."""

    config_class = HeadcodeConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TransformerBlock"]  # noqa: RUF012 - the library's own convention
    _supports_context_parallel = False
    transformer: Transformer

    @classmethod
    def from_transformer(cls, model: Transformer, end_token: int | None = None, **settings: Any) -> Any:
        """The same weights (a copy) as a Hugging Face model; generation stops at `end_token`.

        `settings` are further ones of the configuration, such as `num_labels`.
        """
        values = {name: getattr(model.config, name) for name in FIELDS} | {LENGTH: model.config.max_length}
        ends = {"eos_token_id": end_token, "pad_token_id": end_token, "bos_token_id": end_token}
        made = cls(HeadcodeConfig(**values, **ends, **settings)).to(next(model.parameters()).dtype)
        made.transformer.load_state_dict(model.state_dict())
        return made.train(model.training)

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> Any:
        """As the library's, but for layers divided by heads, or over a pipeline, which it would not divide."""
        plan = options.get("distributed_config")
        sizes = [options.get("tp_size"), *(getattr(plan, f"{kind}_size", None) for kind in ("tp", "pp"))]
        if options.get("tp_plan") or any(size is not None and size > 1 for size in sizes):
            raise ValueError(
                "A code spans all heads of its layer, so layers are not divided by heads or over a pipeline: "
                "use FSDP or a device_map in place of tp_plan, tp_size and pp_size."
            )
        return super().from_pretrained(*args, **options)

    def _check_and_adjust_attn_implementation(self, attn_implementation: Any, *args: Any, **options: Any) -> Any:
        if attn_implementation not in (None, "eager"):
            raise ValueError(
                f"headcode models compute attention in kernels of their own: leave attn_implementation out, or choose "
                f"a backend in the configuration, got {attn_implementation!r}."
            )
        return "eager"

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **options: Any) -> None:
        """Configuration, weights, and a model card if the folder has none."""
        super().save_pretrained(save_directory, *args, **options)
        if options.get("is_main_process", True):
            write_card(self, save_directory)

    @property
    def device(self) -> torch.device:
        """Of the embeddings. `generate` asks twice for every token, and the library looks through all modules."""
        weight = self.transformer.embedding._parameters.get("weight")
        return super().device if weight is None else weight.device

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        if not isinstance(value, nn.Embedding):
            raise TypeError(f"The input embeddings must be an nn.Embedding, got {type(value).__name__}.")
        self.transformer.embedding = value
        # The library resizes embeddings by putting another one here; the checks of tokens must know of it.
        self.transformer.config = self.transformer.config.replace(vocab_size=value.num_embeddings)

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1, **options: Any
    ) -> None:
        for module in self.modules():
            if isinstance(module, HeadcodeModel):
                module.gradient_checkpointing, module.checkpoint_every = enable, every_n_layers
                module._gradient_checkpointing_func = gradient_checkpointing_func

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


class HeadcodeModel(HeadcodePreTrainedModel):
    """A causal `Transformer` without its logits: (B, T) tokens to (B, T, dim), normalised.

    `attentions` are the codes of each layer, (B, H, T, tokens so far), and `hidden_states` the tokens before each layer
    and at the end. Where gradients are on, codes are part of the graph, unless attention dropout comes after them.
    """

    def __init__(self, config: HeadcodeConfig) -> None:
        super().__init__(config)
        self.gradient_checkpointing, self.checkpoint_every = False, 1
        self._gradient_checkpointing_func: Any = None
        self.transformer = Transformer(config.to_model_config())
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: Any = None,
        **ignored: Any,
    ) -> Any:
        """Args:

        attention_mask: (B, tokens so far) has 0 where a token is padding, on the left for generation; or of pairs,
            (B, 1, T, tokens so far), boolean with True where a pair is seen, or floating with 0 there.
        position_ids: (B or 1, T). Positions that begin anew pack several sequences into a row, which do not see
            each other. Rotary, learned and sinusoidal positions heed any others; the T5 band refuses them.
        past_key_values: a HeadcodeCache, or a cache of the library's such as DynamicCache or StaticCache.
        use_cache: by default as the configuration says, where gradients are off.
        output_hidden_states: True, or the layers whose outputs are wanted.
        """
        refuse(ignored)
        wants_codes = self.config.output_attentions if output_attentions is None else output_attentions
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        cache = self.find_cache(past_key_values, use_cache, bool(wants_codes) or has_pairs(attention_mask))
        tokens = self._tokens(input_ids, inputs_embeds)
        decoding = as_decoding_cache(cache, self.transformer.config)
        shape = (tokens.shape[0], tokens.shape[1])
        inputs = read_inputs(self.transformer.config, shape, attention_mask, position_ids, decoding)
        states: list[Tensor] | None = None if wanted is None or wanted is False else []
        with self._recorded_codes(bool(wants_codes)) as codes:
            hidden = self._run(tokens, inputs, decoding, states, recomputed=not wants_codes)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=cache,
            hidden_states=None if states is None else _chosen([*states, hidden], wanted),
            attentions=tuple(codes[layer] for layer in sorted(codes)) if wants_codes else None,
        )

    def _tokens(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give input_ids or inputs_embeds, one of the two.")
        if inputs_embeds is None:
            self.transformer.check_input(input_ids)  # type: ignore[arg-type]
            return input_ids  # type: ignore[return-value]
        if inputs_embeds.dim() != 3 or inputs_embeds.shape[2] != self.config.dim:
            given = tuple(inputs_embeds.shape)
            raise ValueError(f"inputs_embeds must be (batch, length, {self.config.dim}), got {given}.")
        return inputs_embeds

    def find_cache(self, past_key_values: Any, use_cache: bool | None, by_pairs: bool) -> Any:
        """The cache of a call: the caller's, a new one (with keys, where pairs of tokens are told apart), or None."""
        if past_key_values is None:
            if use_cache is None:
                use_cache = self.config.use_cache and not torch.is_grad_enabled() and not is_compiling()
            if not use_cache:
                return None
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            logger.warning_once("Layers whose activations are recomputed keep no cache: use_cache is False here.")
            return None
        if past_key_values is not None:
            return past_key_values
        return HeadcodeCache(self, recurrent=False if by_pairs or torch.is_grad_enabled() else None)

    def _run(
        self,
        tokens: Tensor,
        inputs: Inputs,
        cache: DecodingCache | None,
        states: list[Tensor] | None,
        recomputed: bool,
    ) -> Tensor:
        """Tokens, or embedded ones, through all layers and the last norm."""
        past = 0 if cache is None else cache.length
        places = past if inputs.positions is None else inputs.positions
        embedded = tokens if tokens.is_floating_point() else self.transformer.embedding(tokens)
        checkpointing = self.gradient_checkpointing and self.training and recomputed
        with nullcontext() if cache is None else unchanged_on_error(cache.layers):
            hidden = self.transformer.run_layers(
                self.transformer.add_positions(embedded, places),
                key_padding_mask=inputs.padding,
                cache=cache,
                states=states,
                call=self._checkpointed() if checkpointing else None,
                **inputs.options,
            )
        return self.transformer.final_norm(hidden)

    def _checkpointed(self) -> Callable[..., Tensor]:
        """Calls each block so that its activations are recomputed, or each `checkpoint_every`-th."""
        count = itertools.count()

        def call(block: nn.Module, hidden: Tensor, **arguments: Any) -> Tensor:
            if next(count) % self.checkpoint_every:
                return block(hidden, **arguments)
            return self._gradient_checkpointing_func(functools.partial(block.__call__, **arguments), hidden)

        return call

    @contextmanager
    def _recorded_codes(self, wanted: bool) -> Iterator[dict[int, Tensor]]:
        codes: dict[int, Tensor] = {}
        if not wanted:
            yield codes
            return
        attentions = find_attentions(self.transformer)
        dropped = any(attention.training and attention.dropout for attention in attentions)
        edited = any(attention.editor is not None for attention in attentions)
        if torch.is_grad_enabled() and not dropped and not edited:
            with edit_codes(self.transformer, lambda layer, found: codes.setdefault(layer, found)):
                yield codes
        else:
            with capture_codes(self.transformer, detach=not torch.is_grad_enabled()) as codes:
                yield codes


def refuse(options: dict[str, Any]) -> None:
    """Nothing is ignored in silence: an option that says other than how these models are is an error."""
    for name, value in options.items():
        if value is not None and value is not (name == "is_causal") and name not in _HARMLESS:
            raise TypeError(f"headcode models do nothing with {name!r}; leave it out.")


def _chosen(states: list[Tensor], wanted: Any) -> tuple[Tensor | None, ...]:
    """All hidden states; or, where layers are named, their outputs alone and None for the others."""
    if wanted is True:
        return tuple(states)
    return tuple(state if layer in set(wanted) else None for layer, state in enumerate(states[1:]))


class _FormerNames(WeightRenaming):
    """Files of headcode 0.1 have the parts of a Transformer one level further up. New files are as the model is."""

    __slots__ = ()

    def __init__(self, source_patterns: Any = None, target_patterns: Any = None) -> None:
        parts = "embedding|positions|blocks|final_norm|output_proj|hint_projs"
        super().__init__(rf"^({parts})", r"transformer.\1")

    def reverse_transform(self) -> "_FormerNames":
        return self


register_checkpoint_conversion_mapping(HeadcodeModel.__name__, [_FormerNames()], overwrite=True)
