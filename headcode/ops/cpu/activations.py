"""GELU and its slope in one pass; imported at first use only, because it needs Numba."""

import math

import numpy as np

from headcode.jit import njit
from headcode.ops.cpu.packing import stage
from headcode.ops.cpu.simd import LANES, constant, load, muladd, store
from headcode.ops.cpu.simd_math import add, divide, exp_within, maximum, multiply, subtract, where_positive

# The tanh form is x · sigmoid(u) with u = 2·sqrt(2/π)·(x + 0.044715·x³); one exponential gives the value and the slope.
LINEAR = 2 * math.sqrt(2 / math.pi)
CUBIC = LINEAR * 0.044715
# Beyond, the sigmoid is 0 or 1 to float32; so far out its argument is cut, before it can overflow.
FAR = 10.0


@stage
def value_and_slope(given, like):  # type: ignore[no-untyped-def]
    """Of one vector; `like` is an array of its type."""
    one, high = constant(like, 1.0), constant(like, FAR)
    near = maximum(given, constant(like, -FAR))
    near = where_positive(subtract(near, high), high, near)
    square = multiply(near, near)
    negated = multiply(
        multiply(near, constant(like, -1.0)), muladd(square, constant(like, CUBIC), constant(like, LINEAR))
    )
    sigmoid = divide(one, add(one, exp_within(negated)))
    # sigmoid + x · sigmoid · (1 - sigmoid) · du/dx
    steepness = muladd(square, constant(like, 3 * CUBIC), constant(like, LINEAR))
    rise = multiply(multiply(multiply(near, sigmoid), subtract(one, sigmoid)), steepness)
    return multiply(given, sigmoid), add(sigmoid, rise)


@njit(fastmath=False)
def gelu_with_slope(x: np.ndarray, value: np.ndarray, slope: np.ndarray, start: int, stop: int) -> None:
    """Fill value[start:stop] and slope[start:stop]; whole vectors only."""
    for index in range(start, stop, LANES):
        result, rise = value_and_slope(load(x, index), x)
        store(value, index, result)
        store(slope, index, rise)
