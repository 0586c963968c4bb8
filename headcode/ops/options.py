"""One call of the op: its tensors, its options, and the checks that bring a user's arguments to this form.

Every complaint is a sentence that says what was given, what is allowed and how to mend it.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headcode.ops.registry import NORMS, POOLINGS, VALUE_NETS

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class AttentionInputs(NamedTuple):
    """The tensors of one call. Backends get them checked: a boolean mask, and 4 axes for mask and bias."""

    q: Tensor
    """(B, H, Tq, Dk)"""
    k: Tensor
    """(B, H, Tk, Dk)"""
    v: Tensor
    """(B, H, Tk, Dv); 2·Dv channels if the value net is gated."""
    mask: Tensor | None = None
    """Broadcastable to (B, 1, Tq, Tk), True where a pair takes part."""
    bias: Tensor | None = None
    """Broadcastable to (B, H, Tq, Tk), added to the scores."""
    relative_bias: Tensor | None = None
    """(H, Tq+Tk-1), the band: entry [h, k - q + Tq - 1] is added to the score of (q, k)."""
    middle: Tensor | None = None
    """(H, Dv, Dv+1), of a three-layer value net: each head's weights of the middle layer, the last column its bias."""

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> "AttentionInputs":
        """With floating tensors of this dtype, all of them on this device; None leaves them where they are."""
        moved: list[Any] = [t if t is None else t.to(device, dtype if t.is_floating_point() else t.dtype) for t in self]
        return AttentionInputs(*moved)


class AttentionGradients(NamedTuple):
    """Buffers that a backward pass fills, each shaped like its input; None for a bias (or a middle layer) that needs no
    gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    relative_bias: Tensor | None = None
    middle: Tensor | None = None


@dataclass(frozen=True)
class AttentionOptions:
    """What a call computes from its tensors. The registered op takes the same fields in the same order."""

    causal: bool
    """Query i, at position `query_offset + i`, sees the keys up to its own position."""
    scale: float
    """Factor of q·k in the scores."""
    norm: str
    """How scores become codes, one of NORMS."""
    value_net: str
    """What the codes configure, one of VALUE_NETS but those that act on each head's values (see `check_call`)."""
    pooling: str
    """Over keys, one of POOLINGS."""
    dropout: float
    """The share of (query, key) pairs whose code is zeroed; the others are scaled by 1/(1-dropout)."""
    dropout_seed: int
    """Hashed with position and key, it decides which pairs are dropped."""
    query_offset: int
    """The position of the first query among the keys."""
    window: int | None = None
    """A query sees the keys that are fewer positions away than this; None: however far."""


class Problem(NamedTuple):
    """A call without its numbers: what decides whether a backend can serve it, and how well."""

    batch: int
    heads: int
    queries: int
    keys: int
    qk_width: int
    v_width: int
    dtype: torch.dtype
    device: str
    mask: str
    """`none`, `key_padding` (the same for every query) or `dense`."""
    bias: bool
    relative_bias: bool
    options: AttentionOptions

    @classmethod
    def of(cls, inputs: AttentionInputs, options: AttentionOptions) -> "Problem":
        q, k, v, mask, bias, relative_bias, _ = inputs
        mask_kind = "none" if mask is None else "key_padding" if mask.shape[2] == 1 else "dense"
        return cls(
            *(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]),
            *(q.dtype, q.device.type, mask_kind, bias is not None, relative_bias is not None, options),
        )


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision is computed in float32 and rounded once, at the end."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def check_call(
    inputs: AttentionInputs,
    *,
    causal: bool = False,
    scale: float | None = None,
    norm: str = "rms_head",
    value_net: str = "relu",
    pooling: str = "sum",
    dropout: float = 0.0,
    dropout_seed: int | None = None,
    query_offset: int | None = None,
    window: int | None = None,
) -> tuple[AttentionInputs, AttentionOptions]:
    """A user's arguments as the backends take them, with the defaults of `hyper_attention`.

    A value net that acts on each head's values is the linear one over what it makes of them: no backend has to know it.
    """
    q, k, v, mask, bias, relative_bias, middle = inputs
    check_choice("norm", norm, NORMS)
    check_choice("value_net", value_net, VALUE_NETS)
    check_choice("pooling", pooling, POOLINGS)
    check_tensors(q, k, v, bias, relative_bias, middle)
    check_shapes(q, k, v, value_net)
    _check_middle(middle, v, value_net)
    check_flag("causal", causal)
    num_queries, num_keys = q.shape[2], k.shape[2]
    mask, bias = check_pair_terms(mask, bias, q, k)
    mask, bias = _split_mask(mask, bias)
    if relative_bias is not None:
        expected = (q.shape[1], max(num_queries + num_keys - 1, 0))
        if tuple(relative_bias.shape) != expected:
            raise ValueError(
                f"relative_bias must have shape (heads, queries + keys - 1) = {expected}, "
                f"got {tuple(relative_bias.shape)}; entry [h, k - q + queries - 1] is added to the score of (q, k)."
            )
    if (on_values := VALUE_NETS[value_net].on_values) is not None:
        v, value_net = on_values(v), "linear"
    options = AttentionOptions(
        causal=causal,
        scale=1 / math.sqrt(q.shape[3]) if scale is None else check_scale(scale),
        norm=norm,
        value_net=value_net,
        pooling=pooling,
        dropout=check_dropout("dropout", dropout),
        dropout_seed=resolve_seed(dropout, dropout_seed),
        query_offset=num_keys - num_queries if query_offset is None else _integer("query_offset", query_offset),
        window=check_window(window),
    )
    return AttentionInputs(q, k, v, mask, bias, relative_bias, middle), options


def check_flag(name: str, given: Any) -> None:
    if not isinstance(given, bool):
        raise TypeError(f"{name} must be True or False, got {given!r}.")


def check_dropout(name: str, dropout: Any) -> float:
    if not 0 <= _number(name, dropout) < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {dropout}.")
    return float(dropout)


def check_window(window: Any) -> int | None:
    if window is not None and _integer("window", window) < 1:
        raise ValueError(f"window must be at least 1, a query's own position, or None, got {window}.")
    return window


def check_scale(scale: Any) -> float:
    scale = _number("scale", scale)
    if not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be a finite number, got {scale}.")
    return scale


def check_choice(name: str, given: Any, allowed: Any) -> None:
    if not isinstance(given, str) or given not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {given!r}.")


def check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    bias: Tensor | None = None,
    relative_bias: Tensor | None = None,
    middle: Tensor | None = None,
) -> None:
    tensors = {"q": q, "k": k, "v": v, "bias": bias, "relative_bias": relative_bias, "middle": middle}
    for name, tensor in tensors.items():
        if tensor is None and (name not in ("q", "k")):
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}.")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} must be float32, float64, bfloat16 or float16, got {_name(tensor.dtype)}.")
        if tensor.dtype != q.dtype:
            raise TypeError(
                f"{name} must have q's dtype {_name(q.dtype)}, got {_name(tensor.dtype)}; "
                f"convert it with {name}.to(torch.{_name(q.dtype)})."
            )
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {tensor.device}.")


def check_shapes(q: Tensor, k: Tensor, v: Tensor | None, value_net: str) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor is not None and tensor.dim() != 4:
            raise ValueError(f"{name} must have 4 axes (batch, head, length, dim), got shape {tuple(tensor.shape)}.")
    if q.shape[1] == 0 or q.shape[3] == 0:
        raise ValueError(f"q must have at least 1 head and width 1, got shape {tuple(q.shape)}.")
    if k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"k must have q's batch, heads and width, ({q.shape[0]}, {q.shape[1]}, length, {q.shape[3]}), "
            f"got shape {tuple(k.shape)}."
        )
    if v is None:
        return
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v must have k's batch, heads and length, ({k.shape[0]}, {k.shape[1]}, {k.shape[2]}, dim), "
            f"got shape {tuple(v.shape)}."
        )
    if v.shape[3] == 0:
        raise ValueError(f"v must have width at least 1, got shape {tuple(v.shape)}.")
    if VALUE_NETS[value_net].gated and v.shape[3] % 2:
        raise ValueError(f"v must have an even width for value_net={value_net!r} (gate, signal), got {v.shape[3]}.")


def _check_middle(middle: Tensor | None, v: Tensor, value_net: str) -> None:
    if not VALUE_NETS[value_net].middle:
        if middle is not None:
            deeper = ", ".join(name for name, net in VALUE_NETS.items() if net.middle)
            raise ValueError(f"middle is for value_net={deeper}, and value_net is {value_net!r}: leave it out.")
        return
    shape = (v.shape[1], v.shape[3], v.shape[3] + 1)
    if middle is None or tuple(middle.shape) != shape:
        given = "none" if middle is None else f"shape {tuple(middle.shape)}"
        raise ValueError(
            f"value_net={value_net!r} needs middle, the weights of its middle layer with its bias as the last column, "
            f"of shape (heads, v width, v width + 1) = {shape}, got {given}."
        )


def check_pair_terms(
    mask: Tensor | None, bias: Tensor | None, q: Tensor, k: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Mask and bias with 4 axes; the mask is boolean or of q's dtype."""
    batch, heads, num_queries, _ = q.shape
    bias = _four_axes("bias", bias, (batch, heads, num_queries, k.shape[2]))
    if mask is None:
        return None, bias
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a torch.Tensor, got {type(mask).__name__}.")
    if mask.dtype != torch.bool and mask.dtype != q.dtype:
        raise TypeError(
            f"mask must be boolean (True means keep) or have q's dtype {_name(q.dtype)} (added to the scores), "
            f"got {_name(mask.dtype)}; convert it with "
            f"{f'mask.to(torch.{_name(q.dtype)})' if mask.is_floating_point() else 'mask.bool()'}."
        )
    if mask.device != q.device:
        raise ValueError(f"mask must be on q's device {q.device}, got {mask.device}.")
    return _four_axes("mask", mask, (batch, 1, num_queries, k.shape[2])), bias


def _split_mask(mask: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """A boolean mask, and the bias with the finite part of a floating mask in it."""
    if mask is None or mask.dtype == torch.bool:
        return mask, bias
    visible = mask != float("-inf")
    finite = mask.masked_fill(~visible, 0.0)
    if bias is None:
        return visible, finite
    # In the precision that the op computes in: half precision would round the sum once more.
    dtype = compute_dtype(mask.dtype)
    return visible, bias.to(dtype) + finite.to(dtype)


def _four_axes(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """`tensor` with 4 axes, each of size 1 or as in `shape` (batch, head, query, key)."""
    if tensor is None:
        return None
    sizes = tuple(tensor.shape)
    padded = (1,) * (4 - len(sizes)) + sizes
    if len(sizes) > 4 or any(size not in (1, full) for size, full in zip(padded, shape, strict=True)):
        hint = "; masks are shared by the heads, use bias for one head" if name == "mask" else ""
        raise ValueError(f"{name} must be broadcastable to {shape} (batch, head, query, key), got shape {sizes}{hint}.")
    return tensor.reshape(padded)


def resolve_seed(dropout: float, seed: int | None) -> int:
    """The seed itself; where none is given, one from torch's global generator if it is going to be used."""
    if seed is None:
        return _drawn_seed() if dropout > 0 else 0
    seed = _integer("dropout_seed", seed)
    if not 0 <= seed < 2**63:
        raise ValueError(f"dropout_seed must be from 0 to 2**63 - 1, got {seed}.")
    return seed


def _drawn_seed() -> int:
    try:
        return int(torch.randint(2**63 - 1, ()))
    except RuntimeError as error:
        raise ValueError("dropout_seed must be given where none can be drawn, as under vmap: any integer.") from error


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    return float(value)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    return value  # type: ignore[return-value]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
