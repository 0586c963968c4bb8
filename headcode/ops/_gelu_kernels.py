"""GELU and its slope in one pass; imported at first use only, because it needs Numba."""

import math

import numpy as np

from headcode.jit import njit
from headcode.ops._simd import LANES, constant, load, muladd, store
from headcode.ops._simd_math import add, divide, exp, maximum, multiply, subtract, where_positive

# The tanh form is x · sigmoid(u) with u = 2·sqrt(2/π)·(x + 0.044715·x³); one exponential gives the value and the slope.
LINEAR = 2 * math.sqrt(2 / math.pi)
CUBIC = LINEAR * 0.044715
# Beyond, the sigmoid is 0 or 1 to float32; so far out its argument is cut, before it can overflow.
FAR = 10.0


@njit(fastmath=False)
def gelu_with_slope(x: np.ndarray, value: np.ndarray, slope: np.ndarray, start: int, stop: int) -> None:
    """Fill value[start:stop] and slope[start:stop]; whole vectors only."""
    one, linear = constant(x, 1.0), constant(x, LINEAR)
    low, high = constant(x, -FAR), constant(x, FAR)
    cubic, triple, minus = constant(x, CUBIC), constant(x, 3 * CUBIC), constant(x, -1.0)
    for index in range(start, stop, LANES):
        given = load(x, index)
        near = maximum(given, low)
        near = where_positive(subtract(near, high), high, near)
        square = multiply(near, near)
        negated = multiply(multiply(near, minus), muladd(square, cubic, linear))
        sigmoid = divide(one, add(one, exp(negated)))
        store(value, index, multiply(given, sigmoid))
        # sigmoid + x · sigmoid · (1 - sigmoid) · du/dx
        rise = multiply(multiply(multiply(near, sigmoid), subtract(one, sigmoid)), muladd(square, triple, linear))
        store(slope, index, add(sigmoid, rise))
