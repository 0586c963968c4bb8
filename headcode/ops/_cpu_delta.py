"""What the softmax norm's backward pass needs first: Δ = Σ_key y c dL/dz of every query and head.

Of the two parts of dL/dz = Σ_d g u + dL/dm v, the first sums to g·o, which torch has computed into Δ before. This
kernel adds the second, which only two-layer value nets have. Tasks are (batch entries, queries), as in the forward pass.
"""

import numpy as np

from headcode.jit import njit
from headcode.ops._cpu_backward import hidden_backward, mix_gradients
from headcode.ops._cpu_packing import GRAD, K, Q, V, array_at, pack_rows, pack_tile
from headcode.ops._cpu_stages import (
    band_start,
    fill_visible,
    first_seeing,
    mix_values,
    pair_factors,
    scores,
    softmax_codes,
)
from headcode.ops._simd import LANES, add, constant, dot_rows, lane_sum, load, load_rows, multiply, take_next


@njit()
def delta_kernel(specs, tensors, counter, like, numbers, octets):  # type: ignore[no-untyped-def]
    """Take tasks until none is left. `numbers` and `octets` are empty arrays that tell the types."""
    p = specs[0]
    while True:
        task = take_next(counter)
        if task >= p.tasks:
            return
        first_query = task % p.splits * p.length_step
        last_query = min(first_query + p.length_step, p.queries)
        first_batch = task // p.splits * p.batch_step
        last_batch = min(first_batch + p.batch_step, p.batch)
        _delta_task(p, tensors, first_batch, last_batch, first_query, last_query, like, numbers, octets)


@njit()
def _delta_task(p, tensors, b0, b1, q0, q1, like, numbers, octets):  # type: ignore[no-untyped-def]
    heads, block, keys = p.heads, p.block, p.keys
    qk_row, v_row = heads * p.qk_padded, heads * p.v_padded
    dtype = numbers.dtype
    rows = (q1 - q0 + 1) // 2 * 2
    query = np.zeros(rows * qk_row, dtype)
    grad = np.zeros(rows * v_row, dtype)
    key_tile = np.empty(qk_row * block, dtype)
    value_tile = np.empty(v_row * block, dtype)
    s = np.empty(2 * heads * block, dtype)
    mixed = np.empty(2 * p.v_padded * block, dtype)
    grad_mixed = np.empty(2 * p.v_padded * block, dtype)
    squares = np.empty(2 * block, dtype)
    visible = np.empty(block, dtype)
    key_hidden = np.empty(block, dtype)
    factor = np.empty(2 * block, dtype)
    hidden = np.empty(2 * block, dtype)
    band = array_at(p.band, numbers)
    saved = array_at(p.saved, numbers)
    delta = array_at(p.delta, numbers)
    for b in range(b0, b1):
        pack_rows(query, tensors[Q], b, q0, q1, heads, p.qk_width, p.qk_padded, p.scale)
        pack_rows(grad, tensors[GRAD], b, q0, q1, heads, p.v_width, p.v_padded, 1.0)
        for key in range(0, keys, block):
            count = min(block, (keys - key + LANES - 1) // LANES * LANES)
            fill_visible(visible, key_hidden, p, b, key, octets)
            pack_tile(key_tile, tensors[K], b, key, p, p.qk_width, p.qk_padded, visible)
            pack_tile(value_tile, tensors[V], b, key, p, p.v_width, p.v_padded, visible)
            for i in range(first_seeing(p, key, q0), q1, 2):
                pair_factors(factor, hidden, 0, visible, key_hidden, p, key, count, i)
                pair_factors(factor, hidden, block, visible, key_hidden, p, key, count, i + 1)
                scores(s, p, query, (i - q0) * qk_row, key_tile, band, band_start(p, key, i), count, like)
                place = b * heads * p.queries + i
                num_real = min(2, q1 - i)
                for second in range(num_real):
                    softmax_codes(s, second * heads * block, p, hidden, second * block, count, saved, place + second)
                mix_values(mixed, squares, s, p, value_tile, count, like)
                mix_gradients(grad_mixed, s, p, grad, (i - q0) * v_row, count, like)
                for second in range(num_real):
                    start, pair = second * p.v_padded * block, second * block
                    hidden_backward(mixed, grad_mixed, start, squares, squares, factor, pair, p, count)
                    _add_delta(delta, place + second, s, second * heads * block, p, grad_mixed, start, value_tile, count, like)


@njit()
def _add_delta(delta, place, s, start, p, grad_mixed, mixed_start, tile, count, like):  # type: ignore[no-untyped-def]
    """Δ[h] += Σ_key y[h, key] Σ_d c dL/dm[d, key] v[h, d, key]"""
    block, width = p.block, p.v_padded
    for h in range(p.heads):
        total = constant(s, 0.0)
        for d in range(0, width, len(like)):
            for j in range(0, count, LANES):
                values = load_rows(tile, (h * width + d) * block + j, block, like)
                gradients = load_rows(grad_mixed, mixed_start + d * block + j, block, like)
                pulled = dot_rows(gradients, values, constant(s, 0.0))
                total = add(total, multiply(pulled, load(s, start + h * block + j)))
        delta[place + h * p.queries] += lane_sum(total)
