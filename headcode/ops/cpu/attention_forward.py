"""The attention kernel, forward: tasks of (batch entries, queries), each over all heads and all keys.

Reads q, k, v, the key mask and the band. Writes `out`, and for softmax `saved`, which the backward kernels read. The
buffers and the record p are those of `attention_stages`.
"""

import numpy as np

from headcode.ops.cpu.activations import activate
from headcode.ops.cpu.attention_stages import (
    ask_for_next,
    block_buffers,
    end_seeing,
    fill,
    first_seeing,
    line,
    log_sum,
    mix_values,
    num_lanes,
    pack_block,
    pair_scores,
    qk_width,
    rms_inverse,
    softmax_codes,
    softmax_statistics,
    softmax_whole,
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
from headcode.ops.cpu.packing import pack_rows, unpack_rows
from headcode.ops.cpu.records import LANES, LINEAR, RMS_HEAD, SOFTMAX
from headcode.ops.cpu.simd import constant, load, load_rows, muladd, muladd_rows, store, zero_rows
from headcode.ops.cpu.simd_math import multiply
from headcode.ops.cpu.simd_shuffles import add_lane_sums


@stage
def forward_tasks(address):  # type: ignore[no-untyped-def]
    p, counter = array_at(address, ATTENTION)[0], array_at(address, WORDS)
    heads, block = p.heads, p.block
    qk_row, v_row = heads * qk_width(p), heads * v_width(p)
    rows = (p.length_step + 1) // 2 * 2
    query = np.zeros(rows * qk_row, NUMBERS.dtype)
    # What is added up for an odd last head's missing partner goes to the end.
    out = np.empty(rows * v_row + len(ROWS), NUMBERS.dtype)
    key_tile, value_tile, s, mixed, squares, visible, factor, hidden = block_buffers(p)
    saved = array_at(p.saved, NUMBERS)
    # Softmax over several blocks needs a first pass over all keys, for its sums; a single block is done on the spot.
    single = p.keys <= block
    several = NORM == SOFTMAX and not single
    largest = np.empty(rows * heads if several else 0, NUMBERS.dtype)
    total = np.empty(rows * heads if several else 0, NUMBERS.dtype)
    while True:
        task = fetch_add(counter)
        if task >= p.tasks:
            return
        b0, b1, q0, q1 = task_range(p, task, p.queries)
        for b in range(b0, b1):
            pack_rows(query, p.q, b, q0, q1, heads, p.qk_width, qk_width(p), p.scale)
            fill(out, 0)
            if several:
                fill(largest, -np.inf)
                fill(total, 0)
            for step in range(0 if several else 1, 2):
                for key in range(0, p.keys, block):
                    first, end = first_seeing(p, key, q0), end_seeing(p, key, q1)
                    if first >= q1:
                        break
                    if first >= end:
                        continue
                    count = num_lanes(p, key)
                    pack_block(key_tile, value_tile, visible, p, b, key, step == 1, count)
                    for i in range(first, end, 2):
                        ask_for_next(p, b, i)
                        query_row, out_row = (i - q0) * qk_row, (i - q0) * v_row
                        pair_scores(s, factor, hidden, visible, p, query, query_row, key_tile, key, i, count)
                        if NORM == SOFTMAX:
                            if step == 0:
                                softmax_statistics(s, p, hidden, count, largest, total, (i - q0) * heads)
                                continue
                            if single:
                                softmax_whole(s, p, hidden, b, i, count)
                            else:
                                softmax_codes(s, p, hidden, b, i, count)
                        if NET == LINEAR:
                            _pool_linear(out, out_row, s, p, factor, value_tile, count)
                        else:
                            mix_values(mixed, squares, s, p, value_tile, count)
                            _hidden_layer(mixed, squares, factor, p, count)
                            _pool(out, out_row, s, p, mixed, count)
                if step == 0:
                    for i in range(q0, q1):
                        for h in range(heads):
                            offset = (i - q0) * heads + h
                            saved[(b * heads + h) * p.queries + i] = log_sum(largest[offset], total[offset])
            unpack_rows(p.out, out, b, q0, q1, heads, p.v_width, v_width(p), 1.0)


@stage
def _hidden_layer(mixed, squares, factor, p, count):  # type: ignore[no-untyped-def]
    """In place: Σ_h y v of every pair becomes c·φ(c Σ_h y v), so that pooling it with y gives the output."""
    width = v_width(p)
    for pair in range(0, 2 * count, LANES):
        c = load(factor, pair)
        if NORM == RMS_HEAD:
            c = multiply(c, rms_inverse(load(squares, pair), p))
        for offset in range(pair * width, (pair + LANES) * width, LANES):
            no_unroll()
            value, _ = activate(multiply(c, load(mixed, offset)))
            store(mixed, offset, multiply(c, value))


@stage
def _pool(out, out_row, s, p, hidden, count):  # type: ignore[no-untyped-def]
    """out[h, d] += Σ_key s[h, key] hidden[d, key], of two queries; two heads share each load of `hidden`."""
    heads, width = p.heads, v_width(p)
    for second in range(2):
        row = out_row + second * heads * width
        for h in range(0, heads, 2):
            has_partner = h + 1 < heads
            partner = h + 1 if has_partner else h
            for d in range(0, width, len(ROWS)):
                total, other_total = zero_rows(NUMBERS, ROWS), zero_rows(NUMBERS, ROWS)
                for j in range(0, count, LANES):
                    no_unroll()
                    values = load_rows(hidden, 2 * j * width + (second * width + d) * LANES, ROWS)
                    total = muladd_rows(load(s, line(heads, j, h) + second * LANES), values, total)
                    other_total = muladd_rows(load(s, line(heads, j, partner) + second * LANES), values, other_total)
                to = row + partner * width + d if has_partner else len(out) - len(ROWS)
                add_lane_sums(out, row + h * width + d, total, to, other_total)


@stage
def _pool_linear(out, out_row, s, p, factor, value_tile, count):  # type: ignore[no-untyped-def]
    """out[h, d] += Σ_key c[key] s[h, key] v[h, d, key], of two queries; `factor` becomes c."""
    heads, width = p.heads, v_width(p)
    columns = heads * width
    if NORM == RMS_HEAD:
        _rms_factors(factor, s, p, count)
    for h in range(heads):
        for d in range(0, width, len(ROWS)):
            first, second = zero_rows(NUMBERS, ROWS), zero_rows(NUMBERS, ROWS)
            column = h * width + d
            for j in range(0, count, LANES):
                no_unroll()
                values = load_rows(value_tile, j * columns + column * LANES, ROWS)
                codes = line(heads, j, h)
                first = muladd_rows(multiply(load(s, codes), load(factor, 2 * j)), values, first)
                code = multiply(load(s, codes + LANES), load(factor, 2 * j + LANES))
                second = muladd_rows(code, values, second)
            add_lane_sums(out, out_row + column, first, out_row + columns + column, second)


@stage
def _rms_factors(factor, s, p, count):  # type: ignore[no-untyped-def]
    """Multiply the factors of two queries by 1/rms of their scores over the heads."""
    for pair in range(0, 2 * count, LANES):
        square = constant(NUMBERS, 0.0)
        first = pair // (2 * LANES) * 2 * LANES * p.heads + pair % (2 * LANES)
        for scores in range(first, first + 2 * LANES * p.heads, 2 * LANES):
            no_unroll()
            score = load(s, scores)
            square = muladd(score, score, square)
        store(factor, pair, multiply(load(factor, pair), rms_inverse(square, p)))


KERNELS = Variants(forward_tasks)
