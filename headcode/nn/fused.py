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

from headcode.nn.attention import HyperAttention
from headcode.nn.checks import check_queries
from headcode.nn.feedforward import GeluFeedForward, SwigluFeedForward
from headcode.nn.plain import full_name, why_called
from headcode.nn.position import RelativeBias, relative_buckets
from headcode.ops import cpu, eager
from headcode.ops.cpu.block import COLUMNS, BlockCall, BlockWeights, fused_block
from headcode.ops.options import AttentionOptions, resolve_seed
from headcode.private_api import forward_mode_active, has_global_hooks

if TYPE_CHECKING:
    from headcode.nn.transformer import TransformerBlock

BACKENDS = ("auto", "cpu")
LARGEST_WIDTH = 512
"""Of any projection: beyond, the weights outgrow a core's cache."""


def run_fused(block: TransformerBlock, x: Tensor, queries: slice | None, dropout_seed: int | None) -> Tensor | None:
    """The block's output, or None if it must go op by op."""
    weights = _weights_or_reason(block, x)
    if isinstance(weights, str):
        return None
    attention, gated = block.attention, type(block.feedforward) is SwigluFeedForward
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
        attention=AttentionOptions(
            causal=attention.causal,
            scale=1 / math.sqrt(attention.query_proj.out_features // attention.num_heads),
            norm=attention.norm,
            value_net=attention.value_net,
            pooling=attention.pooling,
            dropout=dropout,
            dropout_seed=seed,
            query_offset=first,
        ),
        differentiable=functools.partial(_run_op_by_op, block, queries, seed),
    )
    out = fused_block(x, weights, call)
    # Its kernels leave later tokens out by multiplying with 0, but 0 · NaN is NaN (see `ops.cpu`).
    return None if attention.causal and out.detach().sum().isnan() else out


def why_op_by_op(block: TransformerBlock, x: Tensor) -> str | None:
    """Why a block that is called with tokens x (B, T, dim) goes op by op; None if it is fused.

    With a padding mask, a cache or a context a block always goes op by op.

    Example:
        >>> from headcode.nn import ModelConfig, Transformer
        >>> block = Transformer(ModelConfig(input_dim=5, output_dim=1, max_length=16)).blocks[0]
        >>> handle = block.attention.key_proj.register_forward_hook(print)
        >>> why_op_by_op(block, torch.randn(3, 16, 128))
        'attention.key_proj has hooks'
    """
    found = _weights_or_reason(block, x)
    return found if isinstance(found, str) else None


def _weights_or_reason(block: TransformerBlock, x: Tensor) -> BlockWeights | str:
    """The block's parameters, or why it must go op by op."""
    if not torch.is_grad_enabled():
        return "no gradients are asked for"
    if reason := _why_unserved(block):
        return reason
    weights = _weights(block)
    if isinstance(weights, str):
        return weights
    parameters = [parameter for pair in weights for parameter in pair]
    if reason := _why_not_plain(x, parameters):
        return reason
    attention, gated = block.attention, type(block.feedforward) is SwigluFeedForward
    if x.dim() != 3 or x.shape[2] != attention.dim or x.numel() == 0:
        return f"the tokens must have shape (batch, length, {attention.dim}) and not be empty, got {tuple(x.shape)}"
    if not _fit(tuple([parameter.shape for parameter in parameters]), attention.dim, attention.num_heads, gated):
        return f"all widths must be multiples of {COLUMNS} and at most {LARGEST_WIDTH}"
    return weights


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
    distances = first + num_queries - 1 - torch.arange(num_queries + num_keys - 1, device="cpu")
    return relative_buckets(distances, num_buckets)


def _why_unserved(block: TransformerBlock) -> str | None:
    """Why the kernels do not know this kind of block, or who looks into it."""
    attention, feedforward = block.attention, block.feedforward
    if type(attention) is not HyperAttention:
        return f"attention is a {full_name(attention)}"
    if type(feedforward) not in (GeluFeedForward, SwigluFeedForward):
        return f"feedforward is a {full_name(feedforward)}"
    if attention.observers or attention.editor is not None:
        return "codes are captured or edited"
    if attention.backend not in BACKENDS or getattr(feedforward, "backend", "auto") not in BACKENDS:
        return f"the backend {attention.backend!r} was asked for"
    if (
        attention.recurrent
        or attention.norm not in cpu.NORM_CODES
        or attention.value_net not in cpu.NET_CODES
        or attention.pooling != "sum"
        or attention.position not in ("none", "relative")
        or attention.query_norm is not None
    ):
        return (
            f"the kernels have no block with norm {attention.norm!r}, value net {attention.value_net!r}, "
            f"pooling {attention.pooling!r}, position {attention.position!r}, "
            f"qk_norm {attention.query_norm is not None} and recurrent {attention.recurrent}"
        )
    if cpu._NO_KERNELS:
        return "there are no CPU kernels on this machine"
    return "hooks of all modules are set" if has_global_hooks() else None


def _weights(block: TransformerBlock) -> BlockWeights | str:
    """The block's parameters; or which part must be called, and why."""
    # Read from where modules keep their parts: by attribute, Python would look everywhere else first.
    parts, inside, layers = block._modules, block.attention._modules, block.feedforward._modules
    gated = type(block.feedforward) is SwigluFeedForward
    names = ("gate_proj", "signal_proj", "output_proj") if gated else ("hidden_proj", "output_proj")
    norms = {name: parts[name] for name in ("attention_norm", "feedforward_norm")}
    projections = {name: inside[name] for name in ("query_proj", "key_proj", "value_proj", "output_proj")}
    dense = {name: layers[name] for name in names}
    relative = inside.get("relative_bias")
    wholes: list[tuple[type[nn.Module], str, dict[str, nn.Module | None]]] = [
        (nn.LayerNorm, "", norms),
        (nn.Linear, "attention.", projections),
        (nn.Linear, "feedforward.", dense),
        (HyperAttention, "", {"attention": block.attention}),
        (type(block.feedforward), "", {"feedforward": block.feedforward}),
        (RelativeBias, "attention.", {} if relative is None else {"relative_bias": relative}),
    ]
    for kind, whole, members in wholes:
        for name, part in members.items():
            if reason := why_called(part, kind):
                return f"{whole}{name} {reason}"
    first_norm, second_norm = norms.values()
    pairs: list[Any] = [_weight_and_bias(part) for part in (first_norm, *projections.values(), second_norm)]
    *hidden, inner = (_weight_and_bias(part) for part in dense.values())
    pairs += [tuple(weight for weight, _ in hidden), inner[:1]] if gated else [*hidden, inner]
    return BlockWeights._make([*pairs, () if relative is None else (relative._parameters["table"],)])


def _weight_and_bias(part: nn.Module | None) -> tuple[Any, Any]:
    assert part is not None
    return part._parameters.get("weight"), part._parameters.get("bias")


def _why_not_plain(x: Tensor, parameters: list[Any]) -> str | None:
    """Why these are not ordinary float32 numbers, as they are in memory, or what traces or wraps the call."""
    if torch.is_autocast_enabled("cpu") or torch.jit.is_tracing() or forward_mode_active():
        return "the call is traced, under autocast or differentiated forward"
    if any(parameter is None for parameter in parameters):
        return "a weight or a bias is missing"
    if not eager.is_plain(x, *parameters):
        return "the call is compiled or transformed, or its tensors are of another kind"
    if not (x.requires_grad or any(parameter.requires_grad for parameter in parameters)):
        return "nothing needs a gradient"
    for t in (x, *parameters):
        if t.dtype is not torch.float32 or t.device.type != "cpu" or not t.is_contiguous() or t.is_neg():
            return "the kernels are for contiguous float32 numbers on a CPU"
    return None


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
