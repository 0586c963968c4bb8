"""Explicit SIMD for Numba, third part: sums over lanes, transposed squares, and rows of few numbers."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from headcode.ops.cpu.simd import (
    Builder,
    Vector,
    by_lanes,
    emit_address,
    emit_load,
    emit_masked_load,
    emit_masked_store,
    emit_offset,
    emit_rows,
    emit_shuffle,
    emit_splat,
    emit_store,
    rows_type,
)

GROUP = 4
"""Lanes of a 128-bit register in float32: shuffles within such groups are cheap, across them they are not."""


def _interleaved(distance: int, lanes: int) -> tuple[list[int], list[int]]:
    """Lanes that interleave two vectors, `distance` lanes of each at a time: of their lower and of their upper halves.

    Within each group of GROUP lanes for distances below it, as cheap shuffles are; beyond, within groups of twice the
    distance.
    """
    group = max(GROUP, 2 * distance)
    starts = [start + i for start in range(0, lanes, group) for i in range(0, group // 2, distance)]
    low = [vector + start + i for start in starts for vector in (0, lanes) for i in range(distance)]
    return low, [lane + group // 2 for lane in low]


@intrinsic
def add_lane_sums(typingctx, array, index, rows, other_index, other_rows):  # type: ignore[no-untyped-def]
    """array[index + i] += the sum of the lanes of rows[i], then the same for the others; a power of two of each."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        array, index, rows, other_index, other_rows = arguments
        size = rows.type.count
        vectors = emit_rows(builder, rows) + emit_rows(builder, other_rows)
        lanes, distance = vectors[0].type.count, 1
        # A transposing tree: each step halves the number of vectors, where one sum alone would leave lanes idle.
        while len(vectors) > 1:
            low, high = _interleaved(distance, lanes)
            pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
            vectors = [builder.fadd(emit_shuffle(builder, *p, low), emit_shuffle(builder, *p, high)) for p in pairs]
            distance *= 2
        (sums,) = vectors
        while lanes > 2 * size:
            lanes //= 2
            halves = (list(range(first, first + lanes)) for first in (0, lanes))
            sums = builder.fadd(*(emit_shuffle(builder, sums, sums, half) for half in halves))
        for start, offset in ((0, index), (size, other_index)):
            target = emit_address(context, builder, signature.args[0], array, offset)
            part = emit_shuffle(builder, sums, sums, list(range(start, start + size)))
            emit_store(builder, builder.fadd(emit_load(builder, target, size), part), target)
        return context.get_dummy_value()

    return types.void(array, types.intp, rows, types.intp, rows), codegen


@by_lanes
def transpose(lanes, typingctx, source, index, stride, target, target_offset, step, last):  # type: ignore[no-untyped-def]
    """Copy a LANES×LANES square, rows `stride` apart in source, to vectors of its columns, `step` apart in target.

    Rows after `last`, counted from 0, are not read: it is repeated in their place.
    """

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        source, index, stride, target, target_offset, step, last = arguments
        rows = []
        for row in _row_offsets(builder, lanes, index, stride, last):
            rows.append(emit_load(builder, emit_address(context, builder, signature.args[0], source, row), lanes))
        for column in emit_transposed(builder, rows):
            emit_store(builder, column, emit_address(context, builder, signature.args[3], target, target_offset))
            target_offset = builder.add(target_offset, step)
        return context.get_dummy_value()

    return types.void(source, types.intp, types.intp, target, *[types.intp] * 3), codegen


@by_lanes
def transpose_back(lanes, typingctx, source, index, step, target, target_offset, stride, last):  # type: ignore[no-untyped-def]
    """The other way: from vectors of columns to rows 0 … last that lie `stride` apart in target."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        source, index, step, target, target_offset, stride, last = arguments
        columns = []
        for _ in range(lanes):
            columns.append(emit_load(builder, emit_address(context, builder, signature.args[0], source, index), lanes))
            index = builder.add(index, step)
        offsets = _row_offsets(builder, lanes, target_offset, stride, last)
        # Backwards: what is not to be written goes where the last row is written afterwards.
        for row, offset in reversed(list(zip(emit_transposed(builder, columns), offsets, strict=True))):
            emit_store(builder, row, emit_address(context, builder, signature.args[3], target, offset))
        return context.get_dummy_value()

    return types.void(source, types.intp, types.intp, target, *[types.intp] * 3), codegen


def _row_offsets(builder: Builder, lanes: int, start: Any, stride: Any, last: Any) -> list[Any]:
    """Where the rows of a square begin; for those after the last, where that does."""
    offsets = [start]
    for row in range(1, lanes):
        is_there = builder.icmp_signed("<=", ir.Constant(ir.IntType(64), row), last)
        offsets.append(builder.select(is_there, builder.add(offsets[-1], stride), offsets[-1]))
    return offsets


def emit_transposed(builder: Builder, rows: list[Any]) -> list[Any]:
    """Interleave single lanes, then pairs, then groups of four and more."""
    lanes, distance = len(rows), 1
    while distance < lanes:
        low, high = _interleaved(distance, lanes)
        after = list(rows)
        for i in range(lanes):
            if not i & distance:
                after[i] = emit_shuffle(builder, rows[i], rows[i | distance], low)
                after[i | distance] = emit_shuffle(builder, rows[i], rows[i | distance], high)
        rows = after
        distance *= 2
    return [rows[start + i] for start in range(0, lanes, GROUP) for i in (0, 2, 1, 3)]


@by_lanes
def load_apart(lanes, typingctx, array, index, count, like):  # type: ignore[no-untyped-def]
    """From LANES rows of len(like) numbers, one after the other, a vector of each column; 0 for all but the first
    `count` numbers, which alone are read."""
    rows = rows_type(Vector(array.dtype, lanes), like)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        address = emit_address(context, builder, signature.args[0], *arguments[:2])
        vectors = []
        for i in range(len(like)):
            there = _emit_first(builder, arguments[2], lanes, lanes * i)
            vectors.append(emit_masked_load(builder, emit_offset(builder, address, lanes * i), there))
        return context.make_tuple(builder, rows, _deinterleaved(builder, vectors))

    return rows(array, types.intp, types.intp, like), codegen


def _emit_first(builder: Builder, count: Any, lanes: int, first: int) -> Any:
    """Which of the numbers first, first + 1, … are below count."""
    words = ir.VectorType(ir.IntType(32), lanes)
    numbers = ir.Constant(words, list(range(first, first + lanes)))
    return builder.icmp_signed("<", numbers, emit_splat(builder, builder.trunc(count, ir.IntType(32)), lanes))


def _deinterleaved(builder: Builder, vectors: list[Any]) -> list[Any]:
    """Of n vectors that follow each other, the n vectors of every n-th number."""
    if len(vectors) == 1:
        return vectors
    lanes, pairs = vectors[0].type.count, list(zip(vectors[::2], vectors[1::2], strict=True))
    even, odd = (
        _deinterleaved(builder, [emit_shuffle(builder, *pair, list(range(first, 2 * lanes, 2))) for pair in pairs])
        for first in (0, 1)
    )
    return [vector for pair in zip(even, odd, strict=True) for vector in pair]


@intrinsic
def store_apart(typingctx, array, index, count, rows):  # type: ignore[no-untyped-def]
    """The other way: vectors of columns to LANES rows that follow one another, of which `count` numbers are written."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        address = emit_address(context, builder, signature.args[0], *arguments[:2])
        for i, vector in enumerate(_reinterleaved(builder, emit_rows(builder, arguments[3]))):
            lanes = vector.type.count
            there = _emit_first(builder, arguments[2], lanes, lanes * i)
            emit_masked_store(builder, vector, emit_offset(builder, address, lanes * i), there)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, rows), codegen


def _reinterleaved(builder: Builder, columns: list[Any]) -> list[Any]:
    if len(columns) == 1:
        return columns
    lanes = columns[0].type.count
    even, odd = _reinterleaved(builder, columns[::2]), _reinterleaved(builder, columns[1::2])
    vectors = []
    for pair in zip(even, odd, strict=True):
        for start in (0, lanes // 2):
            numbers = [vector + start + i for i in range(lanes // 2) for vector in (0, lanes)]
            vectors.append(emit_shuffle(builder, *pair, numbers))
    return vectors


@intrinsic
def copy_numbers(typingctx, target, offset, source, index, scale, like):  # type: ignore[no-untyped-def]
    """target[offset + i] = source[index + i] * scale for every i below len(like)."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        target, offset, source, index, scale, _ = arguments
        given = emit_load(builder, emit_address(context, builder, signature.args[2], source, index), len(like))
        scaled = builder.fmul(given, emit_splat(builder, scale, len(like)))
        emit_store(builder, scaled, emit_address(context, builder, signature.args[0], target, offset))
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp, source.dtype, like), codegen
