"""Activations of vectors, with their slopes: of two-layer value nets and of the feed-forward networks."""

import numpy as np

from headcode.jit import njit
from headcode.ops.cpu.kernel import NET, NUMBERS, inlined_stage
from headcode.ops.cpu.records import GELU, LANES, RELU, SILU
from headcode.ops.cpu.simd import constant, load, muladd, store
from headcode.ops.cpu.simd_math import add, divide, exp, exp_within, maximum, multiply, subtract, where_positive
from headcode.ops.registry import GELU_CUBIC, GELU_SLOPE

# The tanh form of GELU is x · sigmoid(u) with u = GATE·x + CUBIC·x³; one exponential gives the value and the slope.
GATE = 2 * GELU_SLOPE
CUBIC = GATE * GELU_CUBIC
# Beyond, the sigmoid is 0 or 1 to float32; so far out its argument is cut, before it can overflow.
FAR = 10.0


@inlined_stage
def gelu(given):  # type: ignore[no-untyped-def]
    """GELU and its slope."""
    one, high = constant(given, 1.0), constant(given, FAR)
    near = maximum(given, constant(given, -FAR))
    near = where_positive(subtract(near, high), high, near)
    square = multiply(near, near)
    negated = multiply(
        multiply(near, constant(given, -1.0)), muladd(square, constant(given, CUBIC), constant(given, GATE))
    )
    sigmoid = divide(one, add(one, exp_within(negated)))
    # sigmoid + x · sigmoid · (1 - sigmoid) · du/dx
    steepness = muladd(square, constant(given, 3 * CUBIC), constant(given, GATE))
    rise = multiply(multiply(multiply(near, sigmoid), subtract(one, sigmoid)), steepness)
    return multiply(given, sigmoid), add(sigmoid, rise)


@inlined_stage
def silu(x):  # type: ignore[no-untyped-def]
    """SiLU and its slope."""
    one = constant(x, 1.0)
    gate = divide(one, add(one, exp(subtract(constant(x, 0.0), x))))
    value = multiply(x, gate)
    return value, muladd(value, subtract(one, gate), gate)


@inlined_stage
def activate(x):  # type: ignore[no-untyped-def]
    """φ(x) and φ'(x) of a two-layer value net."""
    one = constant(NUMBERS, 1.0)
    if NET == RELU:
        zero = constant(NUMBERS, 0.0)
        return maximum(x, zero), where_positive(x, one, zero)
    if NET == GELU:
        return gelu(x)
    if NET == SILU:
        return silu(x)
    return x, one


@njit(fastmath=False)
def gelu_with_slope(x: np.ndarray, value: np.ndarray, slope: np.ndarray, start: int, stop: int) -> None:
    """Fill value[start:stop] and slope[start:stop]; whole vectors only."""
    for index in range(start, stop, LANES):
        result, rise = gelu(load(x, index))
        store(value, index, result)
        store(slope, index, rise)
