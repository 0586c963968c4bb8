"""The fused forward kernel: tasks of (batch entries, queries), each over all heads and all keys."""

import numpy as np

from headcode.jit import njit
from headcode.ops._cpu_packing import (
    LINEAR,
    OUT,
    RMS_HEAD,
    SOFTMAX,
    K,
    Q,
    V,
    array_at,
    pack_rows,
    pack_tile,
    unpack_rows,
)
from headcode.ops._cpu_stages import (
    activate,
    band_start,
    fill_visible,
    first_seeing,
    log_sum,
    mix_values,
    pair_factors,
    rms_inverse,
    scores,
    softmax_codes,
    softmax_statistics,
    softmax_whole,
)
from headcode.ops._simd import (
    LANES,
    add_lane_sums,
    constant,
    load,
    load_rows,
    muladd,
    muladd_rows,
    multiply,
    store,
    take_next,
    zero_rows,
)


@njit()
def forward_kernel(specs, tensors, counter, like, numbers, octets):  # type: ignore[no-untyped-def]
    """Take tasks until none is left. `numbers` and `octets` are empty arrays that tell the types."""
    p = specs[0]
    while True:
        task = take_next(counter)
        if task >= p.tasks:
            return
        first_query = task % p.splits * p.length_step
        last_query = min(first_query + p.length_step, p.queries)
        first_batch = task // p.splits * p.batch_step
        _forward_task(
            p, tensors, first_batch, min(first_batch + p.batch_step, p.batch), first_query, last_query, like, numbers, octets
        )


@njit()
def _forward_task(p, tensors, b0, b1, q0, q1, like, numbers, octets):  # type: ignore[no-untyped-def]
    heads, block, keys = p.heads, p.block, p.keys
    qk_row, v_row = heads * p.qk_padded, heads * p.v_padded
    dtype = numbers.dtype
    rows = (q1 - q0 + 1) // 2 * 2
    query = np.empty(rows * qk_row, dtype)
    out = np.empty(rows * v_row, dtype)
    key_tile = np.empty(qk_row * block, dtype)
    value_tile = np.empty(v_row * block, dtype)
    s = np.empty(2 * heads * block, dtype)
    mixed = np.empty(2 * p.v_padded * block, dtype)
    squares = np.empty(2 * block, dtype)
    visible = np.empty(block, dtype)
    key_hidden = np.empty(block, dtype)
    factor = np.empty(2 * block, dtype)
    hidden = np.empty(2 * block, dtype)
    band = array_at(p.band, numbers)
    saved = array_at(p.saved, numbers)
    single = keys <= block
    several = p.norm == SOFTMAX and not single
    statistics = rows * heads if several else 0
    largest = np.empty(statistics, dtype)
    total = np.empty(statistics, dtype)
    for b in range(b0, b1):
        pack_rows(query, tensors[Q], b, q0, q1, heads, p.qk_width, p.qk_padded, p.scale)
        out[:] = 0
        if several:
            largest[:] = -np.inf
            total[:] = 0
            for key in range(0, keys, block):
                count = min(block, (keys - key + LANES - 1) // LANES * LANES)
                fill_visible(visible, key_hidden, p, b, key, octets)
                pack_tile(key_tile, tensors[K], b, key, p, p.qk_width, p.qk_padded, visible)
                for i in range(first_seeing(p, key, q0), q1, 2):
                    pair_factors(factor, hidden, 0, visible, key_hidden, p, key, count, i)
                    pair_factors(factor, hidden, block, visible, key_hidden, p, key, count, i + 1)
                    scores(s, p, query, (i - q0) * qk_row, key_tile, band, band_start(p, key, i), count, like)
                    softmax_statistics(s, 0, p, hidden, 0, count, largest, total, (i - q0) * heads)
                    softmax_statistics(s, heads * block, p, hidden, block, count, largest, total, (i + 1 - q0) * heads)
            for i in range(q0, q1):
                for h in range(heads):
                    place = (i - q0) * heads + h
                    saved[(b * heads + h) * p.queries + i] = log_sum(largest[place], total[place])
        for key in range(0, keys, block):
            count = min(block, (keys - key + LANES - 1) // LANES * LANES)
            fill_visible(visible, key_hidden, p, b, key, octets)
            pack_tile(key_tile, tensors[K], b, key, p, p.qk_width, p.qk_padded, visible)
            pack_tile(value_tile, tensors[V], b, key, p, p.v_width, p.v_padded, visible)
            for i in range(first_seeing(p, key, q0), q1, 2):
                pair_factors(factor, hidden, 0, visible, key_hidden, p, key, count, i)
                pair_factors(factor, hidden, block, visible, key_hidden, p, key, count, i + 1)
                scores(s, p, query, (i - q0) * qk_row, key_tile, band, band_start(p, key, i), count, like)
                if p.norm == SOFTMAX:
                    for second in range(min(2, p.queries - i)):
                        place = b * heads * p.queries + i + second
                        if single:
                            softmax_whole(s, second * heads * block, p, hidden, second * block, count, saved, place)
                        else:
                            softmax_codes(s, second * heads * block, p, hidden, second * block, count, saved, place)
                if p.net == LINEAR:
                    for second in range(2):
                        _pool_linear(out, (i + second - q0) * v_row, s, second * heads * block, p, factor, second * block, value_tile, count, like)
                else:
                    mix_values(mixed, squares, s, p, value_tile, count, like)
                    for second in range(2):
                        _hidden_layer(mixed, second * p.v_padded * block, squares, factor, second * block, p, count)
                        _pool(out, (i + second - q0) * v_row, s, second * heads * block, p, mixed, second * p.v_padded * block, count, like)
        unpack_rows(tensors[OUT], out, b, q0, q1, heads, p.v_width, p.v_padded, 1.0)


@njit()
def _hidden_layer(mixed, start, squares, factor, pair, p, count):  # type: ignore[no-untyped-def]
    """In place: Σ_h y v of every pair becomes c·φ(c Σ_h y v), so that pooling it with y gives the output."""
    for j in range(0, count, LANES):
        c = load(factor, pair + j)
        if p.norm == RMS_HEAD:
            c = multiply(c, rms_inverse(load(squares, pair + j), p, squares))
        for d in range(p.v_padded):
            value, _ = activate(multiply(c, load(mixed, start + d * p.block + j)), p.net, mixed)
            store(mixed, start + d * p.block + j, multiply(c, value))


@njit()
def _pool(out, place, s, start, p, hidden, hidden_start, count, like):  # type: ignore[no-untyped-def]
    """out[h, d] += Σ_key s[h, key] hidden[d, key]"""
    block, width = p.block, p.v_padded
    for h in range(0, p.heads - 1, 2):
        for d in range(0, width, len(like)):
            first, second = zero_rows(out, like), zero_rows(out, like)
            codes = start + h * block
            rows = hidden_start + d * block
            for j in range(0, count, LANES):
                values = load_rows(hidden, rows + j, block, like)
                first = muladd_rows(load(s, codes + j), values, first)
                second = muladd_rows(load(s, codes + block + j), values, second)
            add_lane_sums(out, place + h * width + d, first)
            add_lane_sums(out, place + (h + 1) * width + d, second)
    if p.heads % 2:
        h = p.heads - 1
        for d in range(0, width, len(like)):
            total = zero_rows(out, like)
            for j in range(0, count, LANES):
                values = load_rows(hidden, hidden_start + d * block + j, block, like)
                total = muladd_rows(load(s, start + h * block + j), values, total)
            add_lane_sums(out, place + h * width + d, total)


@njit()
def _pool_linear(out, place, s, start, p, factor, pair, tile, count, like):  # type: ignore[no-untyped-def]
    """out[h, d] += Σ_key c[key] s[h, key] v[h, d, key]; `factor` is overwritten."""
    block, width = p.block, p.v_padded
    if p.norm == RMS_HEAD:
        for j in range(0, count, LANES):
            square = constant(s, 0.0)
            for h in range(p.heads):
                square = muladd(load(s, start + h * block + j), load(s, start + h * block + j), square)
            store(factor, pair + j, multiply(load(factor, pair + j), rms_inverse(square, p, s)))
    for h in range(p.heads):
        for d in range(0, width, len(like)):
            total = zero_rows(out, like)
            rows = (h * width + d) * block
            for j in range(0, count, LANES):
                code = multiply(load(s, start + h * block + j), load(factor, pair + j))
                total = muladd_rows(code, load_rows(tile, rows + j, block, like), total)
            add_lane_sums(out, place + h * width + d, total)
