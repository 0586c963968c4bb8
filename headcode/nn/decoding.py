"""A few new tokens of each sequence, with a cache, as one call of a kernel (`ops.cpu.decode`): which models, and how.

The kernel reads the model's own weights. What was found out about a model is kept with the cache and asked before each
token whether it still holds: parts replaced or hooked, codes captured or edited, weights that moved elsewhere. Weights
that change in place need no question. Whatever the kernel does not serve goes through the layers, with the same result.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headcode.nn.attention import HyperAttention
from headcode.nn.cache import DecodingCache, FastWeightState, KeyValueCache
from headcode.nn.config import can_recur
from headcode.nn.decoding_weights import NotServed, is_usable, make_plan, plain_parts, position_tables
from headcode.ops import eager
from headcode.private_api import forward_mode_active, has_global_hooks

if TYPE_CHECKING:
    from headcode.nn.transformer import Transformer

_SETTINGS = operator.attrgetter(
    *("observers", "editor", "training", "dropout", "causal", "norm", "value_net", "pooling", "position"),
    *("recurrent", "backend", "num_heads", "num_kv_heads", "window"),
)
"""Of an attention layer: all that decides what it computes, besides its weights."""
_EPSILON = operator.attrgetter("eps")
_KINDS = (KeyValueCache, FastWeightState)
"""Of caches, whose memory the kernel knows; whatever else takes keys and values is left to the layers."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MOST_TOKENS = 256
"""In one call, of all sequences together: attention of many more is sooner done by the kernels for whole sequences."""
_ONE = range(1)
_FEWEST_POSITIONS = 256
"""That a table is made for."""


def decode_compiled(
    model: Transformer, x: Tensor, queries: slice | None, padding: Tensor | None, cache: DecodingCache
) -> Tensor | None:
    """Logits of further tokens (B, T), or of `queries` alone; None if they must come from the layers.

    What is wrong with a call is for the layers to say, too.
    """
    if type(x) is not Tensor or x.dtype is not torch.int64 or x.dim() != 2 or not 0 < x.numel() <= MOST_TOKENS:
        return None
    if torch.is_grad_enabled() or x.device.type != "cpu" or _is_watched(x, padding):
        return None
    if queries is not None and (type(queries) is not slice or queries.step not in (None, 1)):
        return None
    try:
        kept = range(x.shape[1])[slice(None) if queries is None else queries]
    except TypeError:
        return None
    if not kept:
        return None
    step = cache.compiled
    if step is None or step.model is not model or not step.is_current():
        try:
            step = cache.compiled = CompiledDecoding(model)
        except NotServed:
            cache.compiled = None
            return None
    return step.run(x, kept, padding, cache)


def decode_next(model: Transformer, token: int, cache: DecodingCache) -> Tensor | None:
    """Logits (vocab,) after one further token of one sequence, without gradients; with as little Python as that takes.

    None, with nothing done, unless the kernel served the call before and all is as it was then.
    """
    step = cache.compiled
    if step is None or step.model is not model or _is_watched() or not step.is_current(alone=True):
        return None
    logits = step.run_token(token, cache)
    return None if logits is None else logits.view(-1)


def why_decoded_op_by_op(model: Transformer) -> str | None:
    """Why a model's new tokens go through its layers one by one; None if each is one call of a kernel.

    Example:
        >>> from headcode.nn import ModelConfig, Transformer
        >>> model = Transformer(ModelConfig(vocab_size=11, max_length=8, causal=True)).eval()
        >>> handle = model.blocks[0].attention.key_proj.register_forward_hook(print)
        >>> why_decoded_op_by_op(model)
        'blocks.0.attention.key_proj has hooks'
    """
    try:
        CompiledDecoding(model)
    except NotServed as reason:
        return str(reason)
    return None


def _is_watched(*tensors: Tensor | None) -> bool:
    """Whether something traces, wraps, transforms or watches the call."""
    return (
        not eager.is_plain(*tensors)
        or torch.is_autocast_enabled("cpu")
        or torch.jit.is_tracing()
        or forward_mode_active()
        or has_global_hooks()
    )


class CompiledDecoding:
    """What the kernel needs to know of one model, and whether that is still so."""

    def __init__(self, model: Transformer) -> None:
        self.model, self._config = model, model.config
        self._parts = plain_parts(model)
        self._own = [part.__dict__ for part in self._parts]
        self._hooks = [own[kind] for own in self._own for kind in _HOOKS]
        everywhere = (model, *self._parts)
        self._holders: list[dict[str, Any]] = [d for part in everywhere for d in (part._modules, part._parameters) if d]
        self._held = [*self._now_held()]
        self._weights = [weight for weight in self._held if isinstance(weight, Tensor)]
        self._attentions = [part for part in self._parts if type(part) is HyperAttention]
        self._norms = [part for part in self._parts if hasattr(part, "eps")]
        self._plan = make_plan(model)
        self._facts = self._now_true()  # after the plan, which refuses tensors without addresses
        self._tables, self._num_positions = position_tables(model), 0
        self._can_recur = can_recur(model.config)
        self._known: list[Any] = [None] * model.config.num_layers
        self._token = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
        self._token_number = self._token.numpy()

    def is_current(self, alone: bool = False) -> bool:
        """Whether the model still has the same parts, untouched, and its weights in the same memory.

        Asked for every token, so most of it is left to functions that are written in C. Hooks of the model itself count
        only if nobody calls it, `alone`.
        """
        if alone and ("forward" in self.model.__dict__ or any(self.model.__dict__[kind] for kind in _HOOKS)):
            return False
        return (
            self.model.config is self._config
            and not any(self._hooks)
            and not any(map(operator.contains, self._own, repeat("forward")))
            and sum(map(len, self._holders)) == len(self._held)
            and all(map(operator.is_, self._now_held(), self._held))
            and all(map(Tensor.is_contiguous, self._weights))
            and self._now_true() == self._facts
        )

    def _now_held(self) -> Iterator[Any]:
        """Modules and parameters, where the parts have them."""
        return chain.from_iterable(map(dict.values, self._holders))

    def _now_true(self) -> tuple[list[Any], ...]:
        """What can change of a part or of a weight that stays the same object."""
        places, kinds = list(map(Tensor.data_ptr, self._weights)), list(map(type, self._parts))
        # Observers are a list that changes in place.
        settings = [(len(observers), *rest) for observers, *rest in map(_SETTINGS, self._attentions)]
        return places, kinds, settings, list(map(_EPSILON, self._norms))

    def run_token(self, token: int, cache: DecodingCache) -> Tensor | None:
        """`run` for one token of one sequence."""
        self._token_number[0, 0] = token
        return self.run(self._token, _ONE, None, cache)

    def run(self, x: Tensor, kept: range, padding: Tensor | None, cache: DecodingCache) -> Tensor | None:
        """The logits, with the cache extended; None if the kernel cannot use this cache or padding."""
        past, (batch, new) = cache.length, x.shape
        layers: list[Any] = cache.layers
        kind = type(layers[0])
        if kind not in _KINDS or any(type(layer) is not kind or layer.length != past for layer in layers):
            return None
        recurrent = kind is FastWeightState
        if padding is not None and (
            padding.dtype is not torch.bool
            or padding.device.type != "cpu"
            or tuple(padding.shape) != (batch, new if recurrent else past + new)
        ):
            return None
        if past + new > self._num_positions and not self._find_positions(past + new):
            return None
        states = self._bind_states(layers, batch, past) if recurrent else None
        if states is None and (recurrent or not self._bind_keys(layers, batch, past, new)):
            return None
        logits = self._plan.run(x, past, kept, padding, recurrent)
        if logits is None:
            return None
        for index, layer in enumerate(layers):
            if states is not None:
                layer.state = states[index]
            layer.length = past + new
        return logits

    def _find_positions(self, length: int) -> bool:
        """Give the kernel tables for so many positions; whether the model has them."""
        config = self._config
        if config.learns_positions and length > config.max_length:
            return False
        self._num_positions = config.max_length if config.learns_positions else max(2 * length, _FEWEST_POSITIONS)
        self._plan.set_positions(*self._tables(self._num_positions))
        return True

    def _bind_keys(self, layers: list[Any], batch: int, past: int, new: int) -> bool:
        """Tell the kernel where the buffers are, wherever they are others than for the tokens before."""
        for index, layer in enumerate(layers):
            known = self._known[index]
            if (
                known is not None
                and layer.keys is known[0]
                and layer.values is known[1]
                and past + new <= known[2]
                and batch == known[3]
            ):
                continue
            shapes = self._plan.cache_shapes(batch)
            for buffer, (_, heads, width) in zip((layer.keys, layer.values), shapes, strict=True):
                if buffer is not None and (
                    not is_usable(buffer) or (batch, heads, width) != (*buffer.shape[:2], buffer.shape[3])
                ):
                    return False
            number = torch.empty((), dtype=torch.float32, device="cpu")
            keys, values = layer.reserve(*(number.expand(b, heads, new, width) for b, heads, width in shapes))
            self._plan.set_cache(index, keys, values)
            self._known[index] = keys, values, keys.shape[2], batch
        return True

    def _bind_states(self, layers: list[Any], batch: int, past: int) -> list[Tensor] | None:
        """New memory for the states after these tokens: who holds those before may go back to them."""
        if not self._can_recur:
            return None
        shape, states = self._plan.state_shape(batch), []
        for index, layer in enumerate(layers):
            state = layer.state
            if (state is None) != (past == 0):
                return None
            if state is not None and not (is_usable(state) and tuple(state.shape) == shape):
                return None
            states.append(torch.empty(shape, dtype=torch.float32, device="cpu"))
            self._plan.set_state(index, state, states[-1])
        return states
