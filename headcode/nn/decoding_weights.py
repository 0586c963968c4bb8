"""Which models the decoding kernel (`ops.cpu.decode`) serves, and where it finds their weights."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headcode.nn.attention import HyperAttention
from headcode.nn.checks import resolve_method
from headcode.nn.config import ModelConfig
from headcode.nn.feedforward import FEEDFORWARDS, SwigluFeedForward
from headcode.nn.fused import BACKENDS
from headcode.nn.plain import full_name, why_called
from headcode.nn.position import RelativeBias, relative_buckets, rotate, sinusoidal_positions
from headcode.ops import cpu
from headcode.ops.cpu.decode_plan import DecodePlan, DecodeSizes, Weights
from headcode.ops.cpu.records import COLUMNS

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


class NotServed(Exception):
    """Why the kernel does not serve a model."""


def is_usable(tensor: Tensor) -> bool:
    """Whether the kernel can read a tensor's numbers where they are."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.dtype is torch.float32
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def position_tables(model: Transformer) -> Any:
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
    pairs = torch.tensor([1.0, 0.0], dtype=torch.float32, device="cpu").repeat_interleave(width // 2)
    return rotate(pairs.expand(1, 1, length, width), 0)[0, 0].contiguous()


@functools.lru_cache(maxsize=8)
def _sinusoids(dim: int, length: int) -> Tensor:
    return sinusoidal_positions(length, dim, device=torch.device("cpu"))


@functools.lru_cache(maxsize=8)
def _buckets(num_buckets: int) -> Tensor:
    return relative_buckets(torch.arange(num_buckets + 1, device="cpu"), num_buckets)


def plain_parts(model: Transformer) -> list[nn.Module]:
    """All modules that the logits go through, but the model; each of the expected kind, and not watched."""
    from headcode.nn.transformer import Transformer, TransformerBlock  # which imports this module

    if type(model) is not Transformer:
        raise NotServed(f"the model is a {full_name(model)}")
    parts = []
    for path, part in model.named_modules():
        if not path or path.startswith("hint_projs"):
            continue
        name = path.rpartition(".")[2]
        kind = _KINDS.get(name, TransformerBlock)
        if name == "feedforward":
            kind = FEEDFORWARDS[model.config.feedforward]
        if reason := why_called(part, kind):
            raise NotServed(f"{path} {reason}")
        parts.append(part)
    return parts


def _check(model: Transformer) -> tuple[str, str]:
    """That the kernel computes what this model's layers do; returns norm and value net."""
    config = model.config
    if cpu.NO_KERNELS:
        raise NotServed(f"there are no CPU kernels: {cpu.NO_KERNELS}")
    if config.vocab_size is None or not config.causal:
        raise NotServed("the model is no causal model of tokens")
    norm, value_net = resolve_method(config.method, config.norm, config.value_net)
    if norm not in cpu.NORM_CODES or value_net not in cpu.NET_CODES or config.pooling != "sum":
        raise NotServed(f"the kernel has no norm {norm!r} with value net {value_net!r} and pooling {config.pooling!r}")
    if len(model.layers()) != config.num_layers or (model.output_proj is None) != (config.output_dim is None):
        raise NotServed("layers, or the last projection, were taken away or added")
    heads = config.num_heads
    expected = (norm, value_net, config.pooling, config.attention_position, heads, heads, None, True)
    for block in model.layers():
        attention = block.attention
        if attention.observers or attention.editor is not None:
            raise NotServed("codes are captured or edited")
        found = (attention.norm, attention.value_net, attention.pooling, attention.position, attention.num_heads)
        if (*found, attention.num_kv_heads, attention.window, attention.causal) != expected:
            raise NotServed("a layer was changed to another method than the model's")
        if any((part is None) == config.qk_norm for part in (attention.query_norm, attention.key_norm)):
            raise NotServed("norms of queries and keys were taken away or added")
        if attention.relative_bias is not None and config.attention_position != "relative":
            raise NotServed("a relative bias was added")
        if attention.backend not in BACKENDS or getattr(block.feedforward, "backend", "auto") not in BACKENDS:
            raise NotServed(f"the backend {attention.backend!r} was asked for")
        if attention.training and attention.dropout:
            raise NotServed("attention dropout is on")
    widths = (config.dim, config.qk_dim, config.v_dim, config.mlp_dim)
    if any(width % COLUMNS for width in widths):
        raise NotServed(f"all widths must be multiples of {COLUMNS}")
    if model.embedding.max_norm is not None:
        raise NotServed("embeddings are renormalised when they are read")
    return norm, value_net


def make_plan(model: Transformer) -> DecodePlan:
    """The kernel's record of a model; NotServed if it must go through its layers."""
    config, (norm, value_net) = model.config, _check(model)
    assert config.vocab_size is not None
    table = _weight(model.embedding, "weight", config.vocab_size, config.dim)
    weights: dict[str, Tensor | float] = {"embedding": table, "output_weight": table}
    if model.output_proj is not None:
        weights |= _linear("output", model.output_proj, config.output_dim or 0, config.dim)
    weights |= _layer_norm("final_norm", model.final_norm, config.dim)
    if model.positions is not None:
        _weight(model, "positions", len(model.positions), config.dim)
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
        output_scale=1.0 if model.output_proj is not None else 1 / config.logit_divisor,
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
        weights[f"{name}_epsilon"] = torch.finfo(torch.float32).eps if part.eps is None else float(part.eps)
    return weights


def _linear(name: str, part: nn.Module, rows: int, columns: int) -> Weights:
    weights = {f"{name}_weight": _weight(part, "weight", rows, columns)}
    if part._parameters["bias"] is not None:
        weights[f"{name}_bias"] = _weight(part, "bias", rows)
    return weights


def _layer_norm(name: str, part: nn.LayerNorm, dim: int) -> Weights:
    weights = {f"{name}.norm_{kind}": _weight(part, kind, dim) for kind in ("weight", "bias")}
    return {**weights, f"{name}.epsilon": float(part.eps)}  # a whole number would be written as one


def _weight(part: nn.Module, name: str, *shape: int) -> Tensor:
    weight = part._parameters.get(name)
    if weight is None or tuple(weight.shape) != shape:
        raise NotServed(f"a weight is missing, or another than the model's config says: {name}, {shape}")
    if not is_usable(weight):
        raise NotServed("the kernel is for contiguous float32 numbers on a CPU")
    return weight
