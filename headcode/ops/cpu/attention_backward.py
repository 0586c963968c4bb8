"""The attention kernel, backward: tasks of (batch entries, blocks of keys), each over all heads and all queries.

Codes are recomputed, nothing of size Tq×Tk is kept. With raw codes y, factor c (see `attention_stages`), g = dL/do:

    m = c Σ_h y v      u = φ(m)      dL/dm = φ'(m) c Σ_h y g
    dL/dv = y · c dL/dm                                   dL/dz = Σ_d g u + dL/dm v
    none:      dL/ds = c dL/dz
    rms_head:  dL/ds = c dL/dz - κ s,     κ = c r²/H Σ_h s dL/dz,     r = 1 / rms(s)
               over one head the two cancel, and what is left is c dL/dz ε/(s² + ε)
    softmax:   dL/ds = y (c dL/dz - Δ),   Δ = Σ_key y c dL/dz, see `attention_delta`

Reads q, k, v, grad, the key mask, the band, `saved` and `delta`. A task owns the gradients of its keys and values
(grad_k, grad_v). What several tasks add to goes to `partial_q` and `partial_band`, which `gemm.sum_tasks` adds up
afterwards in a fixed order: results do not depend on the number of threads. The buffers and the record p are those of
`attention_stages`; `grad_row` and `query_row` are where the rows of the two queries start.
"""

import numpy as np

from headcode.ops.cpu.activations import activate
from headcode.ops.cpu.attention_stages import (
    ask_for_next,
    band_offset,
    block_buffers,
    buffer,
    end_seeing,
    fill,
    first_seeing,
    line,
    num_lanes,
    num_queries,
    pack_block,
    qk_width,
    recompute_codes,
    rms_inverse,
    statistic_offset,
    task_range,
    v_width,
)
from headcode.ops.cpu.kernel import (
    ATTENTION,
    NET,
    NORM,
    NUMBERS,
    ROWS,
    WORDS,
    Variants,
    array_at,
    fetch_add,
    no_unroll,
    stage,
)
from headcode.ops.cpu.packing import pack_rows, unpack_rows, unpack_tile
from headcode.ops.cpu.records import LANES, LINEAR, RMS_HEAD, SOFTMAX
from headcode.ops.cpu.simd import (
    constant,
    dot_rows,
    load,
    load_rows,
    muladd,
    muladd_rows,
    splat_rows,
    store,
    store_rows,
    zero_rows,
)
from headcode.ops.cpu.simd_math import add, divide, multiply, subtract
from headcode.ops.cpu.simd_shuffles import add_lane_sums


@stage
def backward_tasks(address):  # type: ignore[no-untyped-def]
    p, counter = array_at(address, ATTENTION)[0], array_at(address, WORDS)
    heads, block, queries = p.heads, p.block, p.queries
    qk_row, v_row = heads * qk_width(p), heads * v_width(p)
    rows = (queries + 1) // 2 * 2
    query, grad = np.zeros(rows * qk_row, NUMBERS.dtype), np.zeros(rows * v_row, NUMBERS.dtype)
    own_grad_query = np.empty(rows * qk_row if p.splits == 1 else 0, NUMBERS.dtype)
    key_tile, value_tile, s, mixed, squares, visible, factor, hidden = block_buffers(p)
    grad_key, grad_value, grad_s = buffer(len(key_tile)), buffer(len(value_tile)), buffer(len(s))
    grad_mixed, pull = buffer(len(mixed)), buffer(len(squares))
    fill(pull, 0)
    partial_q, partial_band = array_at(p.partial_q, NUMBERS), array_at(p.partial_band, NUMBERS)
    while True:
        task = fetch_add(counter)
        if task >= p.tasks:
            return
        b0, b1, k0, k1 = task_range(p, task, p.keys)
        band_size = heads * p.band_length if p.partial_band != 0 else 0
        grad_band = partial_band[task * band_size : (task + 1) * band_size]
        fill(grad_band, 0)
        for b in range(b0, b1):
            pack_rows(query, p.q, b, 0, queries, heads, p.qk_width, qk_width(p), p.scale)
            pack_rows(grad, p.grad, b, 0, queries, heads, p.v_width, v_width(p), 1.0)
            grad_query = own_grad_query
            if p.splits > 1:
                offset = (task % p.splits * p.batch + b) * rows * qk_row
                grad_query = partial_q[offset : offset + rows * qk_row]
            fill(grad_query, 0)
            for key in range(k0, k1, block):
                count = num_lanes(p, key)
                first, end = first_seeing(p, key, 0), end_seeing(p, key, queries)
                fill(grad_key, 0)
                fill(grad_value, 0)
                if first < end:
                    pack_block(key_tile, value_tile, visible, p, b, key, True, count)
                for i in range(first, end, 2):
                    ask_for_next(p, b, i)
                    query_row, grad_row = i * qk_row, i * v_row
                    recompute_codes(s, factor, hidden, visible, p, query, query_row, key_tile, b, key, i, count)
                    if NET == LINEAR:
                        _linear_backward(grad_s, grad_value, s, p, grad, grad_row, value_tile, factor, pull, count)
                    else:
                        mix(mixed, grad_mixed, squares, s, p, value_tile, grad, grad_row, count)
                        hidden_backward(mixed, grad_mixed, pull, squares, factor, p, count)
                        _two_layer_backward(
                            grad_s, grad_value, s, p, grad, grad_row, mixed, grad_mixed, value_tile, pull, count
                        )
                    if NORM == SOFTMAX:
                        _softmax_backward(grad_s, s, p, b, i, count)
                    if NORM == RMS_HEAD and heads == 1:
                        _one_head_backward(grad_s, s, p, count)
                    _query_key_backward(grad_query, grad_key, grad_s, p, query, query_row, key_tile, count)
                    if p.partial_band != 0:
                        _band_backward(grad_band, band_offset(p, key, i), grad_s, p, count)
                unpack_tile(p.grad_k, grad_key, b, key, p, p.qk_width, qk_width(p), count)
                unpack_tile(p.grad_v, grad_value, b, key, p, p.v_width, v_width(p), count)
            if p.splits == 1:
                unpack_rows(p.grad_q, grad_query, b, 0, queries, heads, p.qk_width, qk_width(p), p.scale)


@stage
def mix(mixed, grad_mixed, squares, s, p, value_tile, grad, grad_row, count):  # type: ignore[no-untyped-def]
    """mixed = Σ_h s v, squares = Σ_h s² and grad_mixed = Σ_h s g, of two queries and one block of keys."""
    heads, width = p.heads, v_width(p)
    columns = heads * width
    for j in range(0, count, LANES):
        for d in range(0, width, len(ROWS)):
            first, second = zero_rows(NUMBERS, ROWS), zero_rows(NUMBERS, ROWS)
            first_grad, second_grad = zero_rows(NUMBERS, ROWS), zero_rows(NUMBERS, ROWS)
            first_square = second_square = constant(NUMBERS, 0.0)
            for h in range(heads):
                no_unroll()
                a, b = load(s, line(heads, j, h)), load(s, line(heads, j, h) + LANES)
                column = h * width + d
                values = load_rows(value_tile, j * columns + column * LANES, ROWS)
                first, second = muladd_rows(a, values, first), muladd_rows(b, values, second)
                first_grad = muladd_rows(a, splat_rows(grad, grad_row + column, ROWS), first_grad)
                second_grad = muladd_rows(b, splat_rows(grad, grad_row + columns + column, ROWS), second_grad)
                if NORM == RMS_HEAD:
                    first_square, second_square = muladd(a, a, first_square), muladd(b, b, second_square)
            start = 2 * j * width + d * LANES
            store_rows(mixed, start, first)
            store_rows(mixed, start + width * LANES, second)
            store_rows(grad_mixed, start, first_grad)
            store_rows(grad_mixed, start + width * LANES, second_grad)
            if NORM == RMS_HEAD and d == 0:
                store(squares, 2 * j, first_square)
                store(squares, 2 * j + LANES, second_square)


@stage
def hidden_backward(mixed, grad_mixed, pull, squares, factor, p, count):  # type: ignore[no-untyped-def]
    """In place, of two queries: Σ_h y v becomes c·u, and Σ_h y g becomes c·dL/dm; pull = -κ, 0 over one head."""
    width = v_width(p)
    for pair in range(0, 2 * count, LANES):
        c = load(factor, pair)
        inverse = c
        if NORM == RMS_HEAD:
            inverse = rms_inverse(load(squares, pair), p)
            c = multiply(c, inverse)
        total = constant(NUMBERS, 0.0)
        for offset in range(pair * width, (pair + LANES) * width, LANES):
            no_unroll()
            raw, grad_raw = load(mixed, offset), load(grad_mixed, offset)
            value, slope = activate(multiply(c, raw))
            grad = multiply(slope, multiply(c, grad_raw))
            # Σ_h s dL/dz without a loop over the heads: its two sums over heads are at hand.
            total = muladd(value, grad_raw, muladd(grad, raw, total))
            store(mixed, offset, multiply(c, value))
            store(grad_mixed, offset, multiply(c, grad))
        if NORM == RMS_HEAD and p.heads > 1:
            kappa = multiply(multiply(c, total), multiply(inverse, inverse))
            store(pull, pair, multiply(kappa, constant(NUMBERS, -1 / p.heads)))


@stage
def _two_layer_backward(  # type: ignore[no-untyped-def]
    grad_s, grad_value, s, p, grad, grad_row, hidden, grad_mixed, value_tile, pull, count
):
    """grad_s = c dL/dz - κ s of two queries, and what they add to the gradient of v."""
    heads, width = p.heads, v_width(p)
    columns = heads * width
    for j in range(0, count, LANES):
        for d in range(0, width, len(ROWS)):
            # Held in registers for all heads.
            start = 2 * j * width + d * LANES
            hidden_a, hidden_b = load_rows(hidden, start, ROWS), load_rows(hidden, start + width * LANES, ROWS)
            mixed_a, mixed_b = load_rows(grad_mixed, start, ROWS), load_rows(grad_mixed, start + width * LANES, ROWS)
            pull_a, pull_b = load(pull, 2 * j), load(pull, 2 * j + LANES)
            for h in range(heads):
                no_unroll()
                to, column = line(heads, j, h), h * width + d
                a, b = load(s, to), load(s, to + LANES)
                total_a, total_b = multiply(pull_a, a), multiply(pull_b, b)
                if d > 0:
                    total_a, total_b = load(grad_s, to), load(grad_s, to + LANES)
                values = load_rows(value_tile, j * columns + column * LANES, ROWS)
                total_a = dot_rows(hidden_a, splat_rows(grad, grad_row + column, ROWS), total_a)
                total_b = dot_rows(hidden_b, splat_rows(grad, grad_row + columns + column, ROWS), total_b)
                store(grad_s, to, dot_rows(mixed_a, values, total_a))
                store(grad_s, to + LANES, dot_rows(mixed_b, values, total_b))
                total = load_rows(grad_value, j * columns + column * LANES, ROWS)
                total = muladd_rows(b, mixed_b, muladd_rows(a, mixed_a, total))
                store_rows(grad_value, j * columns + column * LANES, total)


@stage
def _linear_backward(  # type: ignore[no-untyped-def]
    grad_s, grad_value, s, p, grad, grad_row, value_tile, factor, pull, count
):
    """The same for a linear value net, whose dL/dz is Σ_d g v."""
    heads, width = p.heads, v_width(p)
    columns = heads * width
    for h in range(heads):
        for d in range(0, width, len(ROWS)):
            column = h * width + d
            first = splat_rows(grad, grad_row + column, ROWS)
            second = splat_rows(grad, grad_row + columns + column, ROWS)
            for j in range(0, count, LANES):
                no_unroll()
                to = line(heads, j, h)
                values = load_rows(value_tile, j * columns + column * LANES, ROWS)
                total_a, total_b = constant(NUMBERS, 0.0), constant(NUMBERS, 0.0)
                if d > 0:
                    total_a, total_b = load(grad_s, to), load(grad_s, to + LANES)
                store(grad_s, to, dot_rows(first, values, total_a))
                store(grad_s, to + LANES, dot_rows(second, values, total_b))
    if NORM == RMS_HEAD:
        _linear_pull(pull, factor, s, grad_s, p, count)
    for h in range(heads):
        for d in range(0, width, len(ROWS)):
            column = h * width + d
            first = splat_rows(grad, grad_row + column, ROWS)
            second = splat_rows(grad, grad_row + columns + column, ROWS)
            for j in range(0, count, LANES):
                no_unroll()
                to = line(heads, j, h)
                a, b = load(s, to), load(s, to + LANES)
                c_a, c_b = load(factor, 2 * j), load(factor, 2 * j + LANES)
                total = load_rows(grad_value, j * columns + column * LANES, ROWS)
                total = muladd_rows(multiply(b, c_b), second, muladd_rows(multiply(a, c_a), first, total))
                store_rows(grad_value, j * columns + column * LANES, total)
                if d == 0:
                    total_a, total_b = multiply(load(grad_s, to), c_a), multiply(load(grad_s, to + LANES), c_b)
                    if NORM == RMS_HEAD:
                        total_a = muladd(a, load(pull, 2 * j), total_a)
                        total_b = muladd(b, load(pull, 2 * j + LANES), total_b)
                    store(grad_s, to, total_a)
                    store(grad_s, to + LANES, total_b)


@stage
def _linear_pull(pull, factor, s, grad_s, p, count):  # type: ignore[no-untyped-def]
    """`factor` becomes c and pull = -κ, 0 over one head, of two queries, from dL/dz in grad_s."""
    for pair in range(0, 2 * count, LANES):
        square, total = constant(NUMBERS, 0.0), constant(NUMBERS, 0.0)
        first = pair // (2 * LANES) * 2 * LANES * p.heads + pair % (2 * LANES)
        for scores in range(first, first + 2 * LANES * p.heads, 2 * LANES):
            no_unroll()
            score = load(s, scores)
            square, total = muladd(score, score, square), muladd(score, load(grad_s, scores), total)
        inverse = rms_inverse(square, p)
        c = multiply(load(factor, pair), inverse)
        store(factor, pair, c)
        if p.heads > 1:
            kappa = multiply(multiply(c, total), multiply(inverse, inverse))
            store(pull, pair, multiply(kappa, constant(NUMBERS, -1 / p.heads)))


@stage
def _softmax_backward(grad_s, s, p, b, i, count):  # type: ignore[no-untyped-def]
    """c dL/dz becomes y (c dL/dz - Δ)."""
    heads, delta = p.heads, array_at(p.delta, NUMBERS)
    for second in range(num_queries(p, i)):
        for h in range(heads):
            shift = constant(NUMBERS, delta[statistic_offset(p, b, i, h, second)])
            for j in range(0, count, LANES):
                no_unroll()
                to = line(heads, j, h) + second * LANES
                store(grad_s, to, multiply(load(s, to), subtract(load(grad_s, to), shift)))


@stage
def _one_head_backward(grad_s, s, p, count):  # type: ignore[no-untyped-def]
    """rms_head over one head: c dL/dz becomes c dL/dz ε/(s² + ε)."""
    epsilon = constant(NUMBERS, p.epsilon)
    for j in range(0, 2 * count, LANES):
        no_unroll()
        score = load(s, j)
        store(grad_s, j, multiply(load(grad_s, j), divide(epsilon, muladd(score, score, epsilon))))


@stage
def _query_key_backward(grad_query, grad_key, grad_s, p, query, query_row, key_tile, count):  # type: ignore[no-untyped-def]
    """From the gradients of the scores of two queries to those of the queries and keys."""
    heads, width = p.heads, qk_width(p)
    columns = heads * width
    for h in range(heads):
        for d in range(0, width, len(ROWS)):
            column = h * width + d
            offset = query_row + column
            first, second = splat_rows(query, offset, ROWS), splat_rows(query, offset + columns, ROWS)
            total_first, total_second = zero_rows(NUMBERS, ROWS), zero_rows(NUMBERS, ROWS)
            for j in range(0, count, LANES):
                no_unroll()
                a, b = load(grad_s, line(heads, j, h)), load(grad_s, line(heads, j, h) + LANES)
                keys = load_rows(key_tile, j * columns + column * LANES, ROWS)
                total_first, total_second = muladd_rows(a, keys, total_first), muladd_rows(b, keys, total_second)
                total = muladd_rows(a, first, load_rows(grad_key, j * columns + column * LANES, ROWS))
                store_rows(grad_key, j * columns + column * LANES, muladd_rows(b, second, total))
            add_lane_sums(grad_query, offset, total_first, offset + columns, total_second)


@stage
def _band_backward(grad_band, start, grad_s, p, count):  # type: ignore[no-untyped-def]
    """Along the band: the second query's keys stand one entry before the first's."""
    heads, length = p.heads, p.band_length
    for second in range(2):
        for h in range(heads):
            offset = start - second + h * length
            for j in range(0, count, LANES):
                no_unroll()
                gradient = load(grad_s, line(heads, j, h) + second * LANES)
                store(grad_band, offset + j, add(load(grad_band, offset + j), gradient))


KERNELS = Variants(backward_tasks)
