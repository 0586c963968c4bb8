"""A few new tokens of each sequence, with a cache, as one call of a kernel (`ops.cpu.decode`): which models, and how.

The kernel reads the model's own weights. What was found out about a model is kept with the cache and asked before each
token whether it still holds: parts replaced or hooked, codes captured or edited, weights that moved elsewhere. Weights
that change in place need no question. Whatever the kernel does not serve goes through the layers, with the same result.
"""

from __future__ import annotations

import functools
import math
import operator
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headcode.nn.attention import HyperAttention
from headcode.nn.cache import DecodingCache, FastWeightState
from headcode.nn.checks import resolve_method, why_not_recurrent
from headcode.nn.config import ModelConfig
from headcode.nn.feedforward import FEEDFORWARDS, SwigluFeedForward
from headcode.nn.fused import BACKENDS
from headcode.nn.plain import full_name, why_called
from headcode.nn.position import RelativeBias, relative_buckets, rotate, sinusoidal_positions
from headcode.ops import cpu, eager
from headcode.ops.cpu.decode_plan import DecodePlan, DecodeSizes, Weights
from headcode.ops.cpu.records import COLUMNS
from headcode.private_api import forward_mode_active, has_global_hooks

if TYPE_CHECKING:
    from headcode.nn.transformer import Transformer

_LINEARS = ("query_proj", "key_proj", "value_proj", "output_proj", "hidden_proj", "gate_proj", "signal_proj")
_KINDS: dict[str, type[nn.Module]] = {
    "embedding": nn.Embedding,
    "blocks": nn.ModuleList,
    "attention": HyperAttention,
    "relative_bias": RelativeBias,
    **dict.fromkeys(("attention_norm", "feedforward_norm", "final_norm"), nn.LayerNorm),
    **dict.fromkeys(("query_norm", "key_norm"), nn.RMSNorm),
    **dict.fromkeys(_LINEARS, nn.Linear),
}
"""What the parts of a model must be, by their last names."""
_SETTINGS = operator.attrgetter(
    *("observers", "editor", "training", "dropout", "causal", "norm", "value_net", "pooling", "position"),
    *("recurrent", "backend", "num_heads"),
)
"""Of an attention layer: all that decides what it computes, besides its weights."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MOST_TOKENS = 256
"""In one call, of all sequences together: of more, the products and attention of the layers are sooner done."""
_FEWEST_POSITIONS = 256


class _NotServed(Exception):
    """Why the kernel does not serve a model."""


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
    kept = range(x.shape[1])
    if queries is not None:
        if type(queries) is not slice or queries.step not in (None, 1) or not (kept := kept[queries]):
            return None
    step = cache.compiled
    if step is None or step.model is not model or not step.is_current():
        try:
            step = cache.compiled = CompiledDecoding(model)
        except _NotServed:
            cache.compiled = None
            return None
    return step.run(x, kept, padding, cache)


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
    except _NotServed as reason:
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
        self._parts = _plain_parts(model)
        self._own = [part.__dict__ for part in self._parts]
        self._hooks = [own[kind] for own in self._own for kind in _HOOKS]
        everywhere = (model, *self._parts)
        self._holders = [d for part in everywhere for d in (part._modules, part._parameters) if d]
        self._held = self._now_held()
        self._weights = [weight for weight in self._held if isinstance(weight, Tensor)]
        self._attentions = [part for part in self._parts if type(part) is HyperAttention]
        self._facts = self._now_true()
        self._plan = _plan(model)
        self._tables, self._num_positions = _position_tables(model), 0
        self._can_recur = _can_recur(model.config)
        self._known: list[Any] = [None] * model.config.num_layers

    def is_current(self) -> bool:
        """Whether the model still has the same parts, untouched, and its weights in the same memory.

        Asked for every token, so most of it is left to functions that are written in C.
        """
        held = self._now_held()
        return (
            self.model.config is self._config
            and not any(self._hooks)
            and not any(map(operator.contains, self._own, repeat("forward")))
            and len(held) == len(self._held)
            and all(map(operator.is_, held, self._held))
            and self._now_true() == self._facts
        )

    def _now_held(self) -> list[Any]:
        """Modules and parameters, where the parts have them."""
        return [*chain.from_iterable(map(dict.values, self._holders))]

    def _now_true(self) -> tuple[list[Any], ...]:
        """What can change of a part or of a weight that stays the same object."""
        places, kinds = list(map(Tensor.data_ptr, self._weights)), list(map(type, self._parts))
        # Observers are a list that changes in place.
        return places, kinds, [(len(observers), *rest) for observers, *rest in map(_SETTINGS, self._attentions)]

    def run(self, x: Tensor, kept: range, padding: Tensor | None, cache: DecodingCache) -> Tensor | None:
        """The logits, with the cache extended; None if the kernel cannot use this cache or padding."""
        layers, past, (batch, new) = cache.layers, cache.length, x.shape
        kind = type(layers[0])
        if any(type(layer) is not kind or layer.length != past for layer in layers):
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
        if recurrent:
            states = self._bind_states(layers, batch, past)
            bound = bool(states)
        else:
            bound = self._bind_keys(layers, batch, past, new)
        logits = self._plan.run(x, past, kept, padding, recurrent) if bound else None
        if logits is None:
            return None
        for index, layer in enumerate(layers):
            if recurrent:
                layer.state = self._known[index] = states[index]
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
                    not _is_usable(buffer) or (batch, heads, width) != (*buffer.shape[:2], buffer.shape[3])
                ):
                    return False
            keys, values = layer.reserve(*(torch.empty(()).expand(b, heads, new, width) for b, heads, width in shapes))
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
            if state is not None and (state is not self._known[index] or state.shape[0] != batch):
                if not _is_usable(state) or tuple(state.shape) != shape:
                    return None
            states.append(torch.empty(shape))
            self._plan.set_state(index, state, states[-1])
        return states


def _is_usable(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.dtype is torch.float32
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def _position_tables(model: Transformer) -> Any:
    """A function of the number of positions: what the kernel adds to tokens, and turns queries and keys by."""
    config = model.config
    if model.positions is not None:
        return lambda length: (model.positions, None)
    if config.position == "sinusoidal":
        return lambda length: (_sinusoids(config.dim, length), None)
    if config.position == "rotary":
        return lambda length: (None, _rotations(config.qk_dim // config.num_heads, length))
    return lambda length: (None, None)


@functools.lru_cache(maxsize=8)
def _rotations(width: int, length: int) -> Tensor:
    """(length, width): cosines and sines of each position, which `rotate` makes of pairs (1, 0)."""
    pairs = torch.tensor([1.0, 0.0], device="cpu").repeat_interleave(width // 2)
    return rotate(pairs.expand(1, 1, length, width), 0)[0, 0].contiguous()


@functools.lru_cache(maxsize=8)
def _sinusoids(dim: int, length: int) -> Tensor:
    return sinusoidal_positions(length, dim, device=torch.device("cpu"))


@functools.lru_cache(maxsize=8)
def _buckets(num_buckets: int) -> Tensor:
    return relative_buckets(torch.arange(num_buckets + 1, device="cpu"), num_buckets)


def _plain_parts(model: Transformer) -> list[nn.Module]:
    """All modules that the logits go through, but the model; each of the expected kind, and not watched."""
    from headcode.nn.transformer import Transformer, TransformerBlock  # which imports this module

    if type(model) is not Transformer:
        raise _NotServed(f"the model is a {full_name(model)}")
    parts = []
    for path, part in model.named_modules():
        if not path or path.startswith("hint_projs"):
            continue
        name = path.rpartition(".")[2]
        kind = _KINDS.get(name, TransformerBlock)
        if name == "feedforward":
            kind = FEEDFORWARDS[model.config.feedforward]
        if reason := why_called(part, kind):
            raise _NotServed(f"{path} {reason}")
        parts.append(part)
    return parts


def _check(model: Transformer) -> tuple[str, str]:
    """That the kernel computes what this model's layers do; returns norm and value net."""
    config = model.config
    if cpu.NO_KERNELS:
        raise _NotServed(f"there are no CPU kernels: {cpu.NO_KERNELS}")
    if config.vocab_size is None or not config.causal:
        raise _NotServed("the model is no causal model of tokens")
    norm, value_net = resolve_method(config.method, config.norm, config.value_net)
    if norm not in cpu.NORM_CODES or value_net not in cpu.NET_CODES or config.pooling != "sum":
        raise _NotServed(f"the kernel has no norm {norm!r} with value net {value_net!r} and pooling {config.pooling!r}")
    expected = (norm, value_net, config.pooling, config.attention_position, config.num_heads, True)
    for block in model.layers():
        attention = block.attention
        if attention.observers or attention.editor is not None:
            raise _NotServed("codes are captured or edited")
        found = (attention.norm, attention.value_net, attention.pooling, attention.position, attention.num_heads)
        if (*found, attention.causal) != expected:
            raise _NotServed("a layer was changed to another method than the model's")
        if attention.backend not in BACKENDS or getattr(block.feedforward, "backend", "auto") not in BACKENDS:
            raise _NotServed(f"the backend {attention.backend!r} was asked for")
        if attention.training and attention.dropout:
            raise _NotServed("attention dropout is on")
    widths = (config.dim, config.qk_dim, config.v_dim, config.mlp_dim)
    if any(width % COLUMNS for width in widths):
        raise _NotServed(f"all widths must be multiples of {COLUMNS}")
    if model.embedding.max_norm is not None:
        raise _NotServed("embeddings are renormalised when they are read")
    return norm, value_net


def _can_recur(config: ModelConfig) -> bool:
    norm, value_net = resolve_method(config.method, config.norm, config.value_net)
    return why_not_recurrent(norm, value_net, config.pooling, config.causal, config.attention_position, 0.0) is None


def _plan(model: Transformer) -> DecodePlan:
    config, (norm, value_net) = model.config, _check(model)
    assert config.vocab_size is not None
    table = _weight(model.embedding, "weight", config.vocab_size, config.dim)
    weights: dict[str, Tensor | float] = {"embedding": table, "output_weight": table}
    if model.output_proj is not None:
        weights |= _linear("output", model.output_proj, config.output_dim or 0, config.dim)
    weights |= _layer_norm("final_norm", model.final_norm, config.dim)
    if model.positions is not None:
        _weight(model, "positions", *model.positions.shape)
    banded = config.attention_position == "relative"
    if banded:
        weights["buckets"] = _buckets(config.max_length)
    gated = config.feedforward == "swiglu"
    sizes = DecodeSizes(
        dim=config.dim,
        heads=config.num_heads,
        qk_width=config.qk_dim // config.num_heads,
        v_width=config.v_dim // config.num_heads,
        inner_width=config.mlp_dim,
        hidden_width=2 * config.mlp_dim if gated else config.mlp_dim,
        vocab_size=config.vocab_size,
        outputs=config.output_dim or config.vocab_size,
        norm=cpu.NORM_CODES[norm],
        net=cpu.NET_CODES[value_net],
        num_buckets=config.max_length if banded else 0,
        output_scale=1.0 if model.output_proj is not None else 1 / math.sqrt(config.dim),
    )
    return DecodePlan(sizes, weights, [_layer_weights(block, config) for block in model.layers()])


def _layer_weights(block: Any, config: ModelConfig) -> Weights:
    attention, feedforward, dim, inner = block.attention, block.feedforward, config.dim, config.mlp_dim
    weights = {
        **_layer_norm("attention_norm", block.attention_norm, dim),
        **_layer_norm("feedforward_norm", block.feedforward_norm, dim),
        **_linear("query", attention.query_proj, config.qk_dim, dim),
        **_linear("key", attention.key_proj, config.qk_dim, dim),
        **_linear("value", attention.value_proj, config.v_dim, dim),
        **_linear("output", attention.output_proj, dim, config.v_dim),
        **_linear("inner", feedforward.output_proj, dim, inner),
    }
    if type(feedforward) is SwigluFeedForward:
        weights |= _linear("hidden", feedforward.gate_proj, inner, dim)
        weights |= _linear("signal", feedforward.signal_proj, inner, dim)
    else:
        weights |= _linear("hidden", feedforward.hidden_proj, inner, dim)
    if attention.relative_bias is not None:
        weights["table"] = _weight(attention.relative_bias, "table", config.num_heads, config.max_length)
    for name in ("query", "key") if config.qk_norm else ():
        part = getattr(attention, f"{name}_norm")
        weights[f"{name}_norm"] = _weight(part, "weight", config.qk_dim // config.num_heads)
        weights[f"{name}_epsilon"] = torch.finfo(torch.float32).eps if part.eps is None else part.eps
    return weights


def _linear(name: str, part: nn.Module, rows: int, columns: int) -> Weights:
    weights = {f"{name}_weight": _weight(part, "weight", rows, columns)}
    if part._parameters["bias"] is not None:
        weights[f"{name}_bias"] = _weight(part, "bias", rows)
    return weights


def _layer_norm(name: str, part: nn.Module, dim: int) -> Weights:
    weights = {f"{name}.norm_{kind}": _weight(part, kind, dim) for kind in ("weight", "bias")}
    return {**weights, f"{name}.epsilon": float(part.eps)}


def _weight(part: nn.Module, name: str, *shape: int) -> Tensor:
    weight = part._parameters.get(name)
    if weight is None or tuple(weight.shape) != shape:
        raise _NotServed(f"a weight is missing, or another than the model's config says: {name}, {shape}")
    if not _is_usable(weight):
        raise _NotServed("the kernel is for contiguous float32 numbers on a CPU")
    return weight
