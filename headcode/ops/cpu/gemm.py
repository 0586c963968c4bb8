"""Matrix products for the fused blocks, small enough to stay in a core's cache between the steps around them.

A tile is up to 6 rows and 16 columns of a product, held in 12 registers while the depth runs by: per step of depth two
vectors of b, and one number of a for each row. The right factor is read in panels of 16 columns, so that what the inner
loop reads of it follows in memory. One core reaches the speed of torch's own products with it, or a little more, and
nothing has to leave the cache for a bias, a residual or a gradient to be added. Needs Numba; imported at first use.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headcode.jit import njit
from headcode.ops.cpu.packing import array_at, stage
from headcode.ops.cpu.simd import (
    LANES,
    _address,
    _load,
    _offset,
    _store,
    emit_muladd,
    emit_splat,
    load,
    rolled,
    store,
    take_next,
    transpose,
    vector_type,
)
from headcode.ops.cpu.simd_math import add

COLUMNS = 16
SIX, FOUR, ONE = (0,) * 6, (0,) * 4, (0,)
WORDS, NUMBERS = np.empty(0, np.int64), np.empty(0, np.float32)


@intrinsic
def _tile(  # type: ignore[no-untyped-def]
    typingctx,
    c,
    c_place,
    c_row,
    start,
    start_place,
    start_row,
    a,
    a_place,
    a_row,
    a_step,
    b,
    b_place,
    b_row,
    depth,
    rows,
):
    """c = start + a·b, len(rows) by 16; `*_row` is the way from one row to the next, a_step from one column of a on."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        c, c_place, c_row, start, start_place, start_row, a, a_place, a_row, a_step, b, b_place, b_row, depth, _ = (
            arguments
        )
        word, vector = ir.IntType(64), vector_type(signature.args[0].dtype)

        def rows_of(argument: int, array: Any, place: Any, step: Any) -> list[Any]:
            addresses = [_address(context, builder, signature.args[argument], array, place)]
            for _ in range(len(rows) - 1):
                addresses.append(builder.gep(addresses[-1], [step]))
            return addresses

        # Added at the end: until then it has come from wherever it was.
        begin = rows_of(3, start, start_place, start_row)
        for at in begin:
            _prefetch(builder, at)
        left = rows_of(6, a, a_place, a_row)
        right = _address(context, builder, signature.args[10], b, b_place)

        before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        done, column, panel = builder.phi(word), builder.phi(word), builder.phi(right.type)
        totals = [[builder.phi(vector) for _ in range(2)] for _ in rows]
        values = [_load(builder, _offset(builder, panel, LANES * j)) for j in range(2)]
        results = []
        for at, row in zip(left, totals, strict=True):
            factor = emit_splat(builder, builder.load(builder.gep(at, [column])))
            results.append([emit_muladd(builder, factor, value, t) for value, t in zip(values, row, strict=True)])
        now = builder.add(done, ir.Constant(word, 1))
        carried = [
            (done, ir.Constant(word, 0), now),
            (column, ir.Constant(word, 0), builder.add(column, a_step)),
            (panel, right, builder.gep(panel, [b_row])),
        ]
        for row, result in zip(totals, results, strict=True):
            carried += [(t, ir.Constant(vector, None), r) for t, r in zip(row, result, strict=True)]
        for phi, first, following in carried:
            phi.add_incoming(first, before)
            phi.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", now, depth), loop, after)

        builder.position_at_end(after)
        for at, beside, row in zip(rows_of(0, c, c_place, c_row), begin, results, strict=True):
            for j, result in enumerate(row):
                total = builder.fadd(result, _load(builder, _offset(builder, beside, LANES * j)))
                _store(builder, total, _offset(builder, at, LANES * j))
        return context.get_dummy_value()

    whole = types.int64
    arguments = (c, whole, whole, start, whole, whole, a, whole, whole, whole, b, whole, whole, whole, rows)
    return types.void(*arguments), codegen


def _prefetch(builder: Any, address: Any) -> None:
    """Have the numbers at an address brought near, for reading and writing."""
    octets, flag = ir.PointerType(ir.IntType(8)), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [octets, flag, flag, flag])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(function, [builder.bitcast(address, octets), *(ir.Constant(flag, value) for value in (0, 3, 1))])


@stage
def _rows(  # type: ignore[no-untyped-def]
    c, c_place, c_row, start, start_place, start_row, a, a_place, a_row, a_step, b, b_place, b_row, depth, first, rows
):
    c_place, start_place, a_place = c_place + first * c_row, start_place + first * start_row, a_place + first * a_row
    _tile(
        c, c_place, c_row, start, start_place, start_row, a, a_place, a_row, a_step, b, b_place, b_row, depth, rows
    )  # fmt: skip
    return first + len(rows)


@stage
def product(  # type: ignore[no-untyped-def]
    c, c_place, c_row, start, begin, start_row, a, a_place, a_row, a_step, b, b_place, b_panel, b_row, m, n, depth
):
    """c (m, n) = start + a (m, depth) · b (depth, n), with n a multiple of 16 and the panels of b `b_panel` apart.

    `start` may be c itself, or one row for all with start_row 0. With a_row and a_step exchanged, a is read across.
    """
    for column in range(0, n, COLUMNS):
        at, beside, panel = c_place + column, begin + column, b_place + column // COLUMNS * b_panel
        # Sixes and fours make up any even number but 2; a tile of fewer rows would wait for its own sums.
        sixes = m - (m % 6 + 6 if m % 6 == 2 and m > 6 else m % 6)
        row = 0
        while row < sixes:
            row = _rows(
                c, at, c_row, start, beside, start_row, a, a_place, a_row, a_step, b, panel, b_row, depth, row, SIX
            )
        while row + 4 <= m:
            row = _rows(
                c, at, c_row, start, beside, start_row, a, a_place, a_row, a_step, b, panel, b_row, depth, row, FOUR
            )
        while row < m:
            row = _rows(
                c, at, c_row, start, beside, start_row, a, a_place, a_row, a_step, b, panel, b_row, depth, row, ONE
            )


@stage
def add_product(c, c_place, c_row, start, begin, start_row, a, a_place, a_row, panels, m, n, depth):  # type: ignore[no-untyped-def]
    """c = start + a · W, for W packed in panels."""
    panel = COLUMNS * depth
    product(c, c_place, c_row, start, begin, start_row, a, a_place, a_row, 1, panels, 0, panel, COLUMNS, m, n, depth)


@stage
def add_outer(c, c_place, begun, zeros, a, a_place, a_row, b, b_place, b_row, m, n, count):  # type: ignore[no-untyped-def]
    """c (m, n) += aᵀ b over `count` tokens, or = if it has not begun; a and b have a row per token."""
    if begun:
        product(c, c_place, n, c, c_place, n, a, a_place, 1, a_row, b, b_place, COLUMNS, b_row, m, n, count)
    else:
        product(c, c_place, n, zeros, 0, 0, a, a_place, 1, a_row, b, b_place, COLUMNS, b_row, m, n, count)


@njit()
def pack_kernel(address):  # type: ignore[no-untyped-def]
    """Bring float32 weights into panels. At the address: tasks taken, number of jobs, then the jobs, six words each.

    A job is the address of a matrix, its sizes n and k, the address of its panels, depth and first. For products that
    sum over k, the panels are those of the transpose, (n/16, k, 16), and depth is 0. For products that sum over n, they
    are those of the matrix itself, (k/16, depth, 16), in which its n rows stand from row `first` on: other matrices,
    whose rows are summed over as well, have their places before and after.
    """
    words = array_at(address, WORDS)
    while True:
        task = take_next(words)
        if task >= words[1]:
            return
        job = 2 + 6 * task
        source, target = array_at(words[job], NUMBERS), array_at(words[job + 3], NUMBERS)
        n, k, depth, first = words[job + 1], words[job + 2], words[job + 4], words[job + 5]
        if depth == 0:
            for row in range(0, n, LANES):
                for column in range(0, k, LANES):
                    rolled()
                    at = row // COLUMNS * COLUMNS * k + column * COLUMNS + row % COLUMNS
                    transpose(source, row * k + column, k, target, at, COLUMNS, ONE)
        else:
            for column in range(0, k, COLUMNS):
                for row in range(n):
                    rolled()
                    at = column * depth + (first + row) * COLUMNS
                    store(target, at, load(source, row * k + column))
                    store(target, at + LANES, load(source, row * k + column + LANES))


@njit()
def sum_kernel(address):  # type: ignore[no-untyped-def]
    """total = parts[0] + parts[1] + …, float32, in this order; each task sums a piece of the numbers.

    At the address: tasks taken, the addresses of parts and total, the number of parts, their size, and that of a piece.
    """
    words = array_at(address, WORDS)
    source, target = array_at(words[1], NUMBERS), array_at(words[2], NUMBERS)
    num_parts, size, piece = words[3], words[4], words[5]
    while True:
        begin = take_next(words) * piece
        if begin >= size:
            return
        for place in range(begin, min(begin + piece, size), LANES):
            value = load(source, place)
            for part in range(1, num_parts):
                rolled()
                value = add(value, load(source, part * size + place))
            store(target, place, value)
