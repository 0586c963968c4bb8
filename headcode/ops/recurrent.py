"""Linear attention as a fast-weight programmer: each key writes v kᵀ into a matrix, each query reads from it.

Only for norm `none` with a linear value net, causal, and scores without a position bias: then

    o[q] = scale Σ_{k ≤ q} v[k] (k[k]·q[q])  =  scale · S[q]ᵀ q[q],     S[q] = S[q-1] + k[q] v[q]ᵀ

so a (Dk, Dv) state per head stands for the whole past. Rotary position is inside q and k and is allowed. A T5 band is
not: it adds a term to every pair that no finite state carries.
"""

import math

import torch
from torch import Tensor

from headcode.ops.options import check_scale, check_shapes, check_tensors, compute_dtype
from headcode.ops.reference import spoil_codes

CHUNK = 64


def linear_attention_recurrent(
    q: Tensor, k: Tensor, v: Tensor, *, state: Tensor | None = None, scale: float | None = None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """The causal `linear` method without any T×T: output (B, H, T, Dv) and the state (B, H, Dk, Dv) after the last key.

    Shapes: q, k (B, H, T, Dk), v (B, H, T, Dv), state (B, H, Dk, Dv) or None for an empty past. Half-precision inputs
    have a float32 state.
    `chunk` tokens are handled by one small masked product, the past before them by the state.

    Example:
        >>> q, k, v = (torch.randn(2, 3, 10, 4) for _ in range(3))
        >>> whole, _ = linear_attention_recurrent(q, k, v)
        >>> first, state = linear_attention_recurrent(q[:, :, :6], k[:, :, :6], v[:, :, :6])
        >>> rest, _ = linear_attention_recurrent(q[:, :, 6:], k[:, :, 6:], v[:, :, 6:], state=state)
        >>> torch.allclose(whole, torch.cat((first, rest), 2), atol=1e-5)
        True
    """
    check_tensors(q, k, v)
    check_shapes(q, k, v, "linear")
    batch, heads, length, width = q.shape
    if k.shape != q.shape:
        raise ValueError(f"k must have q's length {length}, got {k.shape[2]}: every token is a query and a key.")
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk must be an integer, at least 1, got {chunk!r}.")
    # Half precision would lose the past bit by bit: the state is kept in float32.
    dtype, result_dtype = compute_dtype(q.dtype), q.dtype
    shape = (batch, heads, width, v.shape[3])
    if state is None:
        state = torch.zeros(shape, dtype=dtype, device=v.device)
    elif not isinstance(state, Tensor) or tuple(state.shape) != shape or state.dtype != dtype:
        given = f"{state.dtype} {tuple(state.shape)}" if isinstance(state, Tensor) else type(state).__name__
        raise ValueError(f"state must be {dtype} of shape (batch, heads, Dk, Dv) = {shape}, got {given}.")
    q, k, v = (t.to(dtype) for t in (q, k, v))
    q = q * (1 / math.sqrt(width) if scale is None else check_scale(scale))
    outputs = []
    for start in range(0, length, chunk):
        queries, keys, values = (t[:, :, start : start + chunk] for t in (q, k, v))
        within = torch.tril(queries @ keys.transpose(-1, -2))  # (B, H, chunk, chunk)
        past = torch.ones(within.shape[-2:], dtype=torch.bool, device=q.device).tril()
        within, finite_values = spoil_codes(within, values, past)
        outputs.append(queries @ state + within @ finite_values)
        state = state + keys.transpose(-1, -2) @ values
    return (torch.cat(outputs, 2) if outputs else v.clone()).to(result_dtype), state
