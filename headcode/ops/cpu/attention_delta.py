"""What the softmax's backward pass needs first: Δ = Σ_key y c dL/dz, `delta` (batch, head, query).

Of the two parts of dL/dz = Σ_d g u + dL/dm v, the first sums to g·o, which torch has computed into `delta` before. This
kernel adds the second, which only two-layer value nets have. Tasks are (batch entries, queries), as in the forward
pass; the buffers and the record p are those of `attention_stages`.
"""

import numpy as np

from headcode.ops.cpu.attention_backward import hidden_backward, mix
from headcode.ops.cpu.attention_stages import (
    block_buffers,
    buffer,
    end_seeing,
    first_seeing,
    line,
    num_lanes,
    num_queries,
    pack_block,
    qk_width,
    recompute_codes,
    statistic_offset,
    task_range,
    v_width,
)
from headcode.ops.cpu.kernel import ATTENTION, NUMBERS, ROWS, WORDS, Variants, array_at, fetch_add, no_unroll, stage
from headcode.ops.cpu.packing import pack_rows
from headcode.ops.cpu.records import LANES
from headcode.ops.cpu.simd import constant, dot_rows, load, load_rows, muladd
from headcode.ops.cpu.simd_math import lane_sum


@stage
def delta_tasks(address):  # type: ignore[no-untyped-def]
    p, counter = array_at(address, ATTENTION)[0], array_at(address, WORDS)
    qk_row, v_row = p.heads * qk_width(p), p.heads * v_width(p)
    rows = (p.length_step + 1) // 2 * 2
    query, grad = np.zeros(rows * qk_row, NUMBERS.dtype), np.zeros(rows * v_row, NUMBERS.dtype)
    key_tile, value_tile, s, mixed, squares, visible, factor, hidden = block_buffers(p)
    grad_mixed = buffer(len(mixed))
    while True:
        task = fetch_add(counter)
        if task >= p.tasks:
            return
        b0, b1, q0, q1 = task_range(p, task, p.queries)
        for b in range(b0, b1):
            pack_rows(query, p.q, b, q0, q1, p.heads, p.qk_width, qk_width(p), p.scale)
            pack_rows(grad, p.grad, b, q0, q1, p.heads, p.v_width, v_width(p), 1.0)
            for key in range(0, p.keys, p.block):
                first, end = first_seeing(p, key, q0), end_seeing(p, key, q1)
                if first >= q1:
                    break
                if first >= end:
                    continue
                count = num_lanes(p, key)
                pack_block(key_tile, value_tile, visible, p, b, key, True, count)
                for i in range(first, end, 2):
                    query_row, grad_row = (i - q0) * qk_row, (i - q0) * v_row
                    recompute_codes(s, factor, hidden, visible, p, query, query_row, key_tile, b, key, i, count)
                    mix(mixed, grad_mixed, squares, s, p, value_tile, grad, grad_row, count)
                    hidden_backward(mixed, grad_mixed, squares, squares, factor, p, count)
                    _add_delta(p, b, i, s, grad_mixed, value_tile, count)


@stage
def _add_delta(p, b, i, s, grad_mixed, value_tile, count):  # type: ignore[no-untyped-def]
    """Δ[h] += Σ_key y[h, key] Σ_d c dL/dm[d, key] v[h, d, key], of one or two queries."""
    heads, width = p.heads, v_width(p)
    delta = array_at(p.delta, NUMBERS)
    for second in range(num_queries(p, i)):
        for h in range(heads):
            total = constant(NUMBERS, 0.0)
            for d in range(0, width, len(ROWS)):
                for j in range(0, count, LANES):
                    no_unroll()
                    values = load_rows(value_tile, j * heads * width + (h * width + d) * LANES, ROWS)
                    gradients = load_rows(grad_mixed, 2 * j * width + (second * width + d) * LANES, ROWS)
                    pulled = dot_rows(gradients, values, constant(NUMBERS, 0.0))
                    total = muladd(pulled, load(s, line(heads, j, h) + second * LANES), total)
            delta[statistic_offset(p, b, i, h, second)] += lane_sum(total)


KERNELS = Variants(delta_tasks)
