"""The fused block, forward: LayerNorm with the projections after it, and everything from the heads' outputs on."""

import numpy as np

from headcode.jit import njit
from headcode.ops.cpu.block_stages import (
    CHUNK,
    NUMBERS,
    PADDING,
    SPECS,
    WORDS,
    activate_rows,
    measure,
    normalise,
    row_of,
)
from headcode.ops.cpu.gemm import add_product
from headcode.ops.cpu.packing import array_at
from headcode.ops.cpu.simd import LANES, load, rolled, store, take_next
from headcode.ops.cpu.simd_math import add


@njit()
def project_kernel(address):  # type: ignore[no-untyped-def]
    """projected = LN(x) W + b, of the tokens taken."""
    p, counter, numbers = array_at(address, SPECS)[0], array_at(address, WORDS), NUMBERS
    x, weight, bias = array_at(p.x, numbers), array_at(p.weight, numbers), array_at(p.bias, numbers)
    norm_weight, norm_bias = array_at(p.norm_weight, numbers), array_at(p.norm_bias, numbers)
    projected, statistics = array_at(p.projected, numbers), array_at(p.statistics, numbers)
    dim, width = p.dim, p.width
    row = dim + PADDING
    normed = np.empty(CHUNK * row, numbers.dtype)
    while True:
        task = take_next(counter)
        if task >= p.tasks:
            return
        end = min((task + 1) * p.task_tokens, p.tokens)
        for begin in range(task * p.task_tokens, end, CHUNK):
            count = min(CHUNK, end - begin)
            for t in range(count):
                source, kept = row_of(p, begin + t) * dim, 2 * (begin + t)
                statistics[kept], statistics[kept + 1] = measure(x, source, p, numbers)
                mean, inverse = statistics[kept], statistics[kept + 1]
                normalise(normed, t * row, x, source, mean, inverse, p, norm_weight, norm_bias, numbers)
            add_product(projected, begin * width, width, bias, 0, 0, normed, 0, row, weight, count, width, dim)


@njit()
def feed_kernel(address):  # type: ignore[no-untyped-def]
    """middle = x + attended W + b, out = middle + feed-forward(LN(middle)); keeps middle and the hidden layer."""
    p, counter, numbers = array_at(address, SPECS)[0], array_at(address, WORDS), NUMBERS
    x, attended, middle = array_at(p.x, numbers), array_at(p.attended, numbers), array_at(p.middle, numbers)
    hidden, out, statistics = array_at(p.hidden, numbers), array_at(p.out, numbers), array_at(p.statistics, numbers)
    output_weight, output_bias = array_at(p.output_weight, numbers), array_at(p.output_bias, numbers)
    norm_weight, norm_bias = array_at(p.norm_weight, numbers), array_at(p.norm_bias, numbers)
    hidden_weight, hidden_bias = array_at(p.hidden_weight, numbers), array_at(p.hidden_bias, numbers)
    inner_weight, inner_bias = array_at(p.inner_weight, numbers), array_at(p.inner_bias, numbers)
    dim, width = p.dim, p.hidden_width
    row, inner_row = dim + PADDING, p.inner_width + PADDING
    normed = np.empty(CHUNK * row, numbers.dtype)
    inner = np.empty(CHUNK * inner_row, numbers.dtype)
    while True:
        task = take_next(counter)
        if task >= p.tasks:
            return
        end = min((task + 1) * p.task_tokens, p.tokens)
        for begin in range(task * p.task_tokens, end, CHUNK):
            count = min(CHUNK, end - begin)
            place = begin * dim
            for t in range(count):
                source = row_of(p, begin + t) * dim
                for d in range(0, dim, LANES):
                    rolled()
                    store(middle, place + t * dim + d, add(load(x, source + d), load(output_bias, d)))
            add_product(
                middle,
                place,
                dim,
                middle,
                place,
                dim,
                attended,
                begin * p.attended_width,
                p.attended_width,
                output_weight,
                count,
                dim,
                p.attended_width,
            )
            for t in range(count):
                at, kept = place + t * dim, 2 * (begin + t)
                statistics[kept], statistics[kept + 1] = measure(middle, at, p, numbers)
                mean, inverse = statistics[kept], statistics[kept + 1]
                normalise(normed, t * row, middle, at, mean, inverse, p, norm_weight, norm_bias, numbers)
                for d in range(0, dim, LANES):
                    rolled()
                    store(out, at + d, add(load(middle, at + d), load(inner_bias, d)))
            add_product(
                hidden, begin * width, width, hidden_bias, 0, 0, normed, 0, row, hidden_weight, count, width, dim
            )
            activate_rows(inner, inner_row, inner, inner_row, hidden, begin * width, p, count, False, numbers)
            add_product(out, place, dim, out, place, dim, inner, 0, inner_row, inner_weight, count, dim, p.inner_width)
