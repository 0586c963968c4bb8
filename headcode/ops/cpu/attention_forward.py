"""The attention kernel, forward: tasks of (batch entries, queries), each over all heads and all keys.

Reads q, k, v, the key mask and the band. Writes `out`, and for softmax `saved`, which the backward kernels read. The
buffers and the record p are those of `attention_stages`.
"""

import numpy as np

from headcode.ops.cpu.activations import activate
from headcode.ops.cpu.attention_stages import (
    block_buffers,
    first_seeing,
    log_sum,
    mix_values,
    num_lanes,
    pack_block,
    pair_scores,
    rms_inverse,
    softmax_codes,
    softmax_statistics,
    softmax_whole,
    task_range,
)
from headcode.ops.cpu.kernel import ATTENTION, WORDS, array_at, fetch_add, no_unroll, stage, variants
from headcode.ops.cpu.packing import pack_rows, tile_offset, unpack_rows
from headcode.ops.cpu.records import LANES, LINEAR, RMS_HEAD, SOFTMAX
from headcode.ops.cpu.simd import add_lane_sums, constant, load, load_rows, muladd, muladd_rows, store, zero_rows
from headcode.ops.cpu.simd_math import multiply


@stage
def forward_tasks(address, like, numbers):  # type: ignore[no-untyped-def]
    p, counter = array_at(address, ATTENTION)[0], array_at(address, WORDS)
    heads, block = p.heads, p.block
    qk_row, v_row = heads * p.qk_padded, heads * p.v_padded
    rows = (p.length_step + 1) // 2 * 2
    query, out = np.zeros(rows * qk_row, numbers.dtype), np.empty(rows * v_row, numbers.dtype)
    key_tile, value_tile, s, mixed, squares, visible, key_hidden, factor, hidden = block_buffers(p, numbers)
    saved = array_at(p.saved, numbers)
    # Softmax over several blocks needs a first pass over all keys, for its sums; a single block is done on the spot.
    single = p.keys <= block
    several = p.norm == SOFTMAX and not single
    largest = np.empty(rows * heads if several else 0, numbers.dtype)
    total = np.empty(rows * heads if several else 0, numbers.dtype)
    while True:
        task = fetch_add(counter)
        if task >= p.tasks:
            return
        b0, b1, q0, q1 = task_range(p, task, p.queries)
        for b in range(b0, b1):
            pack_rows(query, p.q, b, q0, q1, heads, p.qk_width, p.qk_padded, p.scale)
            out[:] = 0
            largest[:] = -np.inf
            total[:] = 0
            for step in range(0 if several else 1, 2):
                for key in range(0, p.keys, block):
                    count = num_lanes(p, key)
                    pack_block(key_tile, value_tile, visible, key_hidden, p, b, key, step == 1, like)
                    for i in range(first_seeing(p, key, q0), q1, 2):
                        query_row, out_row = (i - q0) * qk_row, (i - q0) * v_row
                        pair_scores(
                            s, factor, hidden, visible, key_hidden, p, query, query_row, key_tile, key, i, count, like
                        )
                        if step == 0:
                            softmax_statistics(s, p, hidden, count, largest, total, (i - q0) * heads)
                            continue
                        if p.norm == SOFTMAX and single:
                            softmax_whole(s, p, hidden, b, i, count)
                        elif p.norm == SOFTMAX:
                            softmax_codes(s, p, hidden, b, i, count)
                        if p.net == LINEAR:
                            _pool_linear(out, out_row, s, p, factor, value_tile, count, like)
                        else:
                            mix_values(mixed, squares, s, p, value_tile, count, like)
                            _hidden_layer(mixed, squares, factor, p, count, like)
                            _pool(out, out_row, s, p, mixed, count, like)
                if step == 0:
                    for i in range(q0, q1):
                        for h in range(heads):
                            offset = (i - q0) * heads + h
                            saved[(b * heads + h) * p.queries + i] = log_sum(largest[offset], total[offset])
            unpack_rows(p.out, out, b, q0, q1, heads, p.v_width, p.v_padded, 1.0)


@stage
def _hidden_layer(mixed, squares, factor, p, count, like):  # type: ignore[no-untyped-def]
    """In place: Σ_h y v of every pair becomes c·φ(c Σ_h y v), so that pooling it with y gives the output."""
    for second in range(2):
        pair, start = second * p.block, second * p.v_padded * p.block
        for j in range(0, count, LANES):
            c = load(factor, pair + j)
            if p.norm == RMS_HEAD:
                c = multiply(c, rms_inverse(load(squares, pair + j), p, squares))
            for d in range(p.v_padded):
                no_unroll()
                offset = start + tile_offset(d, j, p.block, len(like))
                value, _ = activate(multiply(c, load(mixed, offset)), p.net, mixed)
                store(mixed, offset, multiply(c, value))


@stage
def _pool(out, out_row, s, p, hidden, count, like):  # type: ignore[no-untyped-def]
    """out[h, d] += Σ_key s[h, key] hidden[d, key], of two queries; two heads share each load of `hidden`."""
    heads, block, width = p.heads, p.block, p.v_padded
    n = len(like)
    for second in range(2):
        codes, start, row = second * heads * block, second * width * block, out_row + second * heads * width
        for h in range(0, heads, 2):
            # An odd last head is its own partner, and is added once.
            partner = min(h + 1, heads - 1)
            for d in range(0, width, n):
                total, other_total = zero_rows(out, like), zero_rows(out, like)
                for j in range(0, count, LANES):
                    no_unroll()
                    values = load_rows(hidden, start + d * block + j * n, like)
                    total = muladd_rows(load(s, codes + h * block + j), values, total)
                    other_total = muladd_rows(load(s, codes + partner * block + j), values, other_total)
                add_lane_sums(out, row + h * width + d, total)
                if partner > h:
                    add_lane_sums(out, row + partner * width + d, other_total)


@stage
def _pool_linear(out, out_row, s, p, factor, value_tile, count, like):  # type: ignore[no-untyped-def]
    """out[h, d] += Σ_key c[key] s[h, key] v[h, d, key], of two queries; `factor` becomes c."""
    heads, block, width = p.heads, p.block, p.v_padded
    n = len(like)
    other, row = heads * block, heads * width
    if p.norm == RMS_HEAD:
        _rms_factors(factor, s, p, count)
    for h in range(heads):
        for d in range(0, width, n):
            first, second = zero_rows(out, like), zero_rows(out, like)
            rows = (h * width + d) * block
            for j in range(0, count, LANES):
                no_unroll()
                values = load_rows(value_tile, rows + j * n, like)
                first = muladd_rows(multiply(load(s, h * block + j), load(factor, j)), values, first)
                code = multiply(load(s, other + h * block + j), load(factor, block + j))
                second = muladd_rows(code, values, second)
            add_lane_sums(out, out_row + h * width + d, first)
            add_lane_sums(out, out_row + row + h * width + d, second)


@stage
def _rms_factors(factor, s, p, count):  # type: ignore[no-untyped-def]
    """Multiply the factors of two queries by 1/rms of their scores over the heads."""
    for second in range(2):
        for j in range(0, count, LANES):
            square = constant(s, 0.0)
            for h in range(p.heads):
                no_unroll()
                score = load(s, (second * p.heads + h) * p.block + j)
                square = muladd(score, score, square)
            pair = second * p.block + j
            store(factor, pair, multiply(load(factor, pair), rms_inverse(square, p, s)))


KERNELS = variants(forward_tasks)
