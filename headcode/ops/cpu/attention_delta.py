"""What the softmax's backward pass needs first: Δ = Σ_key y c dL/dz, `delta` (batch, head, query).

Of the two parts of dL/dz = Σ_d g u + dL/dm v, the first sums to g·o, which torch has computed into `delta` before. This
kernel adds the second, which only two-layer value nets have. Tasks are (batch entries, queries), as in the forward
pass; the buffers and the record p are those of `attention_stages`.
"""

import numpy as np

from headcode.ops.cpu.attention_backward import hidden_backward, mix_gradients
from headcode.ops.cpu.attention_stages import (
    block_buffers,
    first_seeing,
    mix_values,
    num_lanes,
    num_lines,
    pack_block,
    recompute_codes,
    statistic_offset,
    task_range,
)
from headcode.ops.cpu.kernel import ATTENTION, WORDS, array_at, fetch_add, no_unroll, stage, variants
from headcode.ops.cpu.packing import pack_rows
from headcode.ops.cpu.records import LANES
from headcode.ops.cpu.simd import constant, dot_rows, load, load_rows, muladd
from headcode.ops.cpu.simd_math import lane_sum


@stage
def delta_tasks(address, like, numbers):  # type: ignore[no-untyped-def]
    p, counter = array_at(address, ATTENTION)[0], array_at(address, WORDS)
    qk_row, v_row = p.heads * p.qk_padded, p.heads * p.v_padded
    rows = (p.length_step + 1) // 2 * 2
    query, grad = np.zeros(rows * qk_row, numbers.dtype), np.zeros(rows * v_row, numbers.dtype)
    key_tile, value_tile, s, mixed, squares, visible, key_hidden, factor, hidden = block_buffers(p, numbers)
    grad_mixed = np.empty_like(mixed)
    while True:
        task = fetch_add(counter)
        if task >= p.tasks:
            return
        b0, b1, q0, q1 = task_range(p, task, p.queries)
        for b in range(b0, b1):
            pack_rows(query, p.q, b, q0, q1, p.heads, p.qk_width, p.qk_padded, p.scale)
            pack_rows(grad, p.grad, b, q0, q1, p.heads, p.v_width, p.v_padded, 1.0)
            for key in range(0, p.keys, p.block):
                count = num_lanes(p, key)
                pack_block(key_tile, value_tile, visible, key_hidden, p, b, key, True, like)
                for i in range(first_seeing(p, key, q0), q1, 2):
                    query_row = (i - q0) * qk_row
                    recompute_codes(
                        s, factor, hidden, visible, key_hidden, p, query, query_row, key_tile, b, key, i, count, like
                    )
                    mix_values(mixed, squares, s, p, value_tile, count, like)
                    mix_gradients(grad_mixed, s, p, grad, (i - q0) * v_row, count, like)
                    hidden_backward(mixed, grad_mixed, squares, squares, factor, p, count, like)
                    _add_delta(p, b, i, s, grad_mixed, value_tile, count, like)


@stage
def _add_delta(p, b, i, s, grad_mixed, value_tile, count, like):  # type: ignore[no-untyped-def]
    """Δ[h] += Σ_key y[h, key] Σ_d c dL/dm[d, key] v[h, d, key], of one or two queries."""
    heads, block, width = p.heads, p.block, p.v_padded
    n = len(like)
    delta = array_at(p.delta, s)
    for line in range(num_lines(p, i)):
        second = line // heads
        h = line - second * heads
        total = constant(s, 0.0)
        for d in range(0, width, n):
            for j in range(0, count, LANES):
                no_unroll()
                values = load_rows(value_tile, (h * width + d) * block + j * n, like)
                gradients = load_rows(grad_mixed, (second * width + d) * block + j * n, like)
                pulled = dot_rows(gradients, values, constant(s, 0.0))
                total = muladd(pulled, load(s, line * block + j), total)
        delta[statistic_offset(p, b, i, line)] += lane_sum(total)


KERNELS = variants(delta_tasks)
