"""The fused backward kernel: tasks of (batch entries, blocks of keys), each over all heads and all queries.

Codes are recomputed, nothing of size Tq×Tk is kept. With raw codes y, factor c (see `_cpu_stages`), g = dL/do:

    m = c Σ_h y v      u = φ(m)      dL/dm = φ'(m) c Σ_h y g
    dL/dv = y · c dL/dm                                   dL/dz = Σ_d g u + dL/dm v
    none:      dL/ds = c dL/dz
    rms_head:  dL/ds = c dL/dz - κ s,     κ = c r²/H Σ_h s dL/dz,     r = 1 / rms(s)
    softmax:   dL/ds = y (c dL/dz - Δ),   Δ = Σ_key y c dL/dz, which another kernel has summed before

A task owns the gradients of its keys and values. Those of the queries, and of the band, are summed over tasks
afterwards, in a fixed order: results do not depend on the number of threads.
"""

import numpy as np

from headcode.jit import njit
from headcode.ops._cpu_packing import (
    GRAD,
    GRAD_K,
    GRAD_Q,
    GRAD_V,
    LINEAR,
    RMS_HEAD,
    SOFTMAX,
    K,
    Q,
    V,
    array_at,
    pack_rows,
    pack_tile,
    unpack_rows,
    unpack_tile,
)
from headcode.ops._cpu_stages import (
    activate,
    band_start,
    fill_visible,
    first_seeing,
    mix_values,
    pair_factors,
    rms_inverse,
    scores,
    softmax_codes,
)
from headcode.ops._simd import (
    LANES,
    add,
    add_lane_sums,
    constant,
    dot_rows,
    load,
    load_rows,
    muladd,
    muladd_rows,
    multiply,
    splat_rows,
    store,
    store_rows,
    subtract,
    take_next,
    zero_rows,
)


@njit()
def backward_kernel(specs, tensors, counter, like, numbers, octets):  # type: ignore[no-untyped-def]
    """Take tasks until none is left. `numbers` and `octets` are empty arrays that tell the types."""
    p = specs[0]
    while True:
        task = take_next(counter)
        if task >= p.tasks:
            return
        first_key = task % p.splits * p.length_step
        last_key = min(first_key + p.length_step, p.keys)
        first_batch = task // p.splits * p.batch_step
        last_batch = min(first_batch + p.batch_step, p.batch)
        _backward_task(p, tensors, task, first_batch, last_batch, first_key, last_key, like, numbers, octets)


@njit()
def _backward_task(p, tensors, task, b0, b1, k0, k1, like, numbers, octets):  # type: ignore[no-untyped-def]
    heads, block, queries = p.heads, p.block, p.queries
    qk_row, v_row = heads * p.qk_padded, heads * p.v_padded
    dtype = numbers.dtype
    rows = (queries + 1) // 2 * 2
    query = np.zeros(rows * qk_row, dtype)
    grad = np.zeros(rows * v_row, dtype)
    own_grad_query = np.empty(rows * qk_row if p.splits == 1 else 0, dtype)
    key_tile = np.empty(qk_row * block, dtype)
    value_tile = np.empty(v_row * block, dtype)
    grad_key = np.empty(qk_row * block, dtype)
    grad_value = np.empty(v_row * block, dtype)
    s = np.empty(2 * heads * block, dtype)
    grad_s = np.empty(2 * heads * block, dtype)
    mixed = np.empty(2 * p.v_padded * block, dtype)
    grad_mixed = np.empty(2 * p.v_padded * block, dtype)
    squares = np.empty(2 * block, dtype)
    pull = np.zeros(2 * block, dtype)
    visible = np.empty(block, dtype)
    key_hidden = np.empty(block, dtype)
    factor = np.empty(2 * block, dtype)
    hidden = np.empty(2 * block, dtype)
    band = array_at(p.band, numbers)
    saved = array_at(p.saved, numbers)
    delta = array_at(p.delta, numbers)
    partial_q = array_at(p.partial_q, numbers)
    grad_band = array_at(p.partial_band, numbers)
    grad_band_place = task * heads * p.band_length
    if p.partial_band != 0:
        for j in range(heads * p.band_length):
            grad_band[grad_band_place + j] = 0
    for b in range(b0, b1):
        pack_rows(query, tensors[Q], b, 0, queries, heads, p.qk_width, p.qk_padded, p.scale)
        pack_rows(grad, tensors[GRAD], b, 0, queries, heads, p.v_width, p.v_padded, 1.0)
        grad_query = own_grad_query
        if p.splits > 1:
            place = (task % p.splits * p.batch + b) * rows * qk_row
            grad_query = partial_q[place : place + rows * qk_row]
        grad_query[:] = 0
        for key in range(k0, k1, block):
            count = min(block, (p.keys - key + LANES - 1) // LANES * LANES)
            fill_visible(visible, key_hidden, p, b, key, octets)
            pack_tile(key_tile, tensors[K], b, key, p, p.qk_width, p.qk_padded, visible)
            pack_tile(value_tile, tensors[V], b, key, p, p.v_width, p.v_padded, visible)
            grad_key[:] = 0
            grad_value[:] = 0
            for i in range(first_seeing(p, key, 0), queries, 2):
                pair_factors(factor, hidden, 0, visible, key_hidden, p, key, count, i)
                pair_factors(factor, hidden, block, visible, key_hidden, p, key, count, i + 1)
                start = band_start(p, key, i)
                scores(s, p, query, i * qk_row, key_tile, band, start, count, like)
                saved_place = b * heads * queries + i
                if p.norm == SOFTMAX:
                    softmax_codes(s, 0, p, hidden, 0, count, saved, saved_place)
                    if i + 1 < queries:
                        softmax_codes(s, heads * block, p, hidden, block, count, saved, saved_place + 1)
                if p.net == LINEAR:
                    _linear_scores_backward(
                        grad_s, grad_value, s, p, grad, i * v_row, value_tile, factor, squares, pull, delta, saved_place, count, like
                    )
                else:
                    mix_values(mixed, squares, s, p, value_tile, count, like)
                    mix_gradients(grad_mixed, s, p, grad, i * v_row, count, like)
                    hidden_backward(mixed, grad_mixed, 0, pull, squares, factor, 0, p, count)
                    hidden_backward(mixed, grad_mixed, p.v_padded * block, pull, squares, factor, block, p, count)
                    for h in range(heads):
                        code_gradients(grad_s, h, grad_value, s, p, grad, i * v_row, mixed, grad_mixed, value_tile, pull, count, like)
                        if p.norm == SOFTMAX:
                            _softmax_backward(grad_s, h, s, p, delta, saved_place, count)
                for h in range(heads):
                    _query_key_backward(grad_query, grad_key, grad_s, h, p, query, i * qk_row, key_tile, count, like)
                if p.partial_band != 0:
                    _band_backward(grad_band, grad_band_place + start, grad_s, p, count)
            unpack_tile(tensors[GRAD_K], grad_key, b, key, p, p.qk_width, p.qk_padded)
            unpack_tile(tensors[GRAD_V], grad_value, b, key, p, p.v_width, p.v_padded)
        if p.splits == 1:
            unpack_rows(tensors[GRAD_Q], grad_query, b, 0, queries, heads, p.qk_width, p.qk_padded, p.scale)


@njit()
def mix_gradients(grad_mixed, s, p, grad, place, count, like):  # type: ignore[no-untyped-def]
    """grad_mixed[query, d, key] = Σ_h s[query, h, key] g[query, h, d], of two queries."""
    heads, width, block = p.heads, p.v_padded, p.block
    other = heads * block
    for d in range(0, width, len(like)):
        for j in range(0, count, LANES):
            first, second = zero_rows(s, like), zero_rows(s, like)
            for h in range(heads):
                at = place + h * width + d
                first = muladd_rows(load(s, h * block + j), splat_rows(grad, at, like), first)
                second = muladd_rows(load(s, other + h * block + j), splat_rows(grad, at + heads * width, like), second)
            store_rows(grad_mixed, d * block + j, block, first)
            store_rows(grad_mixed, (width + d) * block + j, block, second)


@njit()
def hidden_backward(mixed, grad_mixed, start, pull, squares, factor, pair, p, count):  # type: ignore[no-untyped-def]
    """In place: Σ_h y v becomes c·u and Σ_h y g becomes c·dL/dm; pull[key] = -κ."""
    for j in range(0, count, LANES):
        c = load(factor, pair + j)
        inverse = c
        if p.norm == RMS_HEAD:
            inverse = rms_inverse(load(squares, pair + j), p, squares)
            c = multiply(c, inverse)
        total = constant(mixed, 0.0)
        for d in range(p.v_padded):
            place = start + d * p.block + j
            raw, grad_raw = load(mixed, place), load(grad_mixed, place)
            value, slope = activate(multiply(c, raw), p.net, mixed)
            grad = multiply(slope, multiply(c, grad_raw))
            # Σ_h s dL/dz, without a loop over heads: both sums over heads are at hand.
            total = muladd(value, grad_raw, muladd(grad, raw, total))
            store(mixed, place, multiply(c, value))
            store(grad_mixed, place, multiply(c, grad))
        if p.norm == RMS_HEAD:
            kappa = multiply(multiply(c, total), multiply(inverse, inverse))
            store(pull, pair + j, multiply(kappa, constant(mixed, -1 / p.heads)))


@njit()
def code_gradients(grad_s, h, grad_value, s, p, grad, place, hidden, grad_mixed, tile, pull, count, like):  # type: ignore[no-untyped-def]
    """Of two queries and one head: grad_s = -κ s + c dL/dz, and the share of these pairs in the gradient of v."""
    heads, width, block = p.heads, p.v_padded, p.block
    other, row, away = heads * block, heads * width, width * block
    codes = h * block
    for d in range(0, width, len(like)):
        first = splat_rows(grad, place + h * width + d, like)
        second = splat_rows(grad, place + row + h * width + d, like)
        at = d * block
        rows = (h * width + d) * block
        for j in range(0, count, LANES):
            a, b = load(s, codes + j), load(s, other + codes + j)
            if d == 0:
                start_a, start_b = multiply(load(pull, j), a), multiply(load(pull, block + j), b)
            else:
                start_a, start_b = load(grad_s, codes + j), load(grad_s, other + codes + j)
            values = load_rows(tile, rows + j, block, like)
            mixed_a = load_rows(grad_mixed, at + j, block, like)
            mixed_b = load_rows(grad_mixed, away + at + j, block, like)
            start_a = dot_rows(mixed_a, values, dot_rows(first, load_rows(hidden, at + j, block, like), start_a))
            start_b = dot_rows(mixed_b, values, dot_rows(second, load_rows(hidden, away + at + j, block, like), start_b))
            store(grad_s, codes + j, start_a)
            store(grad_s, other + codes + j, start_b)
            total = muladd_rows(a, mixed_a, load_rows(grad_value, rows + j, block, like))
            store_rows(grad_value, rows + j, block, muladd_rows(b, mixed_b, total))


@njit()
def _softmax_backward(grad_s, h, s, p, delta, place, count):  # type: ignore[no-untyped-def]
    """c dL/dz becomes y (c dL/dz - Δ), of two queries and one head."""
    for second in range(2):
        at = (second * p.heads + h) * p.block
        # An odd query's partner is past the end: its codes are not even there.
        real = place % p.queries + second < p.queries
        shift = constant(s, delta[place + second + h * p.queries] if real else 0.0)
        for j in range(0, count, LANES):
            value = multiply(load(s, at + j), subtract(load(grad_s, at + j), shift))
            store(grad_s, at + j, value if real else constant(s, 0.0))


@njit()
def _linear_scores_backward(  # type: ignore[no-untyped-def]
    grad_s, grad_value, s, p, grad, place, tile, factor, squares, pull, delta, delta_place, count, like
):
    """A linear value net: the gradients of the scores of two queries, and their share in the gradient of v."""
    heads, width, block = p.heads, p.v_padded, p.block
    other, row = heads * block, heads * width
    for h in range(heads):
        codes = h * block
        for d in range(0, width, len(like)):
            first = splat_rows(grad, place + h * width + d, like)
            second = splat_rows(grad, place + row + h * width + d, like)
            rows = (h * width + d) * block
            for j in range(0, count, LANES):
                start_a, start_b = constant(s, 0.0), constant(s, 0.0)
                if d > 0:
                    start_a, start_b = load(grad_s, codes + j), load(grad_s, other + codes + j)
                values = load_rows(tile, rows + j, block, like)
                store(grad_s, codes + j, dot_rows(first, values, start_a))
                store(grad_s, other + codes + j, dot_rows(second, values, start_b))
    if p.norm == RMS_HEAD:
        for second_query in range(2):
            start, pair = second_query * other, second_query * block
            for j in range(0, count, LANES):
                square, total = constant(s, 0.0), constant(s, 0.0)
                for h in range(heads):
                    score = load(s, start + h * block + j)
                    square = muladd(score, score, square)
                    total = muladd(score, load(grad_s, start + h * block + j), total)
                inverse = rms_inverse(square, p, s)
                c = multiply(load(factor, pair + j), inverse)
                store(factor, pair + j, c)
                kappa = multiply(multiply(c, total), multiply(inverse, inverse))
                store(pull, pair + j, multiply(kappa, constant(s, -1 / heads)))
    for h in range(heads):
        codes = h * block
        for d in range(0, width, len(like)):
            first = splat_rows(grad, place + h * width + d, like)
            second = splat_rows(grad, place + row + h * width + d, like)
            rows = (h * width + d) * block
            for j in range(0, count, LANES):
                a = multiply(load(s, codes + j), load(factor, j))
                b = multiply(load(s, other + codes + j), load(factor, block + j))
                total = muladd_rows(a, first, load_rows(grad_value, rows + j, block, like))
                store_rows(grad_value, rows + j, block, muladd_rows(b, second, total))
        for second_query in range(2):
            start, pair = second_query * other + codes, second_query * block
            for j in range(0, count, LANES):
                pulled = multiply(load(s, start + j), load(pull, pair + j))
                store(grad_s, start + j, muladd(load(grad_s, start + j), load(factor, pair + j), pulled))
        if p.norm == SOFTMAX:
            _softmax_backward(grad_s, h, s, p, delta, delta_place, count)


@njit()
def _query_key_backward(grad_query, grad_key, grad_s, h, p, query, place, tile, count, like):  # type: ignore[no-untyped-def]
    """From the gradients of the scores of two queries and one head to those of the queries and keys."""
    heads, width, block = p.heads, p.qk_padded, p.block
    other, row = heads * block, heads * width
    for d in range(0, width, len(like)):
        at = place + h * width + d
        first, second = splat_rows(query, at, like), splat_rows(query, at + row, like)
        total_first, total_second = zero_rows(grad_s, like), zero_rows(grad_s, like)
        rows = (h * width + d) * block
        for j in range(0, count, LANES):
            a, b = load(grad_s, h * block + j), load(grad_s, other + h * block + j)
            keys = load_rows(tile, rows + j, block, like)
            total_first, total_second = muladd_rows(a, keys, total_first), muladd_rows(b, keys, total_second)
            total = muladd_rows(a, first, load_rows(grad_key, rows + j, block, like))
            store_rows(grad_key, rows + j, block, muladd_rows(b, second, total))
        add_lane_sums(grad_query, at, total_first)
        add_lane_sums(grad_query, at + row, total_second)


@njit()
def _band_backward(grad_band, start, grad_s, p, count):  # type: ignore[no-untyped-def]
    """Along the band: the second query's keys stand one place before the first's."""
    for second in range(2):
        for h in range(p.heads):
            place = start - second + h * p.band_length
            codes = (second * p.heads + h) * p.block
            for j in range(0, count, LANES):
                store(grad_band, place + j, add(load(grad_band, place + j), load(grad_s, codes + j)))
