"""The fused block, backward: what went forward is recomputed from what was kept, a chunk of tokens at a time.

Every task sums the gradients of the weights over its own tokens, in a part of its own: `parts` (tasks, part_size).
`gemm.sum_tasks` adds these up. The layout of a part is the list of shapes in `block_plan`.
"""

import numpy as np

from headcode.ops.cpu.block_stages import (
    AHEAD,
    PADDING,
    activate_backward,
    activate_rows,
    copy_rows,
    normalise,
    normalise_backward,
    rotate_rows,
    row_of,
    sum_rows,
    task_tokens,
)
from headcode.ops.cpu.factors import product_space
from headcode.ops.cpu.gemm import add_outer, add_product
from headcode.ops.cpu.kernel import BLOCK_PART, SINGLE, WORDS, array_at, fetch_add, no_unroll, product_kernels
from headcode.ops.cpu.records import LANES
from headcode.ops.cpu.simd import load, prefetch, store
from headcode.ops.cpu.simd_math import add


@product_kernels
def feed_backward_kernels(address, factors):  # type: ignore[no-untyped-def]
    """From grad_out (tokens, dim) to grad_middle (tokens, dim) and grad_attended (tokens, attended_width).

    The first is read by `project_backward_kernels`, the second by the attention's backward pass. A part holds the
    gradients of inner weight, hidden weight, output weight, inner bias, output bias, norm weight, norm bias and hidden
    bias.
    """
    p, counter = array_at(address, BLOCK_PART)[0], array_at(address, WORDS)
    chunk = p.chunk
    attended, middle, hidden = array_at(p.attended, SINGLE), array_at(p.middle, SINGLE), array_at(p.hidden, SINGLE)
    grad_out, grad_middle = array_at(p.grad_out, SINGLE), array_at(p.grad_middle, SINGLE)
    grad_attended, parts = array_at(p.grad_attended, SINGLE), array_at(p.parts, SINGLE)
    output_weight, hidden_weight = array_at(p.output_weight, factors), array_at(p.hidden_weight, factors)
    inner_weight = array_at(p.inner_weight, factors)
    dim, width, inner_width, heads_width = p.dim, p.hidden_width, p.inner_width, p.attended_width
    row, hidden_row = dim + PADDING, width + PADDING
    inner_row, heads_row = max(inner_width, dim) + PADDING, heads_width + PADDING
    dtype = SINGLE.dtype
    grad, normed, inner = np.empty(chunk * row, dtype), np.empty(chunk * row, dtype), np.empty(chunk * inner_row, dtype)
    slope, heads = np.empty(chunk * hidden_row, dtype), np.empty(chunk * heads_row, dtype)
    zeros = np.zeros(max(width, dim, inner_width, heads_width), dtype)
    zero = (zeros, 0, 0)
    space = product_space(factors, chunk, max(width, dim, inner_width, heads_width))
    while True:
        task = fetch_add(counter)
        if task >= p.tasks:
            return
        for_inner = task * p.part_size
        for_hidden = for_inner + dim * inner_width
        for_output = for_hidden + width * dim
        inner_bias = for_output + dim * heads_width
        output_bias, for_norm, hidden_bias = inner_bias + dim, inner_bias + 2 * dim, inner_bias + 4 * dim
        parts[for_norm : for_norm + 2 * dim] = 0
        first, end = task_tokens(p, task)
        for begin in range(first, end, chunk):
            count, begun, offset = min(chunk, end - begin), begin > first, begin * dim
            copy_rows(grad, row, grad_out, offset, dim, count, dim)
            sum_rows(parts, inner_bias, begun, grad, row, count, dim)
            activate_rows(inner, inner_row, slope, hidden_row, hidden, begin * width, width, p, count, True)
            add_outer(parts, for_inner, begun, zeros, grad, row, inner, inner_row, dim, inner_width, count, space)
            add_product((inner, 0, inner_row), zero, (grad, 0, row), inner_weight, count, inner_width, dim, space)
            activate_backward(slope, hidden_row, inner, inner_row, p, count)
            sum_rows(parts, hidden_bias, begun, slope, hidden_row, count, width)
            for t in range(count):
                normalise(normed, t * row, middle, offset + t * dim, p, begin + t)
            add_outer(parts, for_hidden, begun, zeros, slope, hidden_row, normed, row, width, dim, count, space)
            add_product((inner, 0, inner_row), zero, (slope, 0, hidden_row), hidden_weight, count, dim, width, space)
            for t in range(count):
                normalise_backward(inner, t * inner_row, middle, offset + t * dim, p, begin + t, parts, for_norm)
                for d in range(0, dim, LANES):
                    no_unroll()
                    total = add(load(grad, t * row + d), load(inner, t * inner_row + d))
                    store(grad, t * row + d, total)
                    prefetch(grad_middle, offset + t * dim + d + AHEAD)
                    store(grad_middle, offset + t * dim + d, total)
            sum_rows(parts, output_bias, begun, grad, row, count, dim)
            copy_rows(heads, heads_row, attended, begin * heads_width, heads_width, count, heads_width)
            add_outer(parts, for_output, begun, zeros, grad, row, heads, heads_row, dim, heads_width, count, space)
            target = (grad_attended, begin * heads_width, heads_width)
            add_product(target, zero, (grad, 0, row), output_weight, count, heads_width, dim, space)


@product_kernels
def project_backward_kernels(address, factors):  # type: ignore[no-untyped-def]
    """From grad_projected, and grad_middle where there is one, to grad_x: filled, or added to where it has begun.

    A part holds the gradients of weight, norm weight, norm bias and bias.
    """
    p, counter = array_at(address, BLOCK_PART)[0], array_at(address, WORDS)
    chunk = p.chunk
    x, grad_x, weight = array_at(p.x, SINGLE), array_at(p.grad_x, SINGLE), array_at(p.weight, factors)
    grad_middle, parts = array_at(p.grad_middle, SINGLE), array_at(p.parts, SINGLE)
    grad_projected = array_at(p.grad_projected, SINGLE)
    dim, width = p.dim, p.width
    row, given_row = dim + PADDING, width + PADDING
    normed, grad = np.empty(chunk * row, SINGLE.dtype), np.empty(chunk * row, SINGLE.dtype)
    given, zeros = np.empty(chunk * given_row, SINGLE.dtype), np.zeros(max(width, dim), SINGLE.dtype)
    space = product_space(factors, chunk, max(width, dim))
    while True:
        task = fetch_add(counter)
        if task >= p.tasks:
            return
        for_weight = task * p.part_size
        for_norm = for_weight + width * dim
        bias = for_norm + 2 * dim
        parts[for_norm : for_norm + 2 * dim] = 0
        first, end = task_tokens(p, task)
        for begin in range(first, end, chunk):
            count, begun = min(chunk, end - begin), begin > first
            copy_rows(given, given_row, grad_projected, begin * width, width, count, width)
            if p.angles != 0:
                rotate_rows(given, 0, given_row, p, begin, count, -1.0)
            sum_rows(parts, bias, begun, given, given_row, count, width)
            for t in range(count):
                normalise(normed, t * row, x, row_of(p, begin + t) * dim, p, begin + t)
            add_outer(parts, for_weight, begun, zeros, given, given_row, normed, row, width, dim, count, space)
            add_product((grad, 0, row), (zeros, 0, 0), (given, 0, given_row), weight, count, dim, width, space)
            for t in range(count):
                source = row_of(p, begin + t) * dim
                normalise_backward(grad, t * row, x, source, p, begin + t, parts, for_norm)
                for d in range(0, dim, LANES):
                    no_unroll()
                    prefetch(grad_x, source + d + AHEAD)
                    prefetch(grad_middle, (begin + t) * dim + d + AHEAD)
                    total = load(grad, t * row + d)
                    if p.grad_middle != 0:
                        total = add(total, load(grad_middle, (begin + t) * dim + d))
                    if p.grad_x_begun:
                        total = add(total, load(grad_x, source + d))
                    store(grad_x, source + d, total)
