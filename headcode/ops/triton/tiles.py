"""Pieces of the Triton kernels: the pairs of one tile, their scores, codes, and the way back through the norm.

A tile is (HP, BQ, BK), HP the heads padded to a power of 2. Heads, queries and keys beyond the real ones read as 0 and
are never visible. `rows` and `cols` are query and key numbers, lines either of them; `*_heads` are pointers to the
heads of one batch entry, `*_lines` to the lines of those (HP, lines), `*_there` which of these are real.
"""

import triton
import triton.language as tl

from headcode.ops.triton.backend import INTERPRETED as _INTERPRETED

INTERPRETED = tl.constexpr(_INTERPRETED)


@triton.jit
def multiply(a, b, PRECISION: tl.constexpr):
    """Batched matrix products (N, I, J) = (N, I, L) · (N, L, J), summed in float32."""
    if INTERPRETED:  # whose products take the bits of a bfloat16 for an integer
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def mix(x):
    """`dropout.mix` on unsigned 32-bit words."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def keep_pairs(rows, cols, query_offset, stream, threshold):
    """The pairs that `dropout.keep_mask` keeps: (BQ, BK)."""
    positions = (rows + query_offset).to(tl.uint32)
    lines = mix(positions * 0x9E3779B1 + stream.to(tl.uint32))
    hashes = mix(lines[:, None] + (cols.to(tl.uint32) * 0x85EBCA77)[None, :])
    return hashes >= threshold.to(tl.uint32)


@triton.jit
def visible_pairs(
    mask, mask_q, mask_k, rows, cols, num_queries, num_keys, query_offset, CAUSAL: tl.constexpr, MASKED: tl.constexpr
):
    """(BQ, BK); `mask` points to the batch entry's mask, one byte per pair."""
    seen = (rows < num_queries)[:, None] & (cols < num_keys)[None, :]
    if CAUSAL:
        seen = seen & (cols[None, :] <= (rows + query_offset)[:, None])
    if MASKED:
        offsets = rows.to(tl.int64)[:, None] * mask_q + cols.to(tl.int64)[None, :] * mask_k
        seen = seen & (tl.load(mask + offsets, mask=seen, other=0) != 0)
    return seen


@triton.jit
def own_tile(num_lines, SIZE: tl.constexpr):
    """This program's batch entry, and the first line of its tile."""
    num_tiles = tl.cdiv(num_lines, SIZE)
    return (tl.program_id(0) // num_tiles).to(tl.int64), (tl.program_id(0) % num_tiles) * SIZE


@triton.jit
def head_pointers(tensor, stride_b, stride_h, batch, heads):
    """Where the heads of one batch entry begin: (HP,)."""
    return tensor + batch * stride_b + heads.to(tl.int64) * stride_h


@triton.jit
def line_pointers(heads, lines, stride):
    """Where the lines of every head begin: (HP, lines)."""
    return heads[:, None] + lines.to(tl.int64)[None, :] * stride


@triton.jit
def lines_there(heads, lines, num_lines, H: tl.constexpr):
    """Which heads and lines are real: (HP, lines)."""
    return (heads < H)[:, None] & (lines < num_lines)[None, :]


@triton.jit
def query_offsets(batch, heads, rows, num_queries, H: tl.constexpr):
    """Of every head's queries in a tensor (B, H, Tq): (HP, BQ)."""
    return (batch * H + heads)[:, None] * num_queries + rows[None, :]


@triton.jit
def per_query(tensor, batch, heads, rows, num_queries, H: tl.constexpr, USED: tl.constexpr):
    """The numbers of a tensor (B, H, Tq) for a tile's queries (HP, BQ), or zeros where it is not used."""
    numbers = tl.zeros((heads.shape[0], rows.shape[0]), tl.float32)
    if USED:
        offsets = query_offsets(batch, heads, rows, num_queries, H)
        numbers = tl.load(tensor + offsets, mask=lines_there(heads, rows, num_queries, H), other=0.0)
    return numbers


@triton.jit
def column(lines, stride, there, d):
    """Dim d of every head's lines, in float32: (HP, lines)."""
    return tl.load(lines + tl.cast(d, tl.int64) * stride, mask=there, other=0.0).to(tl.float32)


@triton.jit
def finite(x, MASKS: tl.constexpr):
    """With masks, x with 0 for what is not finite: a masked pair's 0 · NaN would be NaN."""
    if MASKS:
        x = tl.where(x - x == 0, x, 0.0).to(x.dtype)
    return x


@triton.jit
def spoil(codes, x, seen):
    """The codes (HP, BQ, BK), NaN where a seen key's line of x (HP, BK, dims) has a number that is not finite."""
    return codes + tl.where(seen[None, :, :], tl.sum((x - x).to(tl.float32), 2)[:, None, :], 0.0)


@triton.jit
def raw_scores(
    q_lines, q_d, q_there, k_lines, k_d, k_there,
    D: tl.constexpr, DC: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Dot products (HP, BQ, BK): one dim at a time, or WIDE, DC dims at a time on matrix units."""
    scores = tl.zeros((q_lines.shape[0], q_lines.shape[1], k_lines.shape[1]), tl.float32)
    if WIDE:
        dims = tl.arange(0, DC)
        for start in range(0, D, DC):
            here = start + dims
            inside = here < D
            q_there_too = q_there[:, :, None] & inside[None, None, :]
            k_there_too = k_there[:, None, :] & inside[None, :, None]
            q = tl.load(q_lines[:, :, None] + here[None, None, :] * q_d, mask=q_there_too, other=0.0)
            k = tl.load(k_lines[:, None, :] + here[None, :, None] * k_d, mask=k_there_too, other=0.0)
            scores += multiply(q, k, PRECISION)
    else:
        for d in range(D):
            q = column(q_lines, q_d, q_there, d)
            k = column(k_lines, k_d, k_there, d)
            scores += q[:, :, None] * k[:, None, :]
    return scores


@triton.jit
def band_of(band_heads, heads_there, rows, cols, num_queries, num_keys):
    """The relative bias of every pair: (HP, BQ, BK). Pairs outside the call read 0."""
    offsets = cols[None, :] - rows[:, None] + (num_queries - 1)
    inside = (rows < num_queries)[:, None] & (cols < num_keys)[None, :]
    there = heads_there[:, None, None] & inside[None, :, :]
    return tl.load(band_heads[:, None, None] + offsets[None, :, :], mask=there, other=0.0).to(tl.float32)


@triton.jit
def codes_of(scores, log_sums, seen, keep_scale, H: tl.constexpr, NORM: tl.constexpr, RMS_EPSILON: tl.constexpr):
    """(codes before dropout, their factor per pair for the way back); 0 where a pair is not seen."""
    if NORM == "rms_head":
        factor = tl.rsqrt(tl.sum(scores * scores, 0) / H + RMS_EPSILON)
        codes = scores * factor[None, :, :]
    elif NORM == "softmax":
        factor = keep_scale
        codes = tl.exp(scores - log_sums[:, :, None])
    else:
        factor = keep_scale
        codes = scores
    return tl.where(seen[None, :, :], codes, 0.0), factor


@triton.jit
def scores_gradient(codes, factor, grad, delta, seen, H: tl.constexpr, NORM: tl.constexpr, RMS_EPSILON: tl.constexpr):
    """Back through the norm, from the gradient of the codes before dropout."""
    grad = tl.where(seen[None, :, :], grad, 0.0)
    if NORM == "rms_head" and H == 1:
        # 1 - codes² is ε·factor²: over one head the subtraction below would leave rounding.
        grad *= (RMS_EPSILON * factor * factor * factor)[None, :, :]
        grad = tl.where(seen[None, :, :], grad, 0.0)
    elif NORM == "rms_head":
        grad = factor[None, :, :] * (grad - codes * (tl.sum(codes * grad, 0) / H)[None, :, :])
        grad = tl.where(seen[None, :, :], grad, 0.0)
    elif NORM == "softmax":
        grad = tl.where(seen[None, :, :], codes * (grad - delta[:, :, None]), 0.0)
    return grad
