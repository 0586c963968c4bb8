"""Which blocks run as one fused operation (`ops.cpu.block`), and how: plain eager float32 on a CPU.

A block runs op by op if anything looks into it or changes a part of it: codes captured or edited, hooks on its parts,
parts replaced or patched, tracing, functional transforms, caches. Under autocast to bfloat16 its products are of
numbers rounded to bf16 where the processor has instructions for that; elsewhere autocast rounds op by op.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headcode.nn.attention import HyperAttention
from headcode.nn.checks import check_padding, check_queries
from headcode.nn.feedforward import GeluFeedForward, SwigluFeedForward
from headcode.nn.plain import full_name, why_called
from headcode.nn.position import ROTARY_BASE, RelativeBias, relative_buckets, rotary_angles
from headcode.ops import cpu, eager
from headcode.ops.cpu.block import TABLE, BlockCall, fused_block
from headcode.ops.cpu.logits import LogitsCall, token_logits
from headcode.ops.cpu.records import COLUMNS, Products
from headcode.ops.options import AttentionOptions, resolve_seed
from headcode.private_api import forward_mode_active, has_global_hooks

if TYPE_CHECKING:
    from headcode.nn.transformer import TransformerBlock

BACKENDS = ("auto", "cpu")
LARGEST_WIDTH = 4096
"""Of any projection: up to there the kernels have been measured."""
FEWEST_TOKENS = 64
"""With fewer, to bring a vocabulary's table into panels takes longer than the product."""
MANY_WEIGHTS, FEWEST_TOKENS_FOR_MANY = 2**23, 256
"""So many weights leave the caches on their way into panels: without gradients it takes so many tokens to pay."""


def run_fused(
    block: TransformerBlock,
    x: Tensor,
    queries: slice | None,
    dropout_seed: int | None,
    key_padding_mask: Tensor | None = None,
) -> Tensor | None:
    """The block's output, or None if it must go op by op."""
    parameters = _parameters_or_reason(block, x)
    if isinstance(parameters, str):
        return None
    attention, gated = block.attention, type(block.feedforward) is SwigluFeedForward
    check_queries(queries, x.shape[1])
    check_padding(key_padding_mask, *x.shape[:2])
    first, last, _ = (slice(None) if queries is None else queries).indices(x.shape[1])
    dropout = attention.dropout if attention.training else 0.0
    seed = resolve_seed(dropout, dropout_seed)
    products = _products()
    relative, head_width = attention.relative_bias, attention.query_proj.out_features // attention.num_heads
    call = BlockCall(
        num_heads=attention.num_heads,
        first=first,
        last=last,
        gated=gated,
        epsilons=(block.attention_norm.eps, block.feedforward_norm.eps),
        buckets=None if relative is None else _band_buckets(relative.num_buckets, last - first, x.shape[1], first),
        angles=_rotary_table(x.shape[1], head_width) if attention.position == "rotary" else None,
        visible=None if key_padding_mask is None else ~key_padding_mask.contiguous(),
        products=products,
        attention=AttentionOptions(
            causal=attention.causal,
            scale=1 / math.sqrt(head_width),
            norm=attention.norm,
            value_net=attention.value_net,
            pooling=attention.pooling,
            dropout=dropout,
            dropout_seed=seed,
            query_offset=first,
            window=attention.window,
        ),
        differentiable=functools.partial(_run_op_by_op, block, queries, seed, key_padding_mask, products),
    )
    out = fused_block(x.float(), parameters, call)
    # Its kernels leave later tokens out by multiplying with 0, but 0 · NaN is NaN (see `ops.cpu`).
    masked = attention.causal or attention.window is not None or key_padding_mask is not None
    return None if masked and out.detach().sum().isnan() else out.to(x.dtype)


def run_fused_logits(norm: nn.Module, hidden: Tensor, table: Tensor, scale: float) -> Tensor | None:
    """LN(hidden) · tableᵀ · scale, or None if that must go op by op."""
    vocabulary, dim = table.shape
    if cpu.NO_KERNELS or has_global_hooks() or why_called(norm, nn.LayerNorm) is not None:
        return None
    weight, bias = norm._parameters["weight"], norm._parameters["bias"]
    if _why_not_plain(hidden, [weight, bias, table]) is not None or weight is None or bias is None:
        return None
    widths_fit = hidden.shape[-1] == dim == weight.numel() and not (vocabulary % COLUMNS or dim % COLUMNS)
    num_tokens = hidden.numel() // dim
    if not widths_fit or num_tokens < FEWEST_TOKENS or not _are_worth_packing(table.numel(), num_tokens):
        return None
    products = _products()
    call = LogitsCall(norm.eps, scale, products)  # type: ignore[arg-type]
    logits = token_logits(hidden.float(), weight, bias, table, call)
    return logits if products == "float32" else logits.bfloat16()


def why_op_by_op(block: TransformerBlock, x: Tensor) -> str | None:
    """Why a block that is called with tokens x (B, T, dim) goes op by op; None if it is fused.

    With a cache or a context a block always goes op by op.

    Example:
        >>> from headcode.nn import ModelConfig, Transformer
        >>> block = Transformer(ModelConfig(input_dim=5, output_dim=1, max_length=16)).blocks[0]
        >>> handle = block.attention.key_proj.register_forward_hook(print)
        >>> why_op_by_op(block, torch.randn(3, 16, 128))
        'attention.key_proj has hooks'
    """
    found = _parameters_or_reason(block, x)
    return found if isinstance(found, str) else None


def _parameters_or_reason(block: TransformerBlock, x: Tensor) -> dict[str, Tensor] | str:
    """The block's parameters, named as in its state_dict, or why it must go op by op."""
    if reason := _why_unserved(block):
        return reason
    parameters = _named_parameters(block)
    if isinstance(parameters, str):
        return parameters
    if reason := _why_not_plain(x, list(parameters.values())):
        return reason
    attention = block.attention
    if x.dim() != 3 or x.shape[2] != attention.dim or x.numel() == 0:
        return f"the tokens must have shape (batch, length, {attention.dim}) and not be empty, got {tuple(x.shape)}"
    shapes = tuple([(name, parameter.shape) for name, parameter in parameters.items()])
    if not _fit(shapes, attention.dim, attention.num_heads):
        return f"all widths must be multiples of {COLUMNS} and at most {LARGEST_WIDTH}"
    if not _are_worth_packing(sum(p.numel() for p in parameters.values()), x.numel() // x.shape[2]):
        return f"fewer than {FEWEST_TOKENS_FOR_MANY} tokens are not worth preparing so many weights"
    return parameters


def _are_worth_packing(num_weights: int, num_tokens: int) -> bool:
    return torch.is_grad_enabled() or num_weights < MANY_WEIGHTS or num_tokens >= FEWEST_TOKENS_FOR_MANY


class _OpByOp(nn.Module):
    def __init__(self, block: TransformerBlock) -> None:
        super().__init__()
        self.block = block

    def forward(self, *arguments: Any) -> Tensor:
        return self.block.run_op_by_op(*arguments)


def _run_op_by_op(
    block: TransformerBlock,
    queries: slice | None,
    dropout_seed: int,
    padding: Tensor | None,
    products: Products,
    x: Tensor,
    parameters: dict[str, Tensor],
) -> Tensor:
    """The block with these parameters, which need not be its own any more (`torch.func.functional_call`)."""
    own = {f"block.{name}": parameter for name, parameter in parameters.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=products == "bf16"):
        return torch.func.functional_call(_OpByOp(block), own, (x, queries, dropout_seed, None, padding))


@functools.lru_cache(maxsize=64)
def _band_buckets(num_buckets: int, num_queries: int, num_keys: int, first: int) -> Tensor:
    """`RelativeBias.places`, remembered."""
    distances = first + num_queries - 1 - torch.arange(num_queries + num_keys - 1, device="cpu")
    return relative_buckets(distances, num_buckets)


@functools.lru_cache(maxsize=16)
def _rotary_table(length: int, head_width: int) -> Tensor:
    """Cosines beside sines (T, D) of what `rotate` turns queries and keys by."""
    angles = rotary_angles(length, head_width // 2, 0, ROTARY_BASE, torch.float32, "cpu")
    return torch.cat((angles.cos(), angles.sin()), 1)


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
        or attention.pooling == "max"
        or attention.query_norm is not None
        or attention.num_kv_heads != attention.num_heads
        or attention.position == "alibi"
    ):
        return (
            f"the kernels have no block with norm {attention.norm!r}, value net {attention.value_net!r}, "
            f"pooling {attention.pooling!r}, position {attention.position!r}, "
            f"qk_norm {attention.query_norm is not None}, recurrent {attention.recurrent} and "
            f"{attention.num_kv_heads} key and value heads for {attention.num_heads}"
        )
    if cpu.NO_KERNELS:
        return "there are no CPU kernels on this machine"
    return "hooks of all modules are set" if has_global_hooks() else None


def _parts(feedforward: Any, has_band: bool) -> list[tuple[str, str, type[nn.Module], list[str]]]:
    """Of all modules of a block: the one it is part of, its name there, its kind, and its parameters."""
    gated = feedforward is SwigluFeedForward
    layers = ("gate_proj", "signal_proj", "output_proj") if gated else ("hidden_proj", "output_proj")
    projections = ("query_proj", "key_proj", "value_proj", "output_proj")
    pair = ["weight", "bias"]
    return [
        *(("", name, nn.LayerNorm, pair) for name in ("attention_norm", "feedforward_norm")),
        *(("attention", name, nn.Linear, pair) for name in projections),
        *(("feedforward", name, nn.Linear, pair[:1] if gated else pair) for name in layers),
        ("", "attention", HyperAttention, []),
        ("", "feedforward", feedforward, []),
        *([("attention", "relative_bias", RelativeBias, ["table"])] if has_band else []),
    ]


# No cache, which torch.compile would warn of.
_PARTS: dict[Any, Any] = {
    (kind, band): _parts(kind, band) for kind in (GeluFeedForward, SwigluFeedForward) for band in (False, True)
}


def _named_parameters(block: TransformerBlock) -> dict[str, Any] | str:
    """The block's parameters; or which part must be called, and why."""
    # Read from where modules keep their parts: by attribute, Python would look everywhere else first.
    inside: dict[str, Any] = {"": block._modules}
    inside |= {name: block._modules[name]._modules for name in ("attention", "feedforward")}  # type: ignore[union-attr]
    has_band = inside["attention"].get("relative_bias") is not None
    found = {}
    for whole, name, kind, names in _PARTS[type(block.feedforward), has_band]:
        part = inside[whole][name]
        path = f"{whole}.{name}" if whole else name
        if reason := why_called(part, kind):
            return f"{path} {reason}"
        for parameter in names:
            found[f"{path}.{parameter}"] = part._parameters.get(parameter)
    return found


def _products() -> Products:
    return "bf16" if torch.is_autocast_enabled("cpu") else "float32"


def _why_not_plain(x: Tensor, parameters: list[Any]) -> str | None:
    """Why these are not ordinary float32 numbers, as they are in memory, or what traces or wraps the call."""
    if torch.jit.is_tracing() or forward_mode_active():
        return "the call is traced or differentiated forward"
    if any(parameter is None for parameter in parameters):
        return "a weight or a bias is missing"
    if not eager.is_plain(x, *parameters):
        return "the call is compiled or transformed, or its tensors are of another kind"
    rounded = torch.is_autocast_enabled("cpu")
    if rounded and torch.get_autocast_dtype("cpu") is not torch.bfloat16:
        return "autocast is to another dtype than bfloat16"
    if rounded and (reason := cpu.why_no_bf16()):
        return f"under autocast, {reason}"
    for t in (x, *parameters):
        right_dtype = t.dtype is torch.float32 or (rounded and t is x and t.dtype is torch.bfloat16)
        if not right_dtype or t.device.type != "cpu" or not t.is_contiguous() or t.is_neg():
            return "the kernels are for contiguous float32 numbers on a CPU"
    return None


@functools.lru_cache(maxsize=64)
def _fit(shapes: tuple[tuple[str, tuple[int, ...]], ...], dim: int, num_heads: int) -> bool:
    """Whether the parameters have widths that the kernels know, and all the same ones.

    Whoever put in others (`torch.func.functional_call`) is told so op by op; the kernels would read past their ends.
    """
    sizes = dict(shapes)
    if not all(sizes.values()):
        return False
    qk_width, v_width = (sizes[f"attention.{part}_proj.weight"][0] for part in ("query", "value"))
    inner_width = sizes["feedforward.output_proj.weight"][-1]
    weights = {
        "attention_norm": (dim,),
        "attention.query_proj": (qk_width, dim),
        "attention.key_proj": (qk_width, dim),
        "attention.value_proj": (v_width, dim),
        "attention.output_proj": (dim, v_width),
        "feedforward_norm": (dim,),
        **{f"feedforward.{part}_proj": (inner_width, dim) for part in ("hidden", "gate", "signal")},
        "feedforward.output_proj": (dim, inner_width),
    }
    for name, shape in shapes:
        part, _, kind = name.rpartition(".")
        if name != TABLE and shape != (weights[part] if kind == "weight" else weights[part][:1]):
            return False
    widths = (dim, qk_width, v_width, inner_width)
    fit = all(width % COLUMNS == 0 for width in widths) and max(widths) <= LARGEST_WIDTH
    return fit and qk_width % num_heads == 0 and v_width % num_heads == 0
