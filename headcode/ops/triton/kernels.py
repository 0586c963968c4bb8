"""The Triton kernels: log sums of softmax, forward, and the gradients of q, of k and v, and of the relative band.

One program has one tile of queries (or of keys, or one diagonal of tiles) of one batch entry and walks over the tiles
that meet it. Every number is written by one program, in one order: no atomics. Programs are counted on one axis,
because the others hold 65,535 at most. Offsets are 64 bits wide.
"""

import triton
import triton.language as tl

from headcode.ops.triton.tiles import (
    band_of,
    codes_of,
    column,
    finite,
    head_pointers,
    keep_pairs,
    line_pointers,
    lines_there,
    multiply,
    own_tile,
    per_query,
    query_offsets,
    raw_scores,
    scores_gradient,
    visible_pairs,
)
from headcode.ops.triton.value_net import chunk, empty_sum, put_column, store_chunk, value_backward, value_forward

# Numbers that change from call to call and must not make a new kernel each time.
UNSPECIALISED = ["num_queries", "num_keys", "query_offset", "stream", "threshold"]


@triton.jit
def tile_scores(
    q_lines, q_d, q_there, k_lines, k_d, k_there, band_heads, heads_there, mask, mask_q, mask_k, rows, cols,
    num_queries, num_keys, query_offset, scale, D: tl.constexpr, DC: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, BAND: tl.constexpr, QK_WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores (HP, BQ, BK) with the relative bias in them, and the pairs that are seen (BQ, BK)."""
    scores = raw_scores(q_lines, q_d, q_there, k_lines, k_d, k_there, D, DC, QK_WIDE, PRECISION) * scale
    if BAND:
        scores += band_of(band_heads, heads_there, rows, cols, num_queries, num_keys)
    seen = visible_pairs(mask, mask_q, mask_k, rows, cols, num_queries, num_keys, query_offset, CAUSAL, MASKED)
    return scores, seen


@triton.jit
def pair_factors(rows, cols, seen, query_offset, stream, threshold, keep_scale, DROPOUT: tl.constexpr):
    """What dropout multiplies the codes with, 0 for pairs that are not seen: (BQ, BK)."""
    if DROPOUT:
        seen = seen & keep_pairs(rows, cols, query_offset, stream, threshold)
    return tl.where(seen, keep_scale, 0.0)


@triton.jit
def key_end(first_row, num_queries, num_keys, query_offset, CAUSAL: tl.constexpr, BQ: tl.constexpr):
    """One past the last key that any of the tile's queries sees."""
    end = num_keys
    if CAUSAL:
        end = tl.maximum(tl.minimum(num_keys, tl.minimum(first_row + BQ, num_queries) + query_offset), 0)
    return end


@triton.jit(do_not_specialize=UNSPECIALISED)
def log_sums_kernel(
    q, k, mask, band, log_sums,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, mask_b, mask_q, mask_k, band_h,
    num_queries, num_keys, query_offset, scale,
    H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DC: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, BAND: tl.constexpr,
    QK_WIDE: tl.constexpr, PRECISION: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Softmax's first pass: the log of every query's sum of exponentials (B, H, Tq); 0 for a query that sees no key."""
    batch, first_row = own_tile(num_queries, BQ)
    heads = tl.arange(0, HP)
    heads_there = heads < H
    rows = first_row + tl.arange(0, BQ)
    q_lines = line_pointers(head_pointers(q, q_b, q_h, batch, heads), rows, q_t)
    q_there = lines_there(heads, rows, num_queries, H)
    k_heads = head_pointers(k, k_b, k_h, batch, heads)
    band_heads = band + heads.to(tl.int64) * band_h
    largest = tl.full((HP, BQ), float("-inf"), tl.float32)
    total = tl.zeros((HP, BQ), tl.float32)
    for first_col in range(0, key_end(first_row, num_queries, num_keys, query_offset, CAUSAL, BQ), BK):
        cols = first_col + tl.arange(0, BK)
        k_there = lines_there(heads, cols, num_keys, H)
        k_lines = line_pointers(k_heads, cols, k_t)
        scores, seen = tile_scores(
            q_lines, q_d, q_there, k_lines, k_d, k_there, band_heads, heads_there, mask + batch * mask_b, mask_q,
            mask_k, rows, cols, num_queries, num_keys, query_offset, scale, D, DC, CAUSAL, MASKED, BAND, QK_WIDE,
            PRECISION,
        )  # fmt: skip
        scores = tl.where(seen[None, :, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 2))
        # Nothing seen yet: any finite number in place of -inf keeps the exponentials 0 instead of NaN.
        centre = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        total = total * tl.exp(largest - centre) + tl.sum(tl.exp(scores - centre[:, :, None]), 2)
        largest = new_largest
    result = tl.where(total > 0, largest + tl.log(tl.where(total > 0, total, 1.0)), 0.0)
    tl.store(log_sums + query_offsets(batch, heads, rows, num_queries, H), result, mask=q_there)


@triton.jit(do_not_specialize=UNSPECIALISED)
def forward_kernel(
    q, k, v, mask, band, log_sums, out,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, out_b, out_h, out_t, mask_b, mask_q, mask_k, band_h,
    num_queries, num_keys, query_offset, scale, stream, threshold, keep_scale,
    H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DC: tl.constexpr, DV: tl.constexpr, DVC: tl.constexpr,
    NORM: tl.constexpr, NET: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, BAND: tl.constexpr,
    DROPOUT: tl.constexpr, QK_WIDE: tl.constexpr, V_WIDE: tl.constexpr, PRECISION: tl.constexpr,
    RMS_EPSILON: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The output of one tile of queries."""
    batch, first_row = own_tile(num_queries, BQ)
    heads = tl.arange(0, HP)
    heads_there = heads < H
    rows = first_row + tl.arange(0, BQ)
    q_there = lines_there(heads, rows, num_queries, H)
    q_lines = line_pointers(head_pointers(q, q_b, q_h, batch, heads), rows, q_t)
    out_lines = line_pointers(head_pointers(out, out_b, out_h, batch, heads), rows, out_t)
    k_heads = head_pointers(k, k_b, k_h, batch, heads)
    v_heads = head_pointers(v, v_b, v_h, batch, heads)
    band_heads = band + heads.to(tl.int64) * band_h
    sums = per_query(log_sums, batch, heads, rows, num_queries, H, NORM == "softmax")
    ORDER: tl.constexpr = "lhd" if V_WIDE and NET != "linear" else "hld"
    total = empty_sum(HP, BQ, DVC, ORDER)
    for first_col in range(0, key_end(first_row, num_queries, num_keys, query_offset, CAUSAL, BQ), BK):
        cols = first_col + tl.arange(0, BK)
        k_there = lines_there(heads, cols, num_keys, H)
        k_lines = line_pointers(k_heads, cols, k_t)
        scores, seen = tile_scores(
            q_lines, q_d, q_there, k_lines, k_d, k_there, band_heads, heads_there, mask + batch * mask_b, mask_q,
            mask_k, rows, cols, num_queries, num_keys, query_offset, scale, D, DC, CAUSAL, MASKED, BAND, QK_WIDE,
            PRECISION,
        )  # fmt: skip
        codes, _ = codes_of(scores, sums, seen, keep_scale, H, NORM, RMS_EPSILON)
        factors = pair_factors(rows, cols, seen, query_offset, stream, threshold, keep_scale, DROPOUT)
        total = value_forward(
            codes * factors[None, :, :], seen, line_pointers(v_heads, cols, v_t), v_d, k_there, total, out_lines,
            q_there, DV, DVC, NET, V_WIDE, CAUSAL or MASKED, PRECISION,
        )  # fmt: skip
        if DV > DVC:
            tl.debug_barrier()
    if DV <= DVC:
        store_chunk(out_lines, q_there, tl.arange(0, DVC), DV, total, False, ORDER)


@triton.jit
def tile_backward(
    q_lines, q_d, q_there, k_lines, k_d, k_there, v_lines, v_d, grad_lines, grad_d, band_heads, heads_there,
    mask, mask_q, mask_k, sums, deltas, rows, cols, total, grad_v_lines,
    num_queries, num_keys, query_offset, scale, stream, threshold, keep_scale,
    H: tl.constexpr, D: tl.constexpr, DC: tl.constexpr, DV: tl.constexpr, DVC: tl.constexpr,
    NORM: tl.constexpr, NET: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, BAND: tl.constexpr,
    DROPOUT: tl.constexpr, QK_WIDE: tl.constexpr, V_WIDE: tl.constexpr, WITH_V: tl.constexpr, TO_CODES: tl.constexpr,
    PRECISION: tl.constexpr, RMS_EPSILON: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile's scores (with TO_CODES, codes × their gradients), and `total` with v's gradient added."""
    scores, seen = tile_scores(
        q_lines, q_d, q_there, k_lines, k_d, k_there, band_heads, heads_there, mask, mask_q, mask_k, rows, cols,
        num_queries, num_keys, query_offset, scale, D, DC, CAUSAL, MASKED, BAND, QK_WIDE, PRECISION,
    )  # fmt: skip
    codes, factor = codes_of(scores, sums, seen, keep_scale, H, NORM, RMS_EPSILON)
    factors = pair_factors(rows, cols, seen, query_offset, stream, threshold, keep_scale, DROPOUT)
    grad_codes, total = value_backward(
        codes * factors[None, :, :], seen, v_lines, v_d, k_there, grad_lines, grad_d, q_there, total, grad_v_lines,
        DV, DVC, NET, V_WIDE, WITH_V, CAUSAL or MASKED, PRECISION,
    )  # fmt: skip
    grad_codes = grad_codes * factors[None, :, :]
    if TO_CODES:
        result = tl.where(seen[None, :, :], codes * grad_codes, 0.0)
    else:
        result = scores_gradient(codes, factor, grad_codes, deltas, seen, H, NORM, RMS_EPSILON)
    return result, total


@triton.jit
def contract(gradient, numbers, OVER_KEYS: tl.constexpr):
    """Σ over keys of gradient (HP, BQ, BK) × numbers (HP, BK), or over queries with numbers (HP, BQ)."""
    if OVER_KEYS:
        return tl.sum(gradient * numbers[:, None, :], 2)
    else:
        return tl.sum(gradient * numbers[:, :, None], 1)


@triton.jit
def add_product(
    total, gradient, lines, stride, there, grad_lines, grad_there, scale,
    D: tl.constexpr, DC: tl.constexpr, WIDE: tl.constexpr, OVER_KEYS: tl.constexpr, MASKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`total` plus scale · gradient of the scores · k (of q unless OVER_KEYS); to memory if DC dims are not all."""
    dims = tl.arange(0, DC)
    if WIDE:
        gradient = (gradient * scale).to(lines.dtype.element_ty)
        if not OVER_KEYS:
            gradient = tl.permute(gradient, (0, 2, 1))
        for start in range(0, D, DC):
            here = start + dims
            part = multiply(gradient, finite(chunk(lines, stride, there, here, D, "hld"), MASKS), PRECISION)
            if D <= DC:
                total += part
            else:
                store_chunk(grad_lines, grad_there, here, D, part, True, "hld")
    elif D <= DC:
        for d in range(D):
            part = contract(gradient, finite(column(lines, stride, there, d), MASKS), OVER_KEYS)
            total = put_column(total, dims, d, part * scale)
    else:
        for start in range(0, D, DC):
            chunk_total = tl.zeros(total.shape, tl.float32)
            for d in range(start, tl.minimum(start + DC, D)):
                part = contract(gradient, finite(column(lines, stride, there, d), MASKS), OVER_KEYS)
                chunk_total = put_column(chunk_total, dims, d - start, part * scale)
            store_chunk(grad_lines, grad_there, start + dims, D, chunk_total, True, "hld")
    return total


@triton.jit(do_not_specialize=UNSPECIALISED)
def query_kernel(
    q, k, v, mask, band, grad, log_sums, delta, grad_q,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, grad_b, grad_h, grad_t, grad_d,
    grad_q_b, grad_q_h, grad_q_t, mask_b, mask_q, mask_k, band_h,
    num_queries, num_keys, query_offset, scale, stream, threshold, keep_scale,
    H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DC: tl.constexpr, DV: tl.constexpr, DVC: tl.constexpr,
    NORM: tl.constexpr, NET: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, BAND: tl.constexpr,
    DROPOUT: tl.constexpr, QK_WIDE: tl.constexpr, V_WIDE: tl.constexpr, TO_CODES: tl.constexpr,
    PRECISION: tl.constexpr, RMS_EPSILON: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile of queries; with TO_CODES softmax's `delta`: Σ over keys of codes × gradients."""
    batch, first_row = own_tile(num_queries, BQ)
    heads = tl.arange(0, HP)
    heads_there = heads < H
    rows = first_row + tl.arange(0, BQ)
    q_there = lines_there(heads, rows, num_queries, H)
    q_lines = line_pointers(head_pointers(q, q_b, q_h, batch, heads), rows, q_t)
    grad_lines = line_pointers(head_pointers(grad, grad_b, grad_h, batch, heads), rows, grad_t)
    out_lines = line_pointers(head_pointers(grad_q, grad_q_b, grad_q_h, batch, heads), rows, grad_q_t)
    k_heads = head_pointers(k, k_b, k_h, batch, heads)
    v_heads = head_pointers(v, v_b, v_h, batch, heads)
    band_heads = band + heads.to(tl.int64) * band_h
    sums = per_query(log_sums, batch, heads, rows, num_queries, H, NORM == "softmax")
    deltas = per_query(delta, batch, heads, rows, num_queries, H, NORM == "softmax" and not TO_CODES)
    total = tl.zeros((HP, BQ, DC), tl.float32)
    for first_col in range(0, key_end(first_row, num_queries, num_keys, query_offset, CAUSAL, BQ), BK):
        cols = first_col + tl.arange(0, BK)
        k_there = lines_there(heads, cols, num_keys, H)
        k_lines = line_pointers(k_heads, cols, k_t)
        gradient, _ = tile_backward(
            q_lines, q_d, q_there, k_lines, k_d, k_there, line_pointers(v_heads, cols, v_t), v_d, grad_lines, grad_d,
            band_heads, heads_there, mask + batch * mask_b, mask_q, mask_k, sums, deltas, rows, cols, 0.0, grad_lines,
            num_queries, num_keys, query_offset, scale, stream, threshold, keep_scale,
            H, D, DC, DV, DVC, NORM, NET, CAUSAL, MASKED, BAND, DROPOUT, QK_WIDE, V_WIDE, False, TO_CODES, PRECISION,
            RMS_EPSILON,
        )  # fmt: skip
        if TO_CODES:
            deltas += tl.sum(gradient, 2)
        else:
            total = add_product(
                total, gradient, k_lines, k_d, k_there, out_lines, q_there, scale,
                D, DC, QK_WIDE, True, CAUSAL or MASKED, PRECISION,
            )  # fmt: skip
        if D > DC and not TO_CODES:
            tl.debug_barrier()
    if TO_CODES:
        tl.store(delta + query_offsets(batch, heads, rows, num_queries, H), deltas, mask=q_there)
    elif D <= DC:
        store_chunk(out_lines, q_there, tl.arange(0, DC), D, total, False, "hld")


@triton.jit(do_not_specialize=UNSPECIALISED)
def key_kernel(
    q, k, v, mask, band, grad, log_sums, delta, grad_k, grad_v,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, grad_b, grad_h, grad_t, grad_d,
    grad_k_b, grad_k_h, grad_k_t, grad_v_b, grad_v_h, grad_v_t, mask_b, mask_q, mask_k, band_h,
    num_queries, num_keys, query_offset, scale, stream, threshold, keep_scale,
    H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DC: tl.constexpr, DV: tl.constexpr, DVC: tl.constexpr,
    NORM: tl.constexpr, NET: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, BAND: tl.constexpr,
    DROPOUT: tl.constexpr, QK_WIDE: tl.constexpr, V_WIDE: tl.constexpr,
    PRECISION: tl.constexpr, RMS_EPSILON: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The gradients of one tile of keys and values."""
    batch, first_col = own_tile(num_keys, BK)
    heads = tl.arange(0, HP)
    heads_there = heads < H
    cols = first_col + tl.arange(0, BK)
    k_there = lines_there(heads, cols, num_keys, H)
    k_lines = line_pointers(head_pointers(k, k_b, k_h, batch, heads), cols, k_t)
    v_lines = line_pointers(head_pointers(v, v_b, v_h, batch, heads), cols, v_t)
    grad_k_lines = line_pointers(head_pointers(grad_k, grad_k_b, grad_k_h, batch, heads), cols, grad_k_t)
    grad_v_lines = line_pointers(head_pointers(grad_v, grad_v_b, grad_v_h, batch, heads), cols, grad_v_t)
    q_heads = head_pointers(q, q_b, q_h, batch, heads)
    grad_heads = head_pointers(grad, grad_b, grad_h, batch, heads)
    band_heads = band + heads.to(tl.int64) * band_h
    total_k = tl.zeros((HP, BK, DC), tl.float32)
    ORDER: tl.constexpr = "lhd" if V_WIDE and NET != "linear" else "hld"
    total_v = empty_sum(HP, BK, DVC, ORDER)
    start_row = 0
    if CAUSAL:
        start_row = tl.maximum(first_col - query_offset, 0) // BQ * BQ
    for first_row in range(start_row, num_queries, BQ):
        rows = first_row + tl.arange(0, BQ)
        q_there = lines_there(heads, rows, num_queries, H)
        q_lines = line_pointers(q_heads, rows, q_t)
        sums = per_query(log_sums, batch, heads, rows, num_queries, H, NORM == "softmax")
        deltas = per_query(delta, batch, heads, rows, num_queries, H, NORM == "softmax")
        gradient, total_v = tile_backward(
            q_lines, q_d, q_there, k_lines, k_d, k_there, v_lines, v_d, line_pointers(grad_heads, rows, grad_t), grad_d,
            band_heads, heads_there, mask + batch * mask_b, mask_q, mask_k, sums, deltas, rows, cols, total_v,
            grad_v_lines, num_queries, num_keys, query_offset, scale, stream, threshold, keep_scale,
            H, D, DC, DV, DVC, NORM, NET, CAUSAL, MASKED, BAND, DROPOUT, QK_WIDE, V_WIDE, True, False, PRECISION,
            RMS_EPSILON,
        )  # fmt: skip
        total_k = add_product(
            total_k, gradient, q_lines, q_d, q_there, grad_k_lines, k_there, scale,
            D, DC, QK_WIDE, False, CAUSAL or MASKED, PRECISION,
        )  # fmt: skip
        if D > DC or DV > DVC:
            tl.debug_barrier()
    if D <= DC:
        store_chunk(grad_k_lines, k_there, tl.arange(0, DC), D, total_k, False, "hld")
    if DV <= DVC:
        store_chunk(grad_v_lines, k_there, tl.arange(0, DVC), DV, total_v, False, ORDER)


@triton.jit(do_not_specialize=[*UNSPECIALISED, "num_batch", "batch_step"])
def band_kernel(
    q, k, v, mask, band, grad, log_sums, delta, parts,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, grad_b, grad_h, grad_t, grad_d,
    mask_b, mask_q, mask_k, band_h,
    num_queries, num_keys, query_offset, scale, stream, threshold, keep_scale, num_batch, batch_step,
    H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DC: tl.constexpr, DV: tl.constexpr, DVC: tl.constexpr,
    NORM: tl.constexpr, NET: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr,
    QK_WIDE: tl.constexpr, V_WIDE: tl.constexpr, PRECISION: tl.constexpr, RMS_EPSILON: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The gradient of the scores, summed over the square tiles of one diagonal and some batch entries.

    Tiles (i, j) with the same j - i hold the same distances k - q at the same offsets, so that their sum is one tile;
    `parts` (groups, diagonals, H, BQ, BQ) is what is left to sum along diagonals within tiles.
    """
    query_tiles = tl.cdiv(num_queries, BQ)
    key_tiles = tl.cdiv(num_keys, BK)
    diagonals = query_tiles + key_tiles - 1
    group = tl.program_id(0) // diagonals
    diagonal = tl.program_id(0) % diagonals
    apart = diagonal - (query_tiles - 1)
    heads = tl.arange(0, HP)
    heads_there = heads < H
    band_heads = band + heads.to(tl.int64) * band_h
    total = tl.zeros((HP, BQ, BK), tl.float32)
    last_tile = tl.minimum(query_tiles, key_tiles - apart)
    if CAUSAL:
        # Beyond every query of its tiles a diagonal has nothing to see.
        last_tile = tl.where(apart * BK < BQ + query_offset, last_tile, 0)
    for entry in range(group * batch_step, tl.minimum((group + 1) * batch_step, num_batch)):
        batch = tl.cast(entry, tl.int64)
        for tile in range(tl.maximum(-apart, 0), last_tile):
            rows = tile * BQ + tl.arange(0, BQ)
            cols = (tile + apart) * BK + tl.arange(0, BK)
            q_there = lines_there(heads, rows, num_queries, H)
            k_there = lines_there(heads, cols, num_keys, H)
            sums = per_query(log_sums, batch, heads, rows, num_queries, H, NORM == "softmax")
            deltas = per_query(delta, batch, heads, rows, num_queries, H, NORM == "softmax")
            gradient, _ = tile_backward(
                line_pointers(head_pointers(q, q_b, q_h, batch, heads), rows, q_t), q_d, q_there,
                line_pointers(head_pointers(k, k_b, k_h, batch, heads), cols, k_t), k_d, k_there,
                line_pointers(head_pointers(v, v_b, v_h, batch, heads), cols, v_t), v_d,
                line_pointers(head_pointers(grad, grad_b, grad_h, batch, heads), rows, grad_t), grad_d,
                band_heads, heads_there, mask + batch * mask_b, mask_q, mask_k, sums, deltas, rows, cols, 0.0, parts,
                num_queries, num_keys, query_offset, scale, stream, threshold, keep_scale,
                H, D, DC, DV, DVC, NORM, NET, CAUSAL, MASKED, True, DROPOUT, QK_WIDE, V_WIDE, False, False, PRECISION,
                RMS_EPSILON,
            )  # fmt: skip
            total += gradient
    offset = tl.program_id(0).to(tl.int64) * (H * BQ * BK)
    inner = heads[:, None, None] * (BQ * BK) + tl.arange(0, BQ)[None, :, None] * BK + tl.arange(0, BK)[None, None, :]
    tl.store(parts + offset + inner, total, mask=heads_there[:, None, None] & (tl.zeros((1, BQ, BK), tl.int32) == 0))
