"""The fused backward kernel: tasks of (batch entries, blocks of keys), each over all heads and all queries.

Codes are recomputed, nothing of size Tq×Tk is kept. With raw codes y, factor c (see `_cpu_stages`), g = dL/do:

    m = c Σ_h y v      u = φ(m)      dL/dm = φ'(m) c Σ_h y g
    dL/dv = y · c dL/dm                                   dL/dz = Σ_d g u + dL/dm v
    none:      dL/ds = c dL/dz
    rms_head:  dL/ds = c dL/dz - κ s,     κ = c r²/H Σ_h s dL/dz,     r = 1 / rms(s)
               over one head the two cancel, and what is left is c dL/dz ε/(s² + ε)
    softmax:   dL/ds = y (c dL/dz - Δ),   Δ = Σ_key y c dL/dz, which another kernel has summed before

A task owns the gradients of its keys and values. Those of the queries, and of the band, are summed over tasks
afterwards, in a fixed order: results do not depend on the number of threads.
"""

import numpy as np

from headcode.jit import njit
from headcode.ops.cpu.attention_stages import (
    activate,
    band_start,
    fill_visible,
    first_seeing,
    mix_values,
    num_lanes,
    pair_factors,
    rms_inverse,
    scores,
    softmax_codes,
)
from headcode.ops.cpu.packing import (
    DOUBLE,
    FOUR,
    GRAD,
    GRAD_K,
    GRAD_Q,
    GRAD_V,
    LINEAR,
    OCTETS,
    RMS_HEAD,
    SINGLE,
    SOFTMAX,
    SPECS,
    TWO,
    WORDS,
    K,
    Q,
    V,
    array_at,
    pack_rows,
    pack_tile,
    place_in_tile,
    stage,
    table_at,
    task_range,
    unpack_rows,
    unpack_tile,
)
from headcode.ops.cpu.simd import (
    LANES,
    add_lane_sums,
    constant,
    dot_rows,
    load,
    load_rows,
    muladd,
    muladd_rows,
    rolled,
    splat_rows,
    store,
    store_rows,
    take_next,
    zero_rows,
)
from headcode.ops.cpu.simd_math import add, divide, multiply, subtract


@stage
def _backward(address, like, numbers):  # type: ignore[no-untyped-def]
    p, counter = array_at(address, SPECS)[0], array_at(address, WORDS)
    tensors = table_at(p.tensors)
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
    partial_band = array_at(p.partial_band, numbers)
    no_query = queries - queries
    while True:
        task = take_next(counter)
        if task >= p.tasks:
            return
        b0, b1, k0, k1 = task_range(p, task, p.keys)
        band_size = heads * p.band_length if p.partial_band != 0 else 0
        grad_band = partial_band[task * band_size : (task + 1) * band_size]
        grad_band[:] = 0
        for b in range(b0, b1):
            pack_rows(query, tensors[Q], b, no_query, queries, heads, p.qk_width, p.qk_padded, p.scale)
            pack_rows(grad, tensors[GRAD], b, no_query, queries, heads, p.v_width, p.v_padded, 1.0)
            grad_query = own_grad_query
            if p.splits > 1:
                place = (task % p.splits * p.batch + b) * rows * qk_row
                grad_query = partial_q[place : place + rows * qk_row]
            grad_query[:] = 0
            for key in range(k0, k1, block):
                count = num_lanes(p, key)
                fill_visible(visible, key_hidden, p, b, key, OCTETS)
                pack_tile(key_tile, tensors[K], b, key, p, p.qk_width, p.qk_padded, visible, like)
                pack_tile(value_tile, tensors[V], b, key, p, p.v_width, p.v_padded, visible, like)
                grad_key[:] = 0
                grad_value[:] = 0
                for i in range(first_seeing(p, key, no_query), queries, 2):
                    pair_factors(factor, hidden, visible, key_hidden, p, key, count, i)
                    start = band_start(p, key, i)
                    scores(s, p, query, i * qk_row, key_tile, band, start, count, like)
                    place = b * heads * queries + i
                    num_real = min(2, queries - i)
                    if p.norm == SOFTMAX:
                        softmax_codes(s, p, hidden, count, saved, place, num_real)
                    if p.net == LINEAR:
                        _linear_backward(
                            grad_s, grad_value, s, p, grad, i * v_row, value_tile, factor, pull, count, like
                        )
                    else:
                        mix_values(mixed, squares, s, p, value_tile, count, like)
                        mix_gradients(grad_mixed, s, p, grad, i * v_row, count, like)
                        hidden_backward(mixed, grad_mixed, pull, squares, factor, p, count, like)
                        _two_layer_backward(
                            grad_s, grad_value, s, p, grad, i * v_row, mixed, grad_mixed, value_tile, pull, count, like
                        )
                    if p.norm == SOFTMAX:
                        _softmax_backward(grad_s, s, p, delta, place, num_real, count)
                    if p.norm == RMS_HEAD and heads == 1:
                        _one_head_backward(grad_s, s, p, count)
                    _query_key_backward(grad_query, grad_key, grad_s, p, query, i * qk_row, key_tile, count, like)
                    if p.partial_band != 0:
                        _band_backward(grad_band, start, grad_s, p, count)
                unpack_tile(tensors[GRAD_K], grad_key, b, key, p, p.qk_width, p.qk_padded, like)
                unpack_tile(tensors[GRAD_V], grad_value, b, key, p, p.v_width, p.v_padded, like)
            if p.splits == 1:
                unpack_rows(tensors[GRAD_Q], grad_query, b, no_query, queries, heads, p.qk_width, p.qk_padded, p.scale)


@stage
def mix_gradients(grad_mixed, s, p, grad, place, count, like):  # type: ignore[no-untyped-def]
    """grad_mixed = Σ_h s g, of two queries and one block of keys."""
    heads, width, block = p.heads, p.v_padded, p.block
    n = len(like)
    other, row = heads * block, heads * width
    for d in range(0, width, n):
        for j in range(0, count, LANES):
            first, second = zero_rows(s, like), zero_rows(s, like)
            for h in range(heads):
                rolled()
                at = place + h * width + d
                first = muladd_rows(load(s, h * block + j), splat_rows(grad, at, like), first)
                second = muladd_rows(load(s, other + h * block + j), splat_rows(grad, at + row, like), second)
            store_rows(grad_mixed, d * block + j * n, first)
            store_rows(grad_mixed, (width + d) * block + j * n, second)


@stage
def hidden_backward(mixed, grad_mixed, pull, squares, factor, p, count, like):  # type: ignore[no-untyped-def]
    """In place, of two queries: Σ_h y v becomes c·u, and Σ_h y g becomes c·dL/dm; pull = -κ, 0 over one head."""
    for second in range(2):
        pair, start = second * p.block, second * p.v_padded * p.block
        for j in range(0, count, LANES):
            c = load(factor, pair + j)
            inverse = c
            if p.norm == RMS_HEAD:
                inverse = rms_inverse(load(squares, pair + j), p, squares)
                c = multiply(c, inverse)
            total = constant(mixed, 0.0)
            for d in range(p.v_padded):
                rolled()
                place = start + place_in_tile(d, j, p.block, len(like))
                raw, grad_raw = load(mixed, place), load(grad_mixed, place)
                value, slope = activate(multiply(c, raw), p.net, mixed)
                grad = multiply(slope, multiply(c, grad_raw))
                # Σ_h s dL/dz without a loop over the heads: its two sums over heads are at hand.
                total = muladd(value, grad_raw, muladd(grad, raw, total))
                store(mixed, place, multiply(c, value))
                store(grad_mixed, place, multiply(c, grad))
            if p.norm == RMS_HEAD and p.heads > 1:
                kappa = multiply(multiply(c, total), multiply(inverse, inverse))
                store(pull, pair + j, multiply(kappa, constant(mixed, -1 / p.heads)))


@stage
def _two_layer_backward(  # type: ignore[no-untyped-def]
    grad_s, grad_value, s, p, grad, place, hidden, grad_mixed, tile, pull, count, like
):
    """grad_s = c dL/dz - κ s of two queries, and what they add to the gradient of v."""
    heads, width, block = p.heads, p.v_padded, p.block
    n = len(like)
    other, row, away = heads * block, heads * width, width * block
    for h in range(heads):
        codes = h * block
        for d in range(0, width, n):
            first = splat_rows(grad, place + h * width + d, like)
            second = splat_rows(grad, place + row + h * width + d, like)
            at, rows = d * block, (h * width + d) * block
            for j in range(0, count, LANES):
                rolled()
                if d == 0:
                    total_a = multiply(load(pull, j), load(s, codes + j))
                    total_b = multiply(load(pull, block + j), load(s, other + codes + j))
                else:
                    total_a, total_b = load(grad_s, codes + j), load(grad_s, other + codes + j)
                values = load_rows(tile, rows + j * n, like)
                total_a = dot_rows(first, load_rows(hidden, at + j * n, like), total_a)
                total_b = dot_rows(second, load_rows(hidden, away + at + j * n, like), total_b)
                total_a = dot_rows(load_rows(grad_mixed, at + j * n, like), values, total_a)
                total_b = dot_rows(load_rows(grad_mixed, away + at + j * n, like), values, total_b)
                store(grad_s, codes + j, total_a)
                store(grad_s, other + codes + j, total_b)
            # A loop of its own: together, the two would need more registers than there are.
            for j in range(0, count, LANES):
                rolled()
                total = load_rows(grad_value, rows + j * n, like)
                total = muladd_rows(load(s, codes + j), load_rows(grad_mixed, at + j * n, like), total)
                mixed = load_rows(grad_mixed, away + at + j * n, like)
                store_rows(grad_value, rows + j * n, muladd_rows(load(s, other + codes + j), mixed, total))


@stage
def _linear_backward(  # type: ignore[no-untyped-def]
    grad_s, grad_value, s, p, grad, place, tile, factor, pull, count, like
):
    """The same for a linear value net, whose dL/dz is Σ_d g v."""
    heads, width, block = p.heads, p.v_padded, p.block
    n = len(like)
    other, row = heads * block, heads * width
    for h in range(heads):
        codes = h * block
        for d in range(0, width, n):
            first = splat_rows(grad, place + h * width + d, like)
            second = splat_rows(grad, place + row + h * width + d, like)
            rows = (h * width + d) * block
            for j in range(0, count, LANES):
                rolled()
                values = load_rows(tile, rows + j * n, like)
                total_a, total_b = constant(s, 0.0), constant(s, 0.0)
                if d > 0:
                    total_a, total_b = load(grad_s, codes + j), load(grad_s, other + codes + j)
                store(grad_s, codes + j, dot_rows(first, values, total_a))
                store(grad_s, other + codes + j, dot_rows(second, values, total_b))
    if p.norm == RMS_HEAD:
        _linear_pull(pull, factor, s, grad_s, p, count)
    for h in range(heads):
        codes = h * block
        for d in range(0, width, n):
            first = splat_rows(grad, place + h * width + d, like)
            second = splat_rows(grad, place + row + h * width + d, like)
            rows = (h * width + d) * block
            for j in range(0, count, LANES):
                rolled()
                a = multiply(load(s, codes + j), load(factor, j))
                b = multiply(load(s, other + codes + j), load(factor, block + j))
                total = muladd_rows(a, first, load_rows(grad_value, rows + j * n, like))
                store_rows(grad_value, rows + j * n, muladd_rows(b, second, total))
    for line in range(2 * heads):
        start, pair = line * block, line // heads * block
        for j in range(0, count, LANES):
            rolled()
            pulled = multiply(load(s, start + j), load(pull, pair + j))
            store(grad_s, start + j, muladd(load(grad_s, start + j), load(factor, pair + j), pulled))


@stage
def _linear_pull(pull, factor, s, grad_s, p, count):  # type: ignore[no-untyped-def]
    """`factor` becomes c and pull = -κ, 0 over one head, of two queries, from dL/dz in grad_s."""
    for second in range(2):
        start, pair = second * p.heads * p.block, second * p.block
        for j in range(0, count, LANES):
            square, total = constant(s, 0.0), constant(s, 0.0)
            for h in range(p.heads):
                rolled()
                score = load(s, start + h * p.block + j)
                square = muladd(score, score, square)
                total = muladd(score, load(grad_s, start + h * p.block + j), total)
            inverse = rms_inverse(square, p, s)
            c = multiply(load(factor, pair + j), inverse)
            store(factor, pair + j, c)
            if p.heads > 1:
                kappa = multiply(multiply(c, total), multiply(inverse, inverse))
                store(pull, pair + j, multiply(kappa, constant(s, -1 / p.heads)))


@stage
def _softmax_backward(grad_s, s, p, delta, place, num_queries, count):  # type: ignore[no-untyped-def]
    """c dL/dz becomes y (c dL/dz - Δ)."""
    for line in range(num_queries * p.heads):
        second = line // p.heads
        shift = constant(s, delta[place + second + (line - second * p.heads) * p.queries])
        for j in range(line * p.block, line * p.block + count, LANES):
            rolled()
            store(grad_s, j, multiply(load(s, j), subtract(load(grad_s, j), shift)))


@stage
def _one_head_backward(grad_s, s, p, count):  # type: ignore[no-untyped-def]
    """rms_head over one head: c dL/dz becomes c dL/dz ε/(s² + ε)."""
    epsilon = constant(s, p.epsilon)
    for second in range(2):
        for j in range(second * p.block, second * p.block + count, LANES):
            rolled()
            score = load(s, j)
            store(grad_s, j, multiply(load(grad_s, j), divide(epsilon, muladd(score, score, epsilon))))


@stage
def _query_key_backward(  # type: ignore[no-untyped-def]
    grad_query, grad_key, grad_s, p, query, place, tile, count, like
):
    """From the gradients of the scores of two queries to those of the queries and keys."""
    heads, width, block = p.heads, p.qk_padded, p.block
    n = len(like)
    other, row = heads * block, heads * width
    for h in range(heads):
        for d in range(0, width, n):
            at = place + h * width + d
            first, second = splat_rows(query, at, like), splat_rows(query, at + row, like)
            total_first, total_second = zero_rows(grad_s, like), zero_rows(grad_s, like)
            rows = (h * width + d) * block
            for j in range(0, count, LANES):
                rolled()
                a, b = load(grad_s, h * block + j), load(grad_s, other + h * block + j)
                keys = load_rows(tile, rows + j * n, like)
                total_first, total_second = muladd_rows(a, keys, total_first), muladd_rows(b, keys, total_second)
                total = muladd_rows(a, first, load_rows(grad_key, rows + j * n, like))
                store_rows(grad_key, rows + j * n, muladd_rows(b, second, total))
            add_lane_sums(grad_query, at, total_first)
            add_lane_sums(grad_query, at + row, total_second)


@stage
def _band_backward(grad_band, start, grad_s, p, count):  # type: ignore[no-untyped-def]
    """Along the band: the second query's keys stand one place before the first's."""
    for line in range(2 * p.heads):
        second = line // p.heads
        place = start - second + (line - second * p.heads) * p.band_length
        for j in range(0, count, LANES):
            rolled()
            store(grad_band, place + j, add(load(grad_band, place + j), load(grad_s, line * p.block + j)))


@njit()
def backward_kernel(address):  # type: ignore[no-untyped-def]
    """Take tasks until none is left, of the call whose record is at the address."""
    _backward(address, FOUR, SINGLE)


@njit()
def backward_narrow_kernel(address):  # type: ignore[no-untyped-def]
    """The same for widths up to 2."""
    _backward(address, TWO, SINGLE)


@njit()
def backward_double_kernel(address):  # type: ignore[no-untyped-def]
    """The same in float64."""
    _backward(address, TWO, DOUBLE)
