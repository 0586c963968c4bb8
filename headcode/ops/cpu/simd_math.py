"""Explicit SIMD for Numba, second half: arithmetic, roots, exponentials and hashes of single vectors."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from headcode.ops.cpu.simd import (
    Builder,
    Vector,
    by_lanes,
    emit_intrinsic,
    emit_muladd,
    emit_shuffle,
    emit_splat,
    vector_type,
)
from headcode.ops.dropout import KEY_FACTOR, MIX_FACTORS


def _binary(emit: Callable[[Builder, Any, Any], Any], doc: str) -> Any:
    def function(typingctx, a, b):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            return emit(builder, *arguments)

        return a(a, b), codegen

    function.__doc__ = doc
    return intrinsic(function)


add = _binary(lambda builder, a, b: builder.fadd(a, b), "a + b")
subtract = _binary(lambda builder, a, b: builder.fsub(a, b), "a - b")
multiply = _binary(lambda builder, a, b: builder.fmul(a, b), "a * b")
divide = _binary(lambda builder, a, b: builder.fdiv(a, b), "a / b")
maximum = _binary(
    lambda builder, a, b: builder.select(builder.fcmp_unordered(">", a, b), a, b), "The larger; a where either is NaN."
)


@intrinsic
def where_positive(typingctx, condition, a, b):  # type: ignore[no-untyped-def]
    """a in the lanes where condition > 0, else b."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        condition, a, b = arguments
        return builder.select(builder.fcmp_ordered(">", condition, ir.Constant(condition.type, None)), a, b)

    return a(condition, a, b), codegen


@intrinsic
def sqrt(typingctx, x):  # type: ignore[no-untyped-def]
    """The square root of every lane."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return emit_intrinsic(builder, "sqrt", *arguments)

    return x(x), codegen


@intrinsic
def exp(typingctx, x):  # type: ignore[no-untyped-def]
    """e**x, to the last bit or two; 0 where the result would be denormal, largest finite where it would overflow."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        given = arguments[0]
        lowest, highest = (-87.3, 88.3) if isinstance(given.type.element, ir.FloatType) else (-708.3, 709.4)
        low, high = _number(given.type, lowest), _number(given.type, highest)
        # Ordered comparisons: NaN leaves the clamp as a number, and comes back at the end.
        x = builder.select(builder.fcmp_ordered(">", given, low), given, low)
        x = builder.select(builder.fcmp_ordered("<", x, high), x, high)
        result = _emit_exp(builder, x)
        result = builder.select(builder.fcmp_ordered("<", given, low), ir.Constant(given.type, None), result)
        return builder.select(builder.fcmp_unordered("uno", given, given), given, result)

    return x(x), codegen


@intrinsic
def exp_within(typingctx, x):  # type: ignore[no-untyped-def]
    """e**x for x from -87.5 to 88 in float32, -708 to 709 in float64 (NaN gives NaN), and anything elsewhere."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return _emit_exp(builder, arguments[0])

    return x(x), codegen


def _number(kind: Any, value: float) -> Any:
    single = isinstance(kind.element, ir.FloatType)
    return ir.Constant(kind, [float(np.float32(value)) if single else value] * kind.count)


def _emit_exp(builder: Builder, x: Any) -> Any:
    """e**x = 2**n · e**r with n = round(x / log 2) and |r| ≤ log(2)/2, where a short Taylor series is exact enough.

    LLVM has no vector exponential of its own, and calling a scalar one for each lane costs more than all the rest.
    """
    single = isinstance(x.type.element, ir.FloatType)
    bits, fraction, degree = (32, 23, 7) if single else (64, 52, 13)
    # log 2 in two parts, so that n times the first part is exact.
    high, low = (0.693359375, -2.12194440e-4) if single else (0.6931471803691238, 1.9082149292705877e-10)
    n = emit_intrinsic(builder, "rint", builder.fmul(x, _number(x.type, 1.4426950408889634)))
    r = emit_muladd(builder, n, _number(x.type, -high), x)
    r = emit_muladd(builder, n, _number(x.type, -low), r)
    result = _number(x.type, 1 / math.factorial(degree))
    for i in range(degree - 1, -1, -1):
        result = emit_muladd(builder, result, r, _number(x.type, 1 / math.factorial(i)))
    integers = ir.VectorType(ir.IntType(bits), x.type.count)

    def integer(value: int) -> Any:
        return ir.Constant(integers, [value] * x.type.count)

    exponent = builder.add(builder.fptosi(n, integers), integer(2 ** (bits - fraction - 2) - 1))
    power = builder.bitcast(builder.shl(exponent, integer(fraction)), x.type)
    return builder.fmul(result, power)


@intrinsic
def lane_maximum(typingctx, x):  # type: ignore[no-untyped-def]
    """The largest lane."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return _fold_lanes(builder, arguments[0], lambda a, b: builder.select(builder.fcmp_unordered(">", a, b), a, b))

    return x.dtype(x), codegen


@intrinsic
def lane_sum(typingctx, x):  # type: ignore[no-untyped-def]
    """The sum of the lanes."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return _fold_lanes(builder, arguments[0], builder.fadd)

    return x.dtype(x), codegen


def _fold_lanes(builder: Builder, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
    lanes = x.type.count
    while lanes > 1:
        lanes //= 2
        x = combine(
            emit_shuffle(builder, x, x, list(range(lanes))), emit_shuffle(builder, x, x, list(range(lanes, 2 * lanes)))
        )
    return builder.extract_element(x, ir.Constant(ir.IntType(32), 0))


@by_lanes
def keep_lanes(lanes, typingctx, row, key, threshold, like):  # type: ignore[no-untyped-def]
    """1 in the lanes of keys key, key+1, … that dropout keeps, else 0: the last two lines of `ops.dropout`'s hash."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        words = ir.VectorType(ir.IntType(32), lanes)

        def word(value: int) -> Any:
            return ir.Constant(words, [value] * lanes)

        row, key, threshold = (emit_splat(builder, builder.trunc(x, ir.IntType(32)), lanes) for x in arguments[:3])
        keys = builder.add(key, ir.Constant(words, list(range(lanes))))
        x = builder.add(row, builder.mul(keys, word(KEY_FACTOR)))
        x = builder.mul(builder.xor(x, builder.lshr(x, word(16))), word(MIX_FACTORS[0]))
        x = builder.mul(builder.xor(x, builder.lshr(x, word(15))), word(MIX_FACTORS[1]))
        x = builder.xor(x, builder.lshr(x, word(16)))
        vector = vector_type(signature.return_type.dtype, lanes)
        return builder.uitofp(builder.icmp_unsigned(">=", x, threshold), vector)

    return Vector(like.dtype, lanes)(types.int64, types.int64, types.int64, like), codegen


@by_lanes
def lanes_below(lanes, typingctx, count, like):  # type: ignore[no-untyped-def]
    """1 in the first `count` lanes, which may be negative or more than there are, else 0."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        words, count = ir.VectorType(ir.IntType(32), lanes), builder.trunc(arguments[0], ir.IntType(32))
        below = builder.icmp_signed("<", ir.Constant(words, list(range(lanes))), emit_splat(builder, count, lanes))
        return builder.uitofp(below, vector_type(signature.return_type.dtype, lanes))

    return Vector(like.dtype, lanes)(types.int64, like), codegen
