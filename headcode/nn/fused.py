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
from headcode.nn.position import RelativeBias
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
    parameters = [parameter for pair in weights for parameter in pair]
    if not _is_plain(x, parameters) or x.dim() != 3 or x.shape[2] != block.attention.dim or x.numel() == 0:
        return None
    check_queries(queries, x.shape[1])
    first, last, _ = (slice(None) if queries is None else queries).indices(x.shape[1])
    attention = block.attention
    dropout = attention.dropout if attention.training else 0.0
    seed = resolve_seed(dropout, dropout_seed)
    relative = attention.relative_bias
    call = BlockCall(
        num_heads=attention.num_heads,
        first=first,
        last=last,
        gated=isinstance(block.feedforward, SwigluFeedForward),
        epsilons=(block.attention_norm.eps, block.feedforward_norm.eps),
        buckets=None if relative is None else relative.places(last - first, x.shape[1], first),
        attention={
            "causal": attention.causal,
            "scale": 1 / math.sqrt(attention.query_proj.out_features // attention.num_heads),
            "norm": attention.norm,
            "value_net": attention.value_net,
            "pooling": attention.pooling,
            "dropout": dropout,
            "dropout_seed": seed,
            "query_offset": first,
        },
        differentiable=functools.partial(block.run_op_by_op, queries=queries, dropout_seed=seed),
    )
    return fused_block(x, weights, call)


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
    attention, feedforward, relative = block.attention, block.feedforward, block.attention.relative_bias
    norms = (block.attention_norm, block.feedforward_norm)
    projections = (attention.query_proj, attention.key_proj, attention.value_proj, attention.output_proj)
    layers: tuple[Any, ...] = (feedforward.output_proj,)
    if isinstance(feedforward, GeluFeedForward):
        layers = (feedforward.hidden_proj, *layers)
    else:
        layers = (feedforward.gate_proj, feedforward.signal_proj, *layers)
    if (
        not all(_is_untouched(part, nn.Linear) for part in (*projections, *layers))
        or not all(_is_untouched(part, nn.LayerNorm) for part in norms)
        or not _is_untouched(attention, HyperAttention)
        or not _is_untouched(feedforward, type(feedforward))
        or not (relative is None or _is_untouched(relative, RelativeBias))
    ):
        return None
    pairs = [(part.weight, part.bias) for part in (norms[0], *projections, norms[1])]
    gated = len(layers) == 3
    hidden = (layers[0].weight, layers[1].weight if gated else layers[0].bias)
    inner = (layers[2].weight,) if gated else (layers[1].weight, layers[1].bias)
    return BlockWeights._make([*pairs, hidden, inner, () if relative is None else (relative.table,)])


def _is_untouched(part: nn.Module, kind: type[nn.Module]) -> bool:
    return (
        type(part) is kind
        and "forward" not in part.__dict__
        and not part._forward_hooks
        and not part._forward_pre_hooks
        and not part._backward_hooks
        and not part._backward_pre_hooks
    )


def _is_plain(x: Tensor, parameters: list[Any]) -> bool:
    """Whether these are ordinary float32 numbers, of widths that fit, and nothing traces or wraps the call."""
    if torch.is_autocast_enabled("cpu") or torch._C._get_tracing_state() or forward_ad._current_level >= 0:
        return False
    if any(parameter is None for parameter in parameters) or not eager.is_plain(x, *parameters):
        return False
    if not (x.requires_grad or any(parameter.requires_grad for parameter in parameters)):
        return False
    for t in (x, *parameters):
        if t.dtype is not torch.float32 or t.device.type != "cpu" or not t.is_contiguous():
            return False
    # The last may be the table of the relative bias, whose sizes do not matter.
    sizes = {size for parameter in parameters[:-1] for size in parameter.shape}
    return all(size % COLUMNS == 0 for size in sizes) and max(sizes) <= LARGEST_WIDTH
