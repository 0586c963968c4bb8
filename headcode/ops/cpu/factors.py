"""How the two factors of a matrix product lie in memory: as float32, or rounded to bf16 and in pairs.

A processor with avx512_bf16 multiplies numbers of 16 bits two at a time: one word of each factor holds two numbers that
follow one another in the depth, and both products are added to one float32 sum. So whatever has a depth of D numbers
has (D + 1) // 2 words, 0 beyond an odd end, and the loops over words are the same for both.

Which of them a kernel is compiled for says the type of its panels and of `space`, memory of its own for what it rounds
(`product_space`): float32, or unsigned words of 32 bits. Products of float32 read their factors where they are, and
need no space. Rounding is to the nearest, ties to even. Needs Numba; imported at first use.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from headcode.ops.cpu.kernel import no_unroll
from headcode.ops.cpu.records import COLUMNS, LANES
from headcode.ops.cpu.simd import (
    emit_address,
    emit_load,
    emit_muladd,
    emit_store,
    load,
    store,
)
from headcode.ops.cpu.simd_shuffles import emit_transposed, transpose

MOST_DEPTH = 1024
"""A product of more is summed up in several, so that the panels of one stay in the core's cache."""
SPARE = 16
"""Words that rows in `space` are longer than they need be: powers of two would all want the same lines of the cache."""


class _BrainFloat(ir.Type):
    """LLVM's type of a bf16 number, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BrainFloat)

    def __hash__(self) -> int:
        return hash(_BrainFloat)


def _in_pairs(array: Any) -> bool:
    return bool(array.dtype == types.uint32)


def emit_product(builder: Any, x: Any, y: Any, total: Any) -> Any:
    """total + x · y, lane by lane; of lanes with two bf16 numbers each, both products."""
    if x.type == total.type:
        return emit_muladd(builder, x, y, total)
    pairs = ir.VectorType(_BrainFloat(), 2 * COLUMNS)
    signature = ir.FunctionType(total.type, [total.type, pairs, pairs])
    function = builder.module.declare_intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", fnty=signature)
    return builder.call(function, [total, builder.bitcast(x, pairs), builder.bitcast(y, pairs)])


def _emit_rounded(builder: Any, numbers: Any) -> Any:
    return builder.fptrunc(numbers, ir.VectorType(_BrainFloat(), numbers.type.count))


@intrinsic
def _round_row(typingctx, target, offset, source, index):  # type: ignore[no-untyped-def]
    """COLUMNS numbers that follow one another, as half as many words."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        target, offset, source, index = arguments
        numbers = emit_load(builder, emit_address(context, builder, signature.args[2], source, index), COLUMNS)
        words = builder.bitcast(_emit_rounded(builder, numbers), ir.VectorType(ir.IntType(32), COLUMNS // 2))
        emit_store(builder, words, emit_address(context, builder, signature.args[0], target, offset))
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp), codegen


@intrinsic
def _round_rows(typingctx, target, offset, source, first, second, paired):  # type: ignore[no-untyped-def]
    """Each of COLUMNS numbers in a word with the one below it in the next row; with 0 if that is not paired."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        target, offset, source, first, second, paired = arguments
        words = ir.VectorType(ir.IntType(32), COLUMNS)
        halves = []
        for index in (first, second):
            numbers = emit_load(builder, emit_address(context, builder, signature.args[2], source, index), COLUMNS)
            bits = builder.bitcast(_emit_rounded(builder, numbers), ir.VectorType(ir.IntType(16), COLUMNS))
            halves.append(builder.zext(bits, words))
        upper = builder.shl(halves[1], ir.Constant(words, [16] * COLUMNS))
        upper = builder.select(paired, upper, ir.Constant(words, None))
        word = builder.or_(halves[0], upper)
        emit_store(builder, word, emit_address(context, builder, signature.args[0], target, offset))
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp, types.intp, types.boolean), codegen


@intrinsic
def _round_square(typingctx, source, index, stride, target, offset):  # type: ignore[no-untyped-def]
    """LANES rows of COLUMNS numbers, `stride` apart, become rows of LANES words, COLUMNS apart."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        source, index, stride, target, offset = arguments
        rows = []
        for _ in range(LANES):
            numbers = emit_load(builder, emit_address(context, builder, signature.args[0], source, index), COLUMNS)
            rows.append(builder.bitcast(_emit_rounded(builder, numbers), ir.VectorType(ir.IntType(32), LANES)))
            index = builder.add(index, stride)
        for column in emit_transposed(builder, rows):
            emit_store(builder, column, emit_address(context, builder, signature.args[3], target, offset))
            offset = builder.add(offset, ir.Constant(offset.type, COLUMNS))
        return context.get_dummy_value()

    return types.void(source, types.intp, types.intp, target, types.intp), codegen


def in_words(like, depth):  # type: ignore[no-untyped-def]
    """Words that a depth of so many numbers takes."""


@overload(in_words)
def _in_words(like, depth):  # type: ignore[no-untyped-def]
    if _in_pairs(like):
        return lambda like, depth: (depth + 1) >> 1
    return lambda like, depth: depth


def product_space(like, tokens, widest):  # type: ignore[no-untyped-def]
    """Memory for the factors of any product of so many tokens and no width above `widest`."""


@overload(product_space)
def _product_space(like, tokens, widest):  # type: ignore[no-untyped-def]
    if not _in_pairs(like):
        return lambda like, tokens, widest: np.empty(1, like.dtype)

    def space(like, tokens, widest):  # type: ignore[no-untyped-def]
        return np.empty((tokens + 1) * (widest + SPARE), like.dtype)

    return space


def left_factor(space, numbers, offset, row, m, depth):  # type: ignore[no-untyped-def]
    """The matrix (m, depth) with its depth in words: array, offset of its first word, stride of its rows."""


@overload(left_factor)
def _left_factor(space, numbers, offset, row, m, depth):  # type: ignore[no-untyped-def]
    if not _in_pairs(space):
        return lambda space, numbers, offset, row, m, depth: (numbers, offset, row)

    def rounded(space, numbers, offset, row, m, depth):  # type: ignore[no-untyped-def]
        stride = depth // 2 + SPARE
        for i in range(m):
            for d in range(0, depth, COLUMNS):
                no_unroll()
                _round_row(space, i * stride + d // 2, numbers, offset + i * row + d)
        return space, 0, stride

    return rounded


def factor_of_tokens(space, first, numbers, offset, row, width, count):  # type: ignore[no-untyped-def]
    """The matrix (count, width) with its tokens in words, as `left_factor`; `space` is free from `first` on."""


@overload(factor_of_tokens)
def _factor_of_tokens(space, first, numbers, offset, row, width, count):  # type: ignore[no-untyped-def]
    if not _in_pairs(space):
        return lambda space, first, numbers, offset, row, width, count: (numbers, offset, row)

    def rounded(space, first, numbers, offset, row, width, count):  # type: ignore[no-untyped-def]
        stride = width + SPARE
        for t in range(0, count, 2):
            paired = t + 1 < count
            upper = offset + t * row
            lower = upper + row if paired else upper
            for d in range(0, width, COLUMNS):
                no_unroll()
                _round_rows(space, first + t // 2 * stride + d, numbers, upper + d, lower + d, paired)
        return space, first, stride

    return rounded


def pack_transposed(panels, source, rows, columns):  # type: ignore[no-untyped-def]
    """The transpose of a matrix in panels of COLUMNS of its rows, (rows / COLUMNS, words of columns, COLUMNS)."""


@overload(pack_transposed)
def _pack_transposed(panels, source, rows, columns):  # type: ignore[no-untyped-def]
    def plain(panels, source, rows, columns):  # type: ignore[no-untyped-def]
        for row in range(0, rows, LANES):
            for column in range(0, columns, LANES):
                no_unroll()
                offset = row // COLUMNS * COLUMNS * columns + column * COLUMNS + row % COLUMNS
                transpose(source, row * columns + column, columns, panels, offset, COLUMNS, LANES - 1)

    def rounded(panels, source, rows, columns):  # type: ignore[no-untyped-def]
        for row in range(0, rows, LANES):
            for column in range(0, columns, COLUMNS):
                no_unroll()
                offset = (row // COLUMNS * columns + column) // 2 * COLUMNS + row % COLUMNS
                _round_square(source, row * columns + column, columns, panels, offset)

    return rounded if _in_pairs(panels) else plain


def pack_rows(panels, source, rows, columns, depth, first):  # type: ignore[no-untyped-def]
    """A matrix in panels of COLUMNS of its columns, (columns / COLUMNS, words of depth, COLUMNS), its rows from number
    `first` on."""


@overload(pack_rows)
def _pack_rows(panels, source, rows, columns, depth, first):  # type: ignore[no-untyped-def]
    def plain(panels, source, rows, columns, depth, first):  # type: ignore[no-untyped-def]
        for column in range(0, columns, COLUMNS):
            for row in range(rows):
                no_unroll()
                offset = column * depth + (first + row) * COLUMNS
                store(panels, offset, load(source, row * columns + column))
                store(panels, offset + LANES, load(source, row * columns + column + LANES))

    def rounded(panels, source, rows, columns, depth, first):  # type: ignore[no-untyped-def]
        for column in range(0, columns, COLUMNS):
            for row in range(0, rows, 2):
                no_unroll()
                offset = (column * depth + (first + row) * COLUMNS) // 2
                upper = row * columns + column
                _round_rows(panels, offset, source, upper, upper + columns, True)

    return rounded if _in_pairs(panels) else plain
