"""When a block takes the fused way (`ops.block`), and how: plain eager training in float32 on a CPU.

Whoever looks into a block or changes a part of it gets it op by op: codes captured or edited, hooks on its parts, parts
replaced or patched, tracing, autocast, functional transforms, padding masks, caches.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from headcode.nn.attention import HyperAttention
from headcode.nn.checks import check_queries
from headcode.nn.feedforward import GeluFeedForward, SwigluFeedForward
from headcode.nn.position import RelativeBias, relative_bucket
from headcode.ops import cpu, eager
from headcode.ops.block import COLUMNS, BlockCall, BlockWeights, fused_block
from headcode.ops.checks import resolve_seed

if TYPE_CHECKING:
    from headcode.nn.transformer import TransformerBlock

BACKENDS = ("auto", "cpu")
LARGEST_WIDTH = 512
"""Of any projection: beyond, the weights outgrow a core's cache."""


def run_fused(block: TransformerBlock, x: Tensor, queries: slice | None, dropout_seed: int | None) -> Tensor | None:
    """The block's output, or None if it must go op by op."""
    if not torch.is_grad_enabled() or not _is_served(block) or (weights := _weights(block)) is None:
        return None
    attention = block.attention
    parameters = [parameter for pair in weights for parameter in pair]
    if not _is_plain(x, parameters) or x.dim() != 3 or x.shape[2] != attention.dim or x.numel() == 0:
        return None
    gated = type(block.feedforward) is SwigluFeedForward
    if not _fit(tuple([parameter.shape for parameter in parameters]), attention.dim, attention.num_heads, gated):
        return None
    check_queries(queries, x.shape[1])
    first, last, _ = (slice(None) if queries is None else queries).indices(x.shape[1])
    dropout = attention.dropout if attention.training else 0.0
    seed = resolve_seed(dropout, dropout_seed)
    relative = attention.relative_bias
    call = BlockCall(
        num_heads=attention.num_heads,
        first=first,
        last=last,
        gated=gated,
        epsilons=(block.attention_norm.eps, block.feedforward_norm.eps),
        buckets=None if relative is None else _places(relative.num_buckets, last - first, x.shape[1], first),
        attention=(
            ("causal", attention.causal),
            ("scale", 1 / math.sqrt(attention.query_proj.out_features // attention.num_heads)),
            ("norm", attention.norm),
            ("value_net", attention.value_net),
            ("pooling", attention.pooling),
            ("dropout", dropout),
            ("query_offset", first),
        ),
        dropout_seed=seed,
        differentiable=functools.partial(_run_op_by_op, block, queries, seed),
    )
    return fused_block(x, weights, call)


class _OpByOp(nn.Module):
    def __init__(self, block: TransformerBlock) -> None:
        super().__init__()
        self.block = block

    def forward(self, *arguments: Any) -> Tensor:
        return self.block.run_op_by_op(*arguments)


def _run_op_by_op(
    block: TransformerBlock, queries: slice | None, dropout_seed: int, x: Tensor, *parameters: Tensor
) -> Tensor:
    """The block with these parameters, which need not be its own any more (`torch.func.functional_call`)."""
    names = ["attention_norm", *(f"attention.{part}_proj" for part in ("query", "key", "value", "output"))]
    names = [f"{part}.{kind}" for part in (*names, "feedforward_norm") for kind in ("weight", "bias")]
    if isinstance(block.feedforward, SwigluFeedForward):
        names += [f"feedforward.{part}_proj.weight" for part in ("gate", "signal", "output")]
    else:
        names += [f"feedforward.{part}_proj.{kind}" for part in ("hidden", "output") for kind in ("weight", "bias")]
    if block.attention.relative_bias is not None:
        names.append("attention.relative_bias.table")
    own = {f"block.{name}": parameter for name, parameter in zip(names, parameters, strict=True)}
    return torch.func.functional_call(_OpByOp(block), own, (x, None, queries, None, dropout_seed))


@functools.lru_cache(maxsize=64)
def _places(num_buckets: int, num_queries: int, num_keys: int, first: int) -> Tensor:
    """`RelativeBias.places`, remembered."""
    last = first + num_queries - 1
    buckets = [relative_bucket(last - i, num_buckets) for i in range(num_queries + num_keys - 1)]
    return torch.tensor(buckets, device="cpu")


def _is_served(block: TransformerBlock) -> bool:
    """Whether the kernels know this kind of block, and nobody looks into it."""
    attention, feedforward = block.attention, block.feedforward
    return (
        type(attention) is HyperAttention
        and not attention.observers
        and attention.editor is None
        and not attention.recurrent
        and attention.backend in BACKENDS
        and attention.norm in cpu.NORM_CODES
        and attention.value_net in cpu.NET_CODES
        and attention.pooling == "sum"
        and attention.position in ("none", "relative")
        and attention.query_norm is None
        and type(feedforward) in (GeluFeedForward, SwigluFeedForward)
        and getattr(feedforward, "backend", "auto") in BACKENDS
        and not cpu._NO_KERNELS
        and not _has_any_global_hook()
    )


def _weights(block: TransformerBlock) -> BlockWeights | None:
    """The block's parameters; None if a part is not what it was made as, or is watched by hooks."""
    # Read from where modules keep their parts: by attribute, Python would look everywhere else first.
    parts, inside, layers = block._modules, block.attention._modules, block.feedforward._modules
    attention, feedforward, relative = block.attention, block.feedforward, inside.get("relative_bias")
    gated = type(feedforward) is SwigluFeedForward
    names = ("gate_proj", "signal_proj", "output_proj") if gated else ("hidden_proj", "output_proj")
    norms = [parts[name] for name in ("attention_norm", "feedforward_norm")]
    projections = [inside[name] for name in ("query_proj", "key_proj", "value_proj", "output_proj")]
    dense = [layers[name] for name in names]
    for kind, members in ((nn.LayerNorm, norms), (nn.Linear, projections), (nn.Linear, dense)):
        if not all([_is_untouched(part, kind) for part in members]):
            return None
    if not _is_untouched(attention, HyperAttention) or not _is_untouched(feedforward, type(feedforward)):
        return None
    if relative is not None and not _is_untouched(relative, RelativeBias):
        return None
    pairs: list[Any] = [_weight_and_bias(part) for part in (norms[0], *projections, norms[1])]
    last = _weight_and_bias(dense[-1])
    if gated:
        pairs += [tuple(part._parameters["weight"] for part in dense[:2] if part is not None), last[:1]]
    else:
        pairs += [_weight_and_bias(dense[0]), last]
    return BlockWeights._make([*pairs, () if relative is None else (relative._parameters["table"],)])


def _weight_and_bias(part: nn.Module | None) -> tuple[Any, Any]:
    assert part is not None
    return part._parameters["weight"], part._parameters["bias"]


def _is_untouched(part: nn.Module | None, kind: type[nn.Module]) -> bool:
    return (
        type(part) is kind
        and "forward" not in part.__dict__
        and not part._forward_hooks
        and not part._forward_pre_hooks
        and not part._backward_hooks
        and not part._backward_pre_hooks
    )


def _is_plain(x: Tensor, parameters: list[Any]) -> bool:
    """Whether these are ordinary float32 numbers, as they are in memory, and nothing traces or wraps the call."""
    if torch.is_autocast_enabled("cpu") or torch._C._get_tracing_state() or forward_ad._current_level >= 0:
        return False
    if any(parameter is None for parameter in parameters) or not eager.is_plain(x, *parameters):
        return False
    if not (x.requires_grad or any(parameter.requires_grad for parameter in parameters)):
        return False
    for t in (x, *parameters):
        if t.dtype is not torch.float32 or t.device.type != "cpu" or not t.is_contiguous() or t.is_neg():
            return False
    return True


@functools.lru_cache(maxsize=64)
def _fit(shapes: tuple[tuple[int, ...], ...], dim: int, num_heads: int, gated: bool) -> bool:
    """Whether the parameters have widths that the kernels know, and all the same ones.

    Whoever put in others (`torch.func.functional_call`) is told so op by op; the kernels would read past their ends.
    """
    if not all(shapes):
        return False
    qk_width, v_width, inner_width = shapes[2][0], shapes[6][0], shapes[14][-1]
    expected: list[tuple[int, ...]] = [(dim,), (dim,)]
    for width in (qk_width, qk_width, v_width):
        expected += [(width, dim), (width,)]
    expected += [(dim, v_width), (dim,), (dim,), (dim,), (inner_width, dim)]
    expected += [(inner_width, dim), (dim, inner_width)] if gated else [(inner_width,), (dim, inner_width), (dim,)]
    # After these may come the table of the relative bias, whose sizes do not matter.
    if list(shapes[: len(expected)]) != expected or qk_width % num_heads or v_width % num_heads:
        return False
    widths = (dim, qk_width, v_width, inner_width)
    return all(width % COLUMNS == 0 for width in widths) and max(widths) <= LARGEST_WIDTH
