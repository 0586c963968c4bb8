"""The fused block, backward: what went forward is recomputed from what was kept, a chunk of tokens at a time.

Every task sums the gradients of the weights over its own tokens, in a part of its own.
"""

import numpy as np

from headcode.jit import njit
from headcode.ops.cpu.block_stages import (
    CHUNK,
    NUMBERS,
    PADDING,
    SPECS,
    WORDS,
    activate_backward,
    activate_rows,
    copy_rows,
    normalise,
    normalise_backward,
    row_of,
    sum_rows,
)
from headcode.ops.cpu.gemm import add_outer, add_product
from headcode.ops.cpu.packing import array_at
from headcode.ops.cpu.simd import LANES, load, rolled, store, take_next
from headcode.ops.cpu.simd_math import add


@njit()
def feed_backward_kernel(address):  # type: ignore[no-untyped-def]
    """From grad_out to grad_middle and grad_attended.

    A part holds the gradients of inner weight, hidden weight, output weight, inner bias, output bias, norm weight, norm
    bias and hidden bias.
    """
    p, counter, numbers = array_at(address, SPECS)[0], array_at(address, WORDS), NUMBERS
    attended, middle, hidden = array_at(p.attended, numbers), array_at(p.middle, numbers), array_at(p.hidden, numbers)
    grad_out, grad_middle = array_at(p.grad_out, numbers), array_at(p.grad_middle, numbers)
    grad_attended, parts = array_at(p.grad_attended, numbers), array_at(p.parts, numbers)
    norm_weight, norm_bias = array_at(p.norm_weight, numbers), array_at(p.norm_bias, numbers)
    output_weight, hidden_weight = array_at(p.output_weight, numbers), array_at(p.hidden_weight, numbers)
    inner_weight, statistics = array_at(p.inner_weight, numbers), array_at(p.statistics, numbers)
    dim, width, inner_width, attended_width = p.dim, p.hidden_width, p.inner_width, p.attended_width
    row, hidden_row, inner_row, attended_row = (
        dim + PADDING,
        width + PADDING,
        max(inner_width, dim) + PADDING,
        attended_width + PADDING,
    )
    dtype = numbers.dtype
    grad = np.empty(CHUNK * row, dtype)
    normed = np.empty(CHUNK * row, dtype)
    inner = np.empty(CHUNK * inner_row, dtype)
    slope = np.empty(CHUNK * hidden_row, dtype)
    heads = np.empty(CHUNK * attended_row, dtype)
    zeros = np.zeros(max(width, dim, inner_width, attended_width), dtype)
    while True:
        task = take_next(counter)
        if task >= p.tasks:
            return
        for_inner = task * p.part_size
        for_hidden = for_inner + dim * inner_width
        for_output = for_hidden + width * dim
        inner_bias = for_output + dim * attended_width
        output_bias, for_norm, for_norm_bias = inner_bias + dim, inner_bias + 2 * dim, inner_bias + 3 * dim
        hidden_bias = inner_bias + 4 * dim
        parts[for_norm : for_norm + 2 * dim] = 0
        first, end = task * p.task_tokens, min((task + 1) * p.task_tokens, p.tokens)
        for begin in range(first, end, CHUNK):
            count, begun = min(CHUNK, end - begin), begin > first
            place = begin * dim
            copy_rows(grad, row, grad_out, place, dim, count, dim)
            sum_rows(parts, inner_bias, begun, grad, 0, row, count, dim, numbers)
            activate_rows(inner, inner_row, slope, hidden_row, hidden, begin * width, p, count, True, numbers)
            add_outer(parts, for_inner, begun, zeros, grad, 0, row, inner, 0, inner_row, dim, inner_width, count)
            add_product(inner, 0, inner_row, zeros, 0, 0, grad, 0, row, inner_weight, count, inner_width, dim)
            activate_backward(slope, hidden_row, inner, inner_row, p, count)
            sum_rows(parts, hidden_bias, begun, slope, 0, hidden_row, count, width, numbers)
            for t in range(count):
                mean, inverse = statistics[2 * (begin + t)], statistics[2 * (begin + t) + 1]
                at = place + t * dim
                normalise(normed, t * row, middle, at, mean, inverse, p, norm_weight, norm_bias, numbers)
            add_outer(parts, for_hidden, begun, zeros, slope, 0, hidden_row, normed, 0, row, width, dim, count)
            add_product(inner, 0, inner_row, zeros, 0, 0, slope, 0, hidden_row, hidden_weight, count, dim, width)
            for t in range(count):
                at = t * inner_row
                normalise_backward(
                    inner,
                    at,
                    middle,
                    place + t * dim,
                    statistics[2 * (begin + t)],
                    statistics[2 * (begin + t) + 1],
                    p,
                    norm_weight,
                    parts,
                    for_norm,
                    for_norm_bias,
                    numbers,
                )
                for d in range(0, dim, LANES):
                    rolled()
                    total = add(load(grad, t * row + d), load(inner, at + d))
                    store(grad, t * row + d, total)
                    store(grad_middle, place + t * dim + d, total)
            sum_rows(parts, output_bias, begun, grad, 0, row, count, dim, numbers)
            copy_rows(heads, attended_row, attended, begin * attended_width, attended_width, count, attended_width)
            add_outer(parts, for_output, begun, zeros, grad, 0, row, heads, 0, attended_row, dim, attended_width, count)
            add_product(
                grad_attended,
                begin * attended_width,
                attended_width,
                zeros,
                0,
                0,
                grad,
                0,
                row,
                output_weight,
                count,
                attended_width,
                dim,
            )


@njit()
def project_backward_kernel(address):  # type: ignore[no-untyped-def]
    """From grad_projected, and grad_middle where there is one, to grad_x: filled, or added to where it has begun.

    A part holds the gradients of weight, norm weight, norm bias and bias.
    """
    p, counter, numbers = array_at(address, SPECS)[0], array_at(address, WORDS), NUMBERS
    x, grad_x, weight = array_at(p.x, numbers), array_at(p.grad_x, numbers), array_at(p.weight, numbers)
    grad_middle, parts = array_at(p.grad_middle, numbers), array_at(p.parts, numbers)
    grad_projected, statistics = array_at(p.grad_projected, numbers), array_at(p.statistics, numbers)
    norm_weight, norm_bias = array_at(p.norm_weight, numbers), array_at(p.norm_bias, numbers)
    dim, width = p.dim, p.width
    row, grad_row = dim + PADDING, width + PADDING
    normed = np.empty(CHUNK * row, numbers.dtype)
    grad = np.empty(CHUNK * row, numbers.dtype)
    given = np.empty(CHUNK * grad_row, numbers.dtype)
    zeros = np.zeros(max(width, dim), numbers.dtype)
    while True:
        task = take_next(counter)
        if task >= p.tasks:
            return
        for_weight = task * p.part_size
        for_norm = for_weight + width * dim
        for_norm_bias, bias = for_norm + dim, for_norm + 2 * dim
        parts[for_norm : for_norm + 2 * dim] = 0
        first, end = task * p.task_tokens, min((task + 1) * p.task_tokens, p.tokens)
        for begin in range(first, end, CHUNK):
            count, begun = min(CHUNK, end - begin), begin > first
            copy_rows(given, grad_row, grad_projected, begin * width, width, count, width)
            sum_rows(parts, bias, begun, given, 0, grad_row, count, width, numbers)
            for t in range(count):
                mean, inverse = statistics[2 * (begin + t)], statistics[2 * (begin + t) + 1]
                source = row_of(p, begin + t) * dim
                normalise(normed, t * row, x, source, mean, inverse, p, norm_weight, norm_bias, numbers)
            add_outer(parts, for_weight, begun, zeros, given, 0, grad_row, normed, 0, row, width, dim, count)
            add_product(grad, 0, row, zeros, 0, 0, given, 0, grad_row, weight, count, dim, width)
            for t in range(count):
                at, source = t * row, row_of(p, begin + t) * dim
                mean, inverse = statistics[2 * (begin + t)], statistics[2 * (begin + t) + 1]
                normalise_backward(
                    grad, at, x, source, mean, inverse, p, norm_weight, parts, for_norm, for_norm_bias, numbers
                )
                for d in range(0, dim, LANES):
                    rolled()
                    total = load(grad, at + d)
                    if p.grad_middle != 0:
                        total = add(total, load(grad_middle, (begin + t) * dim + d))
                    if p.grad_x_begun:
                        total = add(total, load(grad_x, source + d))
                    store(grad_x, source + d, total)
