"""Stages that the fused block's kernels share: which tokens a task has, LayerNorm, and the feed-forward's activation.

A task takes a stretch of tokens through every step, a chunk of them at a time, so that all of a chunk's numbers stay in
the core's own cache. Rows of such local numbers are PADDING longer than they need to be: lengths are mostly powers of
two, whose rows would all want the same lines of the cache. `p` is the launch's BLOCK_PART record; all numbers are
float32. A token counts among those that are taken of each sequence.
"""

import numpy as np

from headcode.ops.cpu.activations import gelu, silu
from headcode.ops.cpu.kernel import SINGLE, array_at, no_unroll, stage
from headcode.ops.cpu.records import COLUMNS, LANES
from headcode.ops.cpu.simd import constant, load, load_wide, muladd, prefetch, store
from headcode.ops.cpu.simd_math import add, lane_sum, multiply, subtract

PADDING = 16
AHEAD = 4096
"""How many numbers before they are due those of long rows in memory are asked for: four pages. The processor guesses
what is read next only within a page."""


@stage
def task_tokens(p, task):  # type: ignore[no-untyped-def]
    """The tokens that a task covers: first, end."""
    return task * p.task_tokens, min((task + 1) * p.task_tokens, p.tokens)


@stage
def row_of(p, token):  # type: ignore[no-untyped-def]
    """The row of x (batch · length, dim) that holds a token."""
    return token // p.taken * p.length + p.first + token % p.taken


@stage
def measure(source, offset, p, token):  # type: ignore[no-untyped-def]
    """Fill a token's `statistics`: mean, 1 / standard deviation. Two sums at a time do not wait for each other."""
    first, second = constant(SINGLE, 0.0), constant(SINGLE, 0.0)
    for d in range(offset, offset + p.dim, 2 * LANES):
        no_unroll()
        first, second = add(first, load(source, d)), add(second, load(source, d + LANES))
    mean = lane_sum(add(first, second)) / p.dim
    middle, first, second = constant(SINGLE, mean), constant(SINGLE, 0.0), constant(SINGLE, 0.0)
    for d in range(offset, offset + p.dim, 2 * LANES):
        no_unroll()
        deviation, other_deviation = subtract(load(source, d), middle), subtract(load(source, d + LANES), middle)
        first, second = muladd(deviation, deviation, first), muladd(other_deviation, other_deviation, second)
    statistics = array_at(p.statistics, SINGLE)
    statistics[2 * token] = mean
    statistics[2 * token + 1] = 1 / np.sqrt(lane_sum(add(first, second)) / p.dim + p.epsilon)


@stage
def normalise(target, target_offset, source, source_offset, p, token):  # type: ignore[no-untyped-def]
    """LayerNorm of one token: target = (source - mean) / deviation · weight + bias."""
    statistics = array_at(p.statistics, SINGLE)
    weight, bias = array_at(p.norm_weight, SINGLE), array_at(p.norm_bias, SINGLE)
    mean, inverse = constant(SINGLE, statistics[2 * token]), constant(SINGLE, statistics[2 * token + 1])
    for d in range(0, p.dim, LANES):
        no_unroll()
        prefetch(source, source_offset + d + AHEAD)
        unit = multiply(subtract(load(source, source_offset + d), mean), inverse)
        store(target, target_offset + d, muladd(unit, load(weight, d), load(bias, d)))


@stage
def normalise_backward(grad, grad_offset, source, source_offset, p, token, sums, weight_offset):  # type: ignore[no-untyped-def]
    """In place: `grad` of one token's LayerNorm becomes that of its source.

    Adds to the gradients of weight and bias, which stand one after the other in `sums` from weight_offset on.
    """
    statistics, weight = array_at(p.statistics, SINGLE), array_at(p.norm_weight, SINGLE)
    mean, inverse = constant(SINGLE, statistics[2 * token]), constant(SINGLE, statistics[2 * token + 1])
    bias_offset = weight_offset + p.dim
    total, along = constant(SINGLE, 0.0), constant(SINGLE, 0.0)
    for d in range(0, p.dim, LANES):
        no_unroll()
        given = load(grad, grad_offset + d)
        unit = multiply(subtract(load(source, source_offset + d), mean), inverse)
        store(sums, weight_offset + d, muladd(given, unit, load(sums, weight_offset + d)))
        store(sums, bias_offset + d, add(given, load(sums, bias_offset + d)))
        weighted = multiply(given, load(weight, d))
        total = add(total, weighted)
        along = muladd(weighted, unit, along)
    # (g - mean(g) - unit · mean(g · unit)) / deviation, with g the weighted gradient
    shift = constant(SINGLE, lane_sum(total) / p.dim)
    pull = constant(SINGLE, -lane_sum(along) / p.dim)
    for d in range(0, p.dim, LANES):
        no_unroll()
        unit = multiply(subtract(load(source, source_offset + d), mean), inverse)
        weighted = subtract(multiply(load(grad, grad_offset + d), load(weight, d)), shift)
        store(grad, grad_offset + d, multiply(muladd(unit, pull, weighted), inverse))


@stage
def activate_rows(value, value_row, slope, slope_row, hidden, hidden_offset, hidden_row, p, count, keep_slope):  # type: ignore[no-untyped-def]
    """Of `count` tokens: GELU, or if gated, silu(gate) · signal; with the slopes by which gradients go back."""
    width = p.inner_width
    for t in range(count):
        source, to, slope_to = hidden_offset + t * hidden_row, t * value_row, t * slope_row
        if p.hidden_width == width:
            for d in range(0, width, COLUMNS):
                no_unroll()
                prefetch(hidden, source + d + AHEAD)
                result, rise = gelu(load_wide(hidden, source + d))
                store(value, to + d, result)
                if keep_slope:
                    store(slope, slope_to + d, rise)
            continue
        for d in range(0, width, COLUMNS):
            no_unroll()
            prefetch(hidden, source + d + AHEAD)
            prefetch(hidden, source + width + d + AHEAD)
            gate, rise = silu(load_wide(hidden, source + d))
            signal = load_wide(hidden, source + width + d)
            store(value, to + d, multiply(gate, signal))
            if keep_slope:
                store(slope, slope_to + d, multiply(rise, signal))
                store(slope, slope_to + width + d, gate)


@stage
def activate_backward(slope, slope_row, grad, grad_row, p, count):  # type: ignore[no-untyped-def]
    """In place: slopes become gradients of what was activated."""
    for t in range(count):
        for part in range(0, p.hidden_width, p.inner_width):
            for d in range(0, p.inner_width, LANES):
                no_unroll()
                offset = t * slope_row + part + d
                store(slope, offset, multiply(load(slope, offset), load(grad, t * grad_row + d)))


@stage
def sum_rows(target, target_offset, begun, source, row, count, width):  # type: ignore[no-untyped-def]
    """Add the rows of `count` tokens to one row, or begin it. Four sums at a time do not wait for each other."""
    for d in range(0, width, 2 * LANES):
        first, second = constant(SINGLE, 0.0), constant(SINGLE, 0.0)
        third, fourth = constant(SINGLE, 0.0), constant(SINGLE, 0.0)
        for t in range(0, count - 1, 2):
            no_unroll()
            offset = t * row + d
            first, second = add(first, load(source, offset)), add(second, load(source, offset + LANES))
            third, fourth = add(third, load(source, offset + row)), add(fourth, load(source, offset + row + LANES))
        first, second = add(first, third), add(second, fourth)
        if count % 2:
            offset = (count - 1) * row + d
            first, second = add(first, load(source, offset)), add(second, load(source, offset + LANES))
        offset = target_offset + d
        if begun:
            first, second = add(first, load(target, offset)), add(second, load(target, offset + LANES))
        store(target, offset, first)
        store(target, offset + LANES, second)


@stage
def rotate_rows(target, offset, row, p, begin, count, sign):  # type: ignore[no-untyped-def]
    """In place: turn the queries and keys of `count` tokens by their rotary positions, or with sign -1 back.

    Of each head, number i of the first half and of the second are turned together.
    """
    angles = array_at(p.angles, SINGLE)
    half = p.head_width // 2
    for t in range(count):
        cosines = (p.first + (begin + t) % p.taken) * p.head_width
        sines = cosines + half
        for first in range(offset + t * row, offset + t * row + p.rotated_width, p.head_width):
            second = first + half
            whole = half - half % LANES
            for i in range(0, whole, LANES):
                no_unroll()
                cosine, sine = load(angles, cosines + i), multiply(load(angles, sines + i), constant(SINGLE, sign))
                x, y = load(target, first + i), load(target, second + i)
                store(target, first + i, subtract(multiply(x, cosine), multiply(y, sine)))
                store(target, second + i, add(multiply(y, cosine), multiply(x, sine)))
            for i in range(whole, half):
                no_unroll()
                single_cosine, single_sine = angles[cosines + i], np.float32(sign) * angles[sines + i]
                a, b = target[first + i], target[second + i]
                target[first + i] = a * single_cosine - b * single_sine
                target[second + i] = b * single_cosine + a * single_sine


@stage
def copy_rows(target, row, source, source_offset, source_row, count, width):  # type: ignore[no-untyped-def]
    """Of `count` tokens, from rows `source_row` apart to rows `row` apart."""
    for t in range(count):
        for d in range(0, width, LANES):
            no_unroll()
            offset = source_offset + t * source_row + d
            prefetch(source, offset + AHEAD)
            store(target, t * row + d, load(source, offset))
