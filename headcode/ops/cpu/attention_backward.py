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
    band_offset,
    block_buffers,
    first_seeing,
    mix_values,
    num_lanes,
    num_lines,
    pack_block,
    recompute_codes,
    rms_inverse,
    statistic_offset,
    task_range,
)
from headcode.ops.cpu.kernel import ATTENTION, WORDS, array_at, fetch_add, no_unroll, stage, variants
from headcode.ops.cpu.packing import pack_rows, tile_offset, unpack_rows, unpack_tile
from headcode.ops.cpu.records import LANES, LINEAR, RMS_HEAD, SOFTMAX
from headcode.ops.cpu.simd import (
    add_lane_sums,
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


@stage
def backward_tasks(address, like, numbers):  # type: ignore[no-untyped-def]
    p, counter = array_at(address, ATTENTION)[0], array_at(address, WORDS)
    heads, block, queries = p.heads, p.block, p.queries
    qk_row, v_row, dtype = heads * p.qk_padded, heads * p.v_padded, numbers.dtype
    rows = (queries + 1) // 2 * 2
    query, grad = np.zeros(rows * qk_row, dtype), np.zeros(rows * v_row, dtype)
    own_grad_query = np.empty(rows * qk_row if p.splits == 1 else 0, dtype)
    key_tile, value_tile, s, mixed, squares, visible, key_hidden, factor, hidden = block_buffers(p, numbers)
    grad_key, grad_value, grad_s = np.empty_like(key_tile), np.empty_like(value_tile), np.empty_like(s)
    grad_mixed, pull = np.empty_like(mixed), np.zeros_like(squares)
    partial_q, partial_band = array_at(p.partial_q, numbers), array_at(p.partial_band, numbers)
    while True:
        task = fetch_add(counter)
        if task >= p.tasks:
            return
        b0, b1, k0, k1 = task_range(p, task, p.keys)
        band_size = heads * p.band_length if p.partial_band != 0 else 0
        grad_band = partial_band[task * band_size : (task + 1) * band_size]
        grad_band[:] = 0
        for b in range(b0, b1):
            pack_rows(query, p.q, b, 0, queries, heads, p.qk_width, p.qk_padded, p.scale)
            pack_rows(grad, p.grad, b, 0, queries, heads, p.v_width, p.v_padded, 1.0)
            grad_query = own_grad_query
            if p.splits > 1:
                offset = (task % p.splits * p.batch + b) * rows * qk_row
                grad_query = partial_q[offset : offset + rows * qk_row]
            grad_query[:] = 0
            for key in range(k0, k1, block):
                count = num_lanes(p, key)
                pack_block(key_tile, value_tile, visible, key_hidden, p, b, key, True, like)
                grad_key[:] = 0
                grad_value[:] = 0
                for i in range(first_seeing(p, key, 0), queries, 2):
                    query_row, grad_row = i * qk_row, i * v_row
                    recompute_codes(
                        s, factor, hidden, visible, key_hidden, p, query, query_row, key_tile, b, key, i, count, like
                    )
                    if p.net == LINEAR:
                        _linear_backward(
                            grad_s, grad_value, s, p, grad, grad_row, value_tile, factor, pull, count, like
                        )
                    else:
                        mix_values(mixed, squares, s, p, value_tile, count, like)
                        mix_gradients(grad_mixed, s, p, grad, grad_row, count, like)
                        hidden_backward(mixed, grad_mixed, pull, squares, factor, p, count, like)
                        _two_layer_backward(
                            grad_s, grad_value, s, p, grad, grad_row, mixed, grad_mixed, value_tile, pull, count, like
                        )
                    if p.norm == SOFTMAX:
                        _softmax_backward(grad_s, s, p, b, i, count)
                    if p.norm == RMS_HEAD and heads == 1:
                        _one_head_backward(grad_s, s, p, count)
                    _query_key_backward(grad_query, grad_key, grad_s, p, query, query_row, key_tile, count, like)
                    if p.partial_band != 0:
                        _band_backward(grad_band, band_offset(p, key, i), grad_s, p, count)
                unpack_tile(p.grad_k, grad_key, b, key, p, p.qk_width, p.qk_padded, like)
                unpack_tile(p.grad_v, grad_value, b, key, p, p.v_width, p.v_padded, like)
            if p.splits == 1:
                unpack_rows(p.grad_q, grad_query, b, 0, queries, heads, p.qk_width, p.qk_padded, p.scale)


@stage
def mix_gradients(grad_mixed, s, p, grad, grad_row, count, like):  # type: ignore[no-untyped-def]
    """grad_mixed = Σ_h s g, of two queries and one block of keys."""
    heads, width, block = p.heads, p.v_padded, p.block
    n = len(like)
    other, row = heads * block, heads * width
    for d in range(0, width, n):
        for j in range(0, count, LANES):
            first, second = zero_rows(s, like), zero_rows(s, like)
            for h in range(heads):
                no_unroll()
                offset = grad_row + h * width + d
                first = muladd_rows(load(s, h * block + j), splat_rows(grad, offset, like), first)
                second = muladd_rows(load(s, other + h * block + j), splat_rows(grad, offset + row, like), second)
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
                no_unroll()
                offset = start + tile_offset(d, j, p.block, len(like))
                raw, grad_raw = load(mixed, offset), load(grad_mixed, offset)
                value, slope = activate(multiply(c, raw), p.net, mixed)
                grad = multiply(slope, multiply(c, grad_raw))
                # Σ_h s dL/dz without a loop over the heads: its two sums over heads are at hand.
                total = muladd(value, grad_raw, muladd(grad, raw, total))
                store(mixed, offset, multiply(c, value))
                store(grad_mixed, offset, multiply(c, grad))
            if p.norm == RMS_HEAD and p.heads > 1:
                kappa = multiply(multiply(c, total), multiply(inverse, inverse))
                store(pull, pair + j, multiply(kappa, constant(mixed, -1 / p.heads)))


@stage
def _two_layer_backward(  # type: ignore[no-untyped-def]
    grad_s, grad_value, s, p, grad, grad_row, hidden, grad_mixed, value_tile, pull, count, like
):
    """grad_s = c dL/dz - κ s of two queries, and what they add to the gradient of v."""
    heads, width, block = p.heads, p.v_padded, p.block
    n = len(like)
    other, row, other_tile = heads * block, heads * width, width * block
    for h in range(heads):
        codes = h * block
        for d in range(0, width, n):
            first = splat_rows(grad, grad_row + h * width + d, like)
            second = splat_rows(grad, grad_row + row + h * width + d, like)
            columns, rows = d * block, (h * width + d) * block
            for j in range(0, count, LANES):
                no_unroll()
                if d == 0:
                    total_a = multiply(load(pull, j), load(s, codes + j))
                    total_b = multiply(load(pull, block + j), load(s, other + codes + j))
                else:
                    total_a, total_b = load(grad_s, codes + j), load(grad_s, other + codes + j)
                values = load_rows(value_tile, rows + j * n, like)
                total_a = dot_rows(first, load_rows(hidden, columns + j * n, like), total_a)
                total_b = dot_rows(second, load_rows(hidden, other_tile + columns + j * n, like), total_b)
                total_a = dot_rows(load_rows(grad_mixed, columns + j * n, like), values, total_a)
                total_b = dot_rows(load_rows(grad_mixed, other_tile + columns + j * n, like), values, total_b)
                store(grad_s, codes + j, total_a)
                store(grad_s, other + codes + j, total_b)
            # A loop of its own: together, the two would need more registers than there are.
            for j in range(0, count, LANES):
                no_unroll()
                total = load_rows(grad_value, rows + j * n, like)
                total = muladd_rows(load(s, codes + j), load_rows(grad_mixed, columns + j * n, like), total)
                mixed = load_rows(grad_mixed, other_tile + columns + j * n, like)
                store_rows(grad_value, rows + j * n, muladd_rows(load(s, other + codes + j), mixed, total))


@stage
def _linear_backward(  # type: ignore[no-untyped-def]
    grad_s, grad_value, s, p, grad, grad_row, value_tile, factor, pull, count, like
):
    """The same for a linear value net, whose dL/dz is Σ_d g v."""
    heads, width, block = p.heads, p.v_padded, p.block
    n = len(like)
    other, row = heads * block, heads * width
    for h in range(heads):
        codes = h * block
        for d in range(0, width, n):
            first = splat_rows(grad, grad_row + h * width + d, like)
            second = splat_rows(grad, grad_row + row + h * width + d, like)
            rows = (h * width + d) * block
            for j in range(0, count, LANES):
                no_unroll()
                values = load_rows(value_tile, rows + j * n, like)
                total_a, total_b = constant(s, 0.0), constant(s, 0.0)
                if d > 0:
                    total_a, total_b = load(grad_s, codes + j), load(grad_s, other + codes + j)
                store(grad_s, codes + j, dot_rows(first, values, total_a))
                store(grad_s, other + codes + j, dot_rows(second, values, total_b))
    if p.norm == RMS_HEAD:
        _linear_pull(pull, factor, s, grad_s, p, count)
    for column in range(0, row, n):
        first, second = splat_rows(grad, grad_row + column, like), splat_rows(grad, grad_row + row + column, like)
        codes, rows = column // width * block, column * block
        for j in range(0, count, LANES):
            no_unroll()
            a = multiply(load(s, codes + j), load(factor, j))
            b = multiply(load(s, other + codes + j), load(factor, block + j))
            total = muladd_rows(a, first, load_rows(grad_value, rows + j * n, like))
            store_rows(grad_value, rows + j * n, muladd_rows(b, second, total))
    for line in range(2 * heads):
        start, pair = line * block, line // heads * block
        for j in range(0, count, LANES):
            no_unroll()
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
                no_unroll()
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
def _softmax_backward(grad_s, s, p, b, i, count):  # type: ignore[no-untyped-def]
    """c dL/dz becomes y (c dL/dz - Δ)."""
    delta = array_at(p.delta, s)
    for line in range(num_lines(p, i)):
        shift = constant(s, delta[statistic_offset(p, b, i, line)])
        for j in range(line * p.block, line * p.block + count, LANES):
            no_unroll()
            store(grad_s, j, multiply(load(s, j), subtract(load(grad_s, j), shift)))


@stage
def _one_head_backward(grad_s, s, p, count):  # type: ignore[no-untyped-def]
    """rms_head over one head: c dL/dz becomes c dL/dz ε/(s² + ε)."""
    epsilon = constant(s, p.epsilon)
    for second in range(2):
        for j in range(second * p.block, second * p.block + count, LANES):
            no_unroll()
            score = load(s, j)
            store(grad_s, j, multiply(load(grad_s, j), divide(epsilon, muladd(score, score, epsilon))))


@stage
def _query_key_backward(  # type: ignore[no-untyped-def]
    grad_query, grad_key, grad_s, p, query, query_row, key_tile, count, like
):
    """From the gradients of the scores of two queries to those of the queries and keys."""
    heads, width, block = p.heads, p.qk_padded, p.block
    n = len(like)
    other, row = heads * block, heads * width
    for h in range(heads):
        for d in range(0, width, n):
            offset = query_row + h * width + d
            first, second = splat_rows(query, offset, like), splat_rows(query, offset + row, like)
            total_first, total_second = zero_rows(grad_s, like), zero_rows(grad_s, like)
            rows = (h * width + d) * block
            for j in range(0, count, LANES):
                no_unroll()
                a, b = load(grad_s, h * block + j), load(grad_s, other + h * block + j)
                keys = load_rows(key_tile, rows + j * n, like)
                total_first, total_second = muladd_rows(a, keys, total_first), muladd_rows(b, keys, total_second)
                total = muladd_rows(a, first, load_rows(grad_key, rows + j * n, like))
                store_rows(grad_key, rows + j * n, muladd_rows(b, second, total))
            add_lane_sums(grad_query, offset, total_first)
            add_lane_sums(grad_query, offset + row, total_second)


@stage
def _band_backward(grad_band, start, grad_s, p, count):  # type: ignore[no-untyped-def]
    """Along the band: the second query's keys stand one entry before the first's."""
    for line in range(2 * p.heads):
        second = line // p.heads
        offset = start - second + (line - second * p.heads) * p.band_length
        for j in range(0, count, LANES):
            no_unroll()
            store(grad_band, offset + j, add(load(grad_band, offset + j), load(grad_s, line * p.block + j)))


KERNELS = variants(backward_tasks)
