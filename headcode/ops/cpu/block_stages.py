"""Stages that the fused blocks' kernels share: which tokens a task has, LayerNorm, and the feed-forward's activation.

A task takes a stretch of tokens through every step, CHUNK of them at a time, so that all of a chunk's numbers stay in
the core's own cache. Rows of such local numbers are PADDING longer than they need to be: lengths are mostly powers of
two, whose rows would all want the same places of the cache.
"""

import numpy as np

from headcode.ops.cpu.activations import value_and_slope
from headcode.ops.cpu.attention_stages import activate
from headcode.ops.cpu.packing import SILU, stage
from headcode.ops.cpu.simd import LANES, constant, load, muladd, rolled, store
from headcode.ops.cpu.simd_math import add, lane_sum, multiply, subtract

CHUNK = 96
PADDING = 16

BLOCK_SPEC = np.dtype(
    [
        (name, np.int64)
        for name in (
            "counter",  # of tasks that were taken; stands first
            # tokens: all in all, and how many of each sequence of which length, from where on; tokens per task
            *("tokens", "taken", "length", "first", "tasks", "task_tokens"),
            # widths: of the model, of a projection, of the heads together, and of the feed-forward before and after its
            # activation, which differ if that is gated
            *("dim", "width", "attended_width", "hidden_width", "inner_width"),
            # addresses: activations and gradients, 0 where there is nothing
            *("x", "projected", "attended", "middle", "hidden", "out"),
            "statistics",  # of a norm: mean and 1 / standard deviation of each token
            *("grad_x", "grad_x_begun", "grad_projected", "grad_attended", "grad_middle", "grad_out"),
            # weights (as panels) and biases; what a task sums up of their gradients, `part_size` numbers
            *("norm_weight", "norm_bias", "weight", "bias", "output_weight", "output_bias"),
            *("hidden_weight", "hidden_bias", "inner_weight", "inner_bias", "parts", "part_size"),
        )
    ]
    + [("epsilon", np.float64)]
)
"""A call, as the kernels see it: they get the address of such a record."""

SPECS, WORDS, NUMBERS = np.empty(0, BLOCK_SPEC), np.empty(0, np.int64), np.empty(0, np.float32)
"""Empty arrays, which tell types."""


@stage
def row_of(p, token):  # type: ignore[no-untyped-def]
    """The row of x that holds a token, counted among those taken of each sequence."""
    return token // p.taken * p.length + p.first + token % p.taken


@stage
def measure(source, at, p, like):  # type: ignore[no-untyped-def]
    """Of one token: mean, and 1 / standard deviation. Two sums at a time, which need not wait for each other."""
    first, second = constant(like, 0.0), constant(like, 0.0)
    for d in range(at, at + p.dim, 2 * LANES):
        rolled()
        first, second = add(first, load(source, d)), add(second, load(source, d + LANES))
    mean = lane_sum(add(first, second)) / p.dim
    middle, first, second = constant(like, mean), constant(like, 0.0), constant(like, 0.0)
    for d in range(at, at + p.dim, 2 * LANES):
        rolled()
        away, further = subtract(load(source, d), middle), subtract(load(source, d + LANES), middle)
        first, second = muladd(away, away, first), muladd(further, further, second)
    return mean, 1 / np.sqrt(lane_sum(add(first, second)) / p.dim + p.epsilon)


@stage
def normalise(target, place, source, at, mean, inverse, p, weight, bias, like):  # type: ignore[no-untyped-def]
    """LayerNorm of one token: target = (source - mean) · inverse · weight + bias."""
    middle, scale = constant(like, mean), constant(like, inverse)
    for d in range(0, p.dim, LANES):
        rolled()
        unit = multiply(subtract(load(source, at + d), middle), scale)
        store(target, place + d, muladd(unit, load(weight, d), load(bias, d)))


@stage
def normalise_backward(  # type: ignore[no-untyped-def]
    grad, at, source, source_at, mean, inverse, p, weight, grad_weight, weight_place, bias_place, like
):
    """In place: `grad` of one token's LayerNorm becomes that of its source; adds to those of weight and bias."""
    middle, scale = constant(like, mean), constant(like, inverse)
    total, along = constant(like, 0.0), constant(like, 0.0)
    for d in range(0, p.dim, LANES):
        rolled()
        given = load(grad, at + d)
        unit = multiply(subtract(load(source, source_at + d), middle), scale)
        store(grad_weight, weight_place + d, muladd(given, unit, load(grad_weight, weight_place + d)))
        store(grad_weight, bias_place + d, add(given, load(grad_weight, bias_place + d)))
        weighted = multiply(given, load(weight, d))
        total = add(total, weighted)
        along = muladd(weighted, unit, along)
    # (g - mean(g) - unit · mean(g · unit)) · inverse, with g the weighted gradient
    shift = constant(like, lane_sum(total) / p.dim)
    pull = constant(like, -lane_sum(along) / p.dim)
    for d in range(0, p.dim, LANES):
        rolled()
        unit = multiply(subtract(load(source, source_at + d), middle), scale)
        weighted = subtract(multiply(load(grad, at + d), load(weight, d)), shift)
        store(grad, at + d, multiply(muladd(unit, pull, weighted), scale))


@stage
def activate_rows(value, value_row, slope, slope_row, hidden, at, p, count, keep_slope, like):  # type: ignore[no-untyped-def]
    """Of `count` tokens: GELU, or if gated, silu(gate) · signal; with the slopes by which gradients go back."""
    width = p.inner_width
    for t in range(count):
        source, to, beside = at + t * p.hidden_width, t * value_row, t * slope_row
        if p.hidden_width == width:
            for d in range(0, width, LANES):
                rolled()
                result, rise = value_and_slope(load(hidden, source + d), like)
                store(value, to + d, result)
                if keep_slope:
                    store(slope, beside + d, rise)
            continue
        for d in range(0, width, LANES):
            rolled()
            gate, rise = activate(load(hidden, source + d), SILU, like)
            signal = load(hidden, source + width + d)
            store(value, to + d, multiply(gate, signal))
            if keep_slope:
                store(slope, beside + d, multiply(rise, signal))
                store(slope, beside + width + d, gate)


@stage
def activate_backward(slope, slope_row, grad, grad_row, p, count):  # type: ignore[no-untyped-def]
    """In place: slopes become gradients of what was activated."""
    for t in range(count):
        for part in range(0, p.hidden_width, p.inner_width):
            for d in range(0, p.inner_width, LANES):
                rolled()
                at = t * slope_row + part + d
                store(slope, at, multiply(load(slope, at), load(grad, t * grad_row + d)))


@stage
def sum_rows(target, place, begun, source, at, row, count, width, like):  # type: ignore[no-untyped-def]
    """Add the rows of `count` tokens to one row, or begin it. Four sums at a time do not wait for each other."""
    for d in range(0, width, 2 * LANES):
        first, second = constant(like, 0.0), constant(like, 0.0)
        third, fourth = constant(like, 0.0), constant(like, 0.0)
        for t in range(0, count - 1, 2):
            rolled()
            here = at + t * row + d
            first, second = add(first, load(source, here)), add(second, load(source, here + LANES))
            third, fourth = add(third, load(source, here + row)), add(fourth, load(source, here + row + LANES))
        first, second = add(first, third), add(second, fourth)
        if count % 2:
            here = at + (count - 1) * row + d
            first, second = add(first, load(source, here)), add(second, load(source, here + LANES))
        if begun:
            first, second = add(first, load(target, place + d)), add(second, load(target, place + d + LANES))
        store(target, place + d, first)
        store(target, place + d + LANES, second)


@stage
def copy_rows(target, row, source, at, source_row, count, width):  # type: ignore[no-untyped-def]
    for t in range(count):
        for d in range(0, width, LANES):
            rolled()
            store(target, t * row + d, load(source, at + t * source_row + d))
