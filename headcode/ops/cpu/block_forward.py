"""The fused block, forward: LayerNorm with the projections after it, and everything from the heads' outputs on.

Buffers of the record, one row per token: x (all tokens of each sequence), projected (width: the heads of queries, keys
and values side by side), attended (attended_width), middle (dim) between attention and feed-forward, hidden
(hidden_width) before the activation, out (dim); statistics (2) of each LayerNorm. `block_backward` reads all of them.
Without a backward pass to come, hidden stays in the cache, and what would be middle becomes out in its place.
"""

import numpy as np

from headcode.ops.cpu.block_stages import (
    AHEAD,
    PADDING,
    activate_rows,
    measure,
    normalise,
    rotate_rows,
    row_of,
    task_tokens,
)
from headcode.ops.cpu.factors import product_space
from headcode.ops.cpu.gemm import add_product
from headcode.ops.cpu.kernel import BLOCK_PART, SINGLE, WORDS, array_at, fetch_add, no_unroll, product_kernels
from headcode.ops.cpu.records import LANES
from headcode.ops.cpu.simd import load, prefetch, store
from headcode.ops.cpu.simd_math import add


@product_kernels
def project_kernels(address, factors):  # type: ignore[no-untyped-def]
    """projected = LN(x) W + b, of the tokens taken, its queries and keys turned; fills `statistics`."""
    p, counter = array_at(address, BLOCK_PART)[0], array_at(address, WORDS)
    chunk = p.chunk
    x, weight, bias = array_at(p.x, SINGLE), array_at(p.weight, factors), array_at(p.bias, SINGLE)
    projected = array_at(p.projected, SINGLE)
    dim, width = p.dim, p.width
    row = dim + PADDING
    normed, space = np.empty(chunk * row, SINGLE.dtype), product_space(factors, chunk, dim)
    while True:
        task = fetch_add(counter)
        if task >= p.tasks:
            return
        first, end = task_tokens(p, task)
        for begin in range(first, end, chunk):
            count = min(chunk, end - begin)
            for t in range(count):
                source = row_of(p, begin + t) * dim
                measure(x, source, p, begin + t)
                normalise(normed, t * row, x, source, p, begin + t)
            add_product(
                (projected, begin * width, width), (bias, 0, 0), (normed, 0, row), weight, count, width, dim, space
            )
            if p.angles != 0:
                rotate_rows(projected, begin * width, width, p, begin, count, 1.0)


@product_kernels
def feed_kernels(address, factors):  # type: ignore[no-untyped-def]
    """middle = x + attended W + b, out = middle + feed-forward(LN(middle)); fills middle, hidden and `statistics`."""
    p, counter = array_at(address, BLOCK_PART)[0], array_at(address, WORDS)
    chunk = p.chunk
    x, attended, middle = array_at(p.x, SINGLE), array_at(p.attended, SINGLE), array_at(p.middle, SINGLE)
    out = array_at(p.out, SINGLE)
    output_weight, output_bias = array_at(p.output_weight, factors), array_at(p.output_bias, SINGLE)
    hidden_weight, hidden_bias = array_at(p.hidden_weight, factors), array_at(p.hidden_bias, SINGLE)
    inner_weight, inner_bias = array_at(p.inner_weight, factors), array_at(p.inner_bias, SINGLE)
    dim, width, inner_width, heads_width = p.dim, p.hidden_width, p.inner_width, p.attended_width
    row, inner_row = dim + PADDING, inner_width + PADDING
    normed, inner = np.empty(chunk * row, SINGLE.dtype), np.empty(chunk * inner_row, SINGLE.dtype)
    space = product_space(factors, chunk, max(dim, inner_width, heads_width))
    kept = p.hidden != 0
    hidden_row = width if kept else width + PADDING
    hidden = array_at(p.hidden, SINGLE) if kept else np.empty(chunk * hidden_row, SINGLE.dtype)
    while True:
        task = fetch_add(counter)
        if task >= p.tasks:
            return
        first, end = task_tokens(p, task)
        for begin in range(first, end, chunk):
            count, offset = min(chunk, end - begin), begin * dim
            hidden_offset = begin * width if kept else 0
            for t in range(count):
                source = row_of(p, begin + t) * dim
                for d in range(0, dim, LANES):
                    no_unroll()
                    prefetch(x, source + d + AHEAD)
                    prefetch(middle, offset + t * dim + d + AHEAD)
                    store(middle, offset + t * dim + d, add(load(x, source + d), load(output_bias, d)))
            middles, outs = (middle, offset, dim), (out, offset, dim)
            heads = (attended, begin * heads_width, heads_width)
            add_product(middles, middles, heads, output_weight, count, dim, heads_width, space)
            for t in range(count):
                middle_offset = offset + t * dim
                measure(middle, middle_offset, p, begin + t)
                normalise(normed, t * row, middle, middle_offset, p, begin + t)
                for d in range(0, dim, LANES):
                    no_unroll()
                    prefetch(out, middle_offset + d + AHEAD)
                    store(out, middle_offset + d, add(load(middle, middle_offset + d), load(inner_bias, d)))
            hiddens = (hidden, hidden_offset, hidden_row)
            add_product(hiddens, (hidden_bias, 0, 0), (normed, 0, row), hidden_weight, count, width, dim, space)
            activate_rows(inner, inner_row, inner, inner_row, hidden, hidden_offset, hidden_row, p, count, False)
            add_product(outs, outs, (inner, 0, inner_row), inner_weight, count, dim, inner_width, space)
