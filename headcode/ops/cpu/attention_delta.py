"""What the softmax norm's backward pass needs first: Δ = Σ_key y c dL/dz of every query and head.

Of the two parts of dL/dz = Σ_d g u + dL/dm v, the first sums to g·o, which torch has computed into Δ before. This
kernel adds the second, which only two-layer value nets have. Tasks are (batch entries, queries), as in the forward
pass.
"""

import numpy as np

from headcode.jit import njit
from headcode.ops.cpu.attention_backward import hidden_backward, mix_gradients
from headcode.ops.cpu.attention_stages import (
    band_start,
    fill_visible,
    first_seeing,
    mix_values,
    num_lanes,
    pair_factors,
    scores,
    softmax_codes,
)
from headcode.ops.cpu.packing import (
    DOUBLE,
    FOUR,
    GRAD,
    OCTETS,
    SINGLE,
    SPECS,
    TWO,
    WORDS,
    K,
    Q,
    V,
    array_at,
    pack_rows,
    pack_tile,
    stage,
    table_at,
    task_range,
)
from headcode.ops.cpu.simd import LANES, constant, dot_rows, load, load_rows, muladd, rolled, take_next
from headcode.ops.cpu.simd_math import lane_sum


@stage
def _delta(address, like, numbers):  # type: ignore[no-untyped-def]
    p, counter = array_at(address, SPECS)[0], array_at(address, WORDS)
    tensors = table_at(p.tensors)
    heads, block, keys = p.heads, p.block, p.keys
    qk_row, v_row = heads * p.qk_padded, heads * p.v_padded
    dtype = numbers.dtype
    rows = (p.length_step + 1) // 2 * 2
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
    while True:
        task = take_next(counter)
        if task >= p.tasks:
            return
        b0, b1, q0, q1 = task_range(p, task, p.queries)
        for b in range(b0, b1):
            pack_rows(query, tensors[Q], b, q0, q1, heads, p.qk_width, p.qk_padded, p.scale)
            pack_rows(grad, tensors[GRAD], b, q0, q1, heads, p.v_width, p.v_padded, 1.0)
            for key in range(0, keys, block):
                count = num_lanes(p, key)
                fill_visible(visible, key_hidden, p, b, key, OCTETS)
                pack_tile(key_tile, tensors[K], b, key, p, p.qk_width, p.qk_padded, visible, like)
                pack_tile(value_tile, tensors[V], b, key, p, p.v_width, p.v_padded, visible, like)
                for i in range(first_seeing(p, key, q0), q1, 2):
                    pair_factors(factor, hidden, visible, key_hidden, p, key, count, i)
                    start = band_start(p, key, i)
                    scores(s, p, query, (i - q0) * qk_row, key_tile, band, start, count, like)
                    place = b * heads * p.queries + i
                    num_real = min(2, p.queries - i)
                    softmax_codes(s, p, hidden, count, saved, place, num_real)
                    mix_values(mixed, squares, s, p, value_tile, count, like)
                    mix_gradients(grad_mixed, s, p, grad, (i - q0) * v_row, count, like)
                    hidden_backward(mixed, grad_mixed, squares, squares, factor, p, count, like)
                    _add_delta(delta, place, s, p, grad_mixed, value_tile, num_real, count, like)


@stage
def _add_delta(delta, place, s, p, grad_mixed, tile, num_queries, count, like):  # type: ignore[no-untyped-def]
    """Δ[h] += Σ_key y[h, key] Σ_d c dL/dm[d, key] v[h, d, key], of one or two queries."""
    heads, block, width = p.heads, p.block, p.v_padded
    n = len(like)
    for line in range(num_queries * heads):
        second = line // heads
        h = line - second * heads
        total = constant(s, 0.0)
        for d in range(0, width, n):
            for j in range(0, count, LANES):
                rolled()
                values = load_rows(tile, (h * width + d) * block + j * n, like)
                gradients = load_rows(grad_mixed, (second * width + d) * block + j * n, like)
                pulled = dot_rows(gradients, values, constant(s, 0.0))
                total = muladd(pulled, load(s, line * block + j), total)
        delta[place + second + h * p.queries] += lane_sum(total)


@njit()
def delta_kernel(address):  # type: ignore[no-untyped-def]
    """Take tasks until none is left, of the call whose record is at the address."""
    _delta(address, FOUR, SINGLE)


@njit()
def delta_narrow_kernel(address):  # type: ignore[no-untyped-def]
    """The same for widths up to 2."""
    _delta(address, TWO, SINGLE)


@njit()
def delta_double_kernel(address):  # type: ignore[no-untyped-def]
    """The same in float64."""
    _delta(address, TWO, DOUBLE)
