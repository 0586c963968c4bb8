"""The value networks of one tile in Triton, forward and backward.

One dim at a time, everything is a sum over heads, keys or queries in the tile's own layout: for narrow heads, and for
float32 in full precision, which matrix units do not have. WIDE goes DVC dims at a time through batched matrix
products: with z the codes, g the gradient of the output,

    m[k] = z[k]ᵀ v[k]  (BQ×HP · HP×DVC, one product per key)         o[q] = z[q] u[q]   (HP×BK · BK×DVC, one per query)
    ∂u[q] = z[q]ᵀ g[q]        ∂z = g[q] u[q]ᵀ + ∂m[k] v[k]ᵀ        ∂v[k] = z[k] ∂m[k]

A sum over tiles either stays in registers (one chunk holds all dims) or is added up, chunk by chunk, in float32 memory
that no other program touches: no atomics, one order.

With MASKS (causal or a mask), whatever a pair that is not seen would multiply with its code 0 is left out by selection:
0 · NaN is NaN.
"""

import triton
import triton.language as tl

from headcode.ops.registry import GELU_CUBIC, GELU_SLOPE
from headcode.ops.triton.tiles import column, finite, multiply, spoil

TWICE_SLOPE = tl.constexpr(2 * GELU_SLOPE)
CUBIC = tl.constexpr(GELU_CUBIC)
THRICE_CUBIC = tl.constexpr(3 * GELU_CUBIC)


@triton.jit
def activate(x, NET: tl.constexpr):
    """The activation and its derivative."""
    if NET == "relu":
        value = tl.where(x <= 0, 0.0, x)  # NaN stays NaN, which a maximum would hide
        slope = tl.where(x > 0, 1.0, 0.0)
    elif NET == "silu":
        sigmoid = tl.sigmoid(x)
        value = x * sigmoid
        slope = sigmoid * (1.0 + x * (1.0 - sigmoid))
    elif NET == "gelu":
        # With tanh(a) = 2σ(2a) - 1 the tanh form is x·σ(2a), a = SLOPE · (x + CUBIC x³).
        square = x * x
        sigmoid = tl.sigmoid(x * TWICE_SLOPE * (1.0 + square * CUBIC))
        value = x * sigmoid
        slope = sigmoid + value * (1.0 - sigmoid) * TWICE_SLOPE * (1.0 + square * THRICE_CUBIC)
    else:
        value = x
        slope = tl.full(x.shape, 1.0, tl.float32)
    return value, slope


@triton.jit
def put_column(total, dims, d, column):
    """`total` (HP, lines, width) with `column` (HP, lines) added to dim d."""
    return total + tl.where((dims == d)[None, None, :], column[:, :, None], 0.0)


@triton.jit
def chunk(lines, stride, there, dims, DV: tl.constexpr, ORDER: tl.constexpr):
    """The given dims of every head's lines, in the axis order that ORDER names."""
    inside = dims < DV
    dims = dims * stride
    if ORDER == "hdl":
        return tl.load(
            lines[:, None, :] + dims[None, :, None], mask=there[:, None, :] & inside[None, :, None], other=0.0
        )
    else:
        if ORDER == "lhd":
            lines, there = tl.trans(lines), tl.trans(there)
        return tl.load(
            lines[:, :, None] + dims[None, None, :], mask=there[:, :, None] & inside[None, None, :], other=0.0
        )


@triton.jit
def empty_sum(HP: tl.constexpr, LINES: tl.constexpr, DIMS: tl.constexpr, ORDER: tl.constexpr):
    """Zeros in the axis order that ORDER names."""
    if ORDER == "lhd":
        return tl.zeros((LINES, HP, DIMS), tl.float32)
    else:
        return tl.zeros((HP, LINES, DIMS), tl.float32)


@triton.jit
def store_chunk(lines, there, dims, D: tl.constexpr, values, ADD: tl.constexpr, ORDER: tl.constexpr):
    """Write, or with ADD add, `values` at the given dims of every head's lines; ORDER is `hld` or `lhd`."""
    if ORDER == "lhd":
        lines, there = tl.trans(lines), tl.trans(there)
    pointers = lines[:, :, None] + dims[None, None, :]
    inside = there[:, :, None] & (dims < D)[None, None, :]
    if ADD:
        values += tl.load(pointers, mask=inside, other=0.0)
    tl.store(pointers, values.to(lines.dtype.element_ty), mask=inside)


@triton.jit
def select(x, seen, MASKS: tl.constexpr):
    """With masks, x with 0 where a pair is not seen."""
    if MASKS:
        x = tl.where(seen, x, 0.0)
    return x


@triton.jit
def column_forward(codes, seen, v, NET: tl.constexpr, MASKS: tl.constexpr):
    """One dim of the tile's part of the output: (HP, BQ)."""
    if NET == "linear":
        return tl.sum(select(codes * v[:, None, :], seen[None, :, :], MASKS), 2)
    else:
        hidden, _ = activate(select(tl.sum(codes * v[:, None, :], 0), seen, MASKS), NET)
        return tl.sum(codes * hidden[None, :, :], 2)


@triton.jit
def column_backward(codes, seen, grad_codes, v, grad, NET: tl.constexpr, WITH_V: tl.constexpr, MASKS: tl.constexpr):
    """`grad_codes` with one dim's part added, and that dim of v's gradient (HP, BK) if WITH_V."""
    grad_v = 0.0
    if NET == "linear":
        grad_codes += grad[:, :, None] * v[:, None, :]
        if WITH_V:
            grad_v = tl.sum(select(codes * grad[:, :, None], seen[None, :, :], MASKS), 1)
    else:
        hidden, slope = activate(select(tl.sum(codes * v[:, None, :], 0), seen, MASKS), NET)
        grad_mixed = select(tl.sum(codes * grad[:, :, None], 0), seen, MASKS) * slope
        grad_codes += grad[:, :, None] * hidden[None, :, :] + grad_mixed[None, :, :] * v[:, None, :]
        if WITH_V:
            grad_v = tl.sum(codes * grad_mixed[None, :, :], 1)
    return grad_codes, grad_v


@triton.jit
def value_forward(
    codes, seen, v_lines, v_d, v_there, total, out_lines, out_there,
    DV: tl.constexpr, DVC: tl.constexpr, NET: tl.constexpr, WIDE: tl.constexpr, MASKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The tile's part of the output, added to `total` or, where one chunk does not hold all dims, to `out_lines`."""
    dims = tl.arange(0, DVC)
    if WIDE:
        z = codes.to(v_lines.dtype.element_ty)
        for start in range(0, DV, DVC):
            here = start + dims
            if NET == "linear":
                v = chunk(v_lines, v_d, v_there, here, DV, "hld")
                if MASKS:
                    z = spoil(codes, v, seen).to(v.dtype)
                part = multiply(z, finite(v, MASKS), PRECISION)
            else:
                v = chunk(v_lines, v_d, v_there, here, DV, "lhd")
                mixed = multiply(tl.permute(z, (2, 1, 0)), v, PRECISION)  # (BK, BQ, DVC)
                hidden, _ = activate(select(mixed, tl.trans(seen)[:, :, None], MASKS), NET)
                hidden = tl.permute(hidden.to(z.dtype), (1, 0, 2))
                part = multiply(tl.permute(z, (1, 0, 2)), hidden, PRECISION)
            if DV <= DVC:
                total += part
            else:
                store_chunk(out_lines, out_there, here, DV, part, True, "hld" if NET == "linear" else "lhd")
    elif DV <= DVC:
        for d in range(DV):
            total = put_column(
                total, dims, d, column_forward(codes, seen, column(v_lines, v_d, v_there, d), NET, MASKS)
            )
    else:
        for start in range(0, DV, DVC):
            part = tl.zeros(total.shape, tl.float32)
            for d in range(start, tl.minimum(start + DVC, DV)):
                part = put_column(
                    part, dims, d - start, column_forward(codes, seen, column(v_lines, v_d, v_there, d), NET, MASKS)
                )
            store_chunk(out_lines, out_there, start + dims, DV, part, True, "hld")
    return total


@triton.jit
def value_backward(
    codes, seen, v_lines, v_d, v_there, grad_lines, grad_d, grad_there, total, grad_v_lines,
    DV: tl.constexpr, DVC: tl.constexpr, NET: tl.constexpr, WIDE: tl.constexpr, WITH_V: tl.constexpr,
    MASKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the codes (HP, BQ, BK), and `total` with the tile's part of v's gradient if WITH_V."""
    dims = tl.arange(0, DVC)
    grad_codes = tl.zeros(codes.shape, tl.float32)
    if WIDE:
        z = codes.to(v_lines.dtype.element_ty)
        if NET == "linear":
            for start in range(0, DV, DVC):
                here = start + dims
                grad = chunk(grad_lines, grad_d, grad_there, here, DV, "hld")
                v = chunk(v_lines, v_d, v_there, here, DV, "hdl")
                grad_codes += multiply(grad, v, PRECISION)
                if WITH_V:
                    by_key = tl.permute(codes, (0, 2, 1))
                    if MASKS:
                        by_key = spoil(by_key, grad, tl.trans(seen))
                    part = multiply(by_key.to(z.dtype), finite(grad, MASKS), PRECISION)
                    if DV <= DVC:
                        total += part
                    else:
                        store_chunk(grad_v_lines, v_there, here, DV, part, True, "hld")
        else:
            by_query = tl.zeros((codes.shape[1], codes.shape[0], codes.shape[2]), tl.float32)
            by_key = tl.zeros((codes.shape[2], codes.shape[1], codes.shape[0]), tl.float32)
            for start in range(0, DV, DVC):
                here = start + dims
                grad = chunk(grad_lines, grad_d, grad_there, here, DV, "lhd")
                v = chunk(v_lines, v_d, v_there, here, DV, "lhd")
                mixed = multiply(tl.permute(z, (2, 1, 0)), v, PRECISION)  # (BK, BQ, DVC)
                hidden, slope = activate(select(mixed, tl.trans(seen)[:, :, None], MASKS), NET)
                hidden = tl.permute(hidden.to(z.dtype), (1, 2, 0))
                by_query += multiply(grad, hidden, PRECISION)
                grad_hidden = multiply(tl.permute(z, (1, 2, 0)), grad, PRECISION)  # (BQ, BK, DVC)
                grad_hidden = select(grad_hidden, seen[:, :, None], MASKS)
                grad_mixed = (tl.permute(grad_hidden, (1, 0, 2)) * slope).to(z.dtype)
                by_key += multiply(grad_mixed, tl.permute(v, (0, 2, 1)), PRECISION)
                if WITH_V:
                    part = multiply(tl.permute(z, (2, 0, 1)), grad_mixed, PRECISION)
                    if DV <= DVC:
                        total += part
                    else:
                        store_chunk(grad_v_lines, v_there, here, DV, part, True, "lhd")
            grad_codes = tl.permute(by_query, (1, 0, 2)) + tl.permute(by_key, (2, 1, 0))
    elif DV <= DVC or not WITH_V:
        for d in range(DV):
            v = column(v_lines, v_d, v_there, d)
            grad = column(grad_lines, grad_d, grad_there, d)
            grad_codes, part = column_backward(codes, seen, grad_codes, v, grad, NET, WITH_V, MASKS)
            if WITH_V:
                total = put_column(total, dims, d, part)
    else:
        for start in range(0, DV, DVC):
            chunk_total = tl.zeros(total.shape, tl.float32)
            for d in range(start, tl.minimum(start + DVC, DV)):
                v = column(v_lines, v_d, v_there, d)
                grad = column(grad_lines, grad_d, grad_there, d)
                grad_codes, part = column_backward(codes, seen, grad_codes, v, grad, NET, WITH_V, MASKS)
                chunk_total = put_column(chunk_total, dims, d - start, part)
            store_chunk(grad_v_lines, v_there, start + dims, DV, chunk_total, True, "hld")
    return grad_codes, total
