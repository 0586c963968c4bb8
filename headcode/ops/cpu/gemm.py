"""Matrix products for the fused blocks, small enough to stay in a core's cache between the steps around them.

A tile is up to 6 rows and COLUMNS = 16 columns of a product, held in 12 registers while the depth runs by: per step of
depth two vectors of b, and one number of a for each row. The right factor is read in panels of 16 columns, so that what
the inner loop reads of it follows in memory. One core reaches the speed of torch's own products with it, or a little
more, and nothing has to leave the cache for a bias, a residual or a gradient to be added.

A matrix is a tuple: its array, the offset of its first number in there, and the stride of its rows. Needs Numba;
imported at first use.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from headcode.jit import njit
from headcode.ops.cpu.kernel import (
    DOUBLE,
    PACKING,
    PACKING_JOB,
    SINGLE,
    SUM,
    WORDS,
    array_at,
    fetch_add,
    no_unroll,
    stage,
)
from headcode.ops.cpu.records import COLUMNS, LANES
from headcode.ops.cpu.simd import (
    emit_address,
    emit_load,
    emit_muladd,
    emit_offset,
    emit_splat,
    emit_store,
    load,
    store,
    vector_type,
)
from headcode.ops.cpu.simd_math import add
from headcode.ops.cpu.simd_shuffles import transpose

SIX, FOUR, ONE = (0,) * 6, (0,) * 4, (0,)


@intrinsic
def _tile(  # type: ignore[no-untyped-def]
    typingctx, c, c_offset, c_row, start, start_offset, start_row,
    a, a_offset, a_row, a_step, b, b_offset, b_row, depth, rows,
):  # fmt: skip
    """c = start + a·b, len(rows) by COLUMNS; `*_row` is the stride of rows, a_step that of a's columns."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        c, c_offset, c_row, start, start_offset, start_row, a, a_offset, a_row, a_step, b, b_offset, b_row, depth, _ = (
            arguments
        )
        word, vector = ir.IntType(64), vector_type(signature.args[0].dtype)

        def rows_of(argument: int, array: Any, offset: Any, stride: Any) -> list[Any]:
            addresses = [emit_address(context, builder, signature.args[argument], array, offset)]
            for _ in range(len(rows) - 1):
                addresses.append(builder.gep(addresses[-1], [stride]))
            return addresses

        # Added at the end: until then it has come from wherever it was.
        start_rows = rows_of(3, start, start_offset, start_row)
        for address in start_rows:
            _prefetch(builder, address)
        left = rows_of(6, a, a_offset, a_row)
        right = emit_address(context, builder, signature.args[10], b, b_offset)

        before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        done, column, panel = builder.phi(word), builder.phi(word), builder.phi(right.type)
        totals = [[builder.phi(vector) for _ in range(2)] for _ in rows]
        values = [emit_load(builder, emit_offset(builder, panel, LANES * j)) for j in range(2)]
        results = []
        for address, row in zip(left, totals, strict=True):
            factor = emit_splat(builder, builder.load(builder.gep(address, [column])))
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
        for c_address, start_address, row in zip(rows_of(0, c, c_offset, c_row), start_rows, results, strict=True):
            for j, result in enumerate(row):
                total = builder.fadd(result, emit_load(builder, emit_offset(builder, start_address, LANES * j)))
                emit_store(builder, total, emit_offset(builder, c_address, LANES * j))
        return context.get_dummy_value()

    whole = types.int64
    arguments = (c, whole, whole, start, whole, whole, a, whole, whole, whole, b, whole, whole, whole, rows)
    return types.void(*arguments), codegen


def _prefetch(builder: Any, address: Any) -> None:
    """Have the numbers at an address brought near, for reading and writing."""
    pointer, flag = ir.PointerType(ir.IntType(8)), ir.IntType(32)
    signature = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
    function = builder.module.declare_intrinsic("llvm.prefetch.p0i8", fnty=signature)
    builder.call(function, [builder.bitcast(address, pointer), *(ir.Constant(flag, value) for value in (0, 3, 1))])


@stage
def _rows(  # type: ignore[no-untyped-def]
    rows, first, c, c_offset, c_row, start, start_offset, start_row,
    a, a_offset, a_row, a_step, b, b_offset, b_row, depth,
):  # fmt: skip
    """The tile of the rows from `first` on; returns the row after it."""
    c_first, start_first, a_first = c_offset + first * c_row, start_offset + first * start_row, a_offset + first * a_row
    _tile(
        c, c_first, c_row, start, start_first, start_row, a, a_first, a_row, a_step, b, b_offset, b_row, depth, rows
    )  # fmt: skip
    return first + len(rows)


@stage
def _product(  # type: ignore[no-untyped-def]
    c, c_offset, c_row, start, start_offset, start_row, a, a_offset, a_row, a_step, b, b_panel, b_row, m, n, depth
):
    """c (m, n) = start + a (m, depth) · b (depth, n), with n a multiple of COLUMNS and the panels of b `b_panel` apart.

    `start` may be c itself, or one row for all with start_row 0. With a_row and a_step exchanged, a is read across.
    """
    # Sixes and fours make up any even number but 2; a tile of fewer rows would wait for its own sums.
    sixes = m - (m % 6 + 6 if m % 6 == 2 and m > 6 else m % 6)
    for column in range(0, n, COLUMNS):
        # Not as tuples: taking arrays out of one counts references, for every tile anew.
        c_from, start_from, panel = c_offset + column, start_offset + column, column // COLUMNS * b_panel
        row = 0
        while row < sixes:
            row = _rows(
                SIX, row, c, c_from, c_row, start, start_from, start_row,
                a, a_offset, a_row, a_step, b, panel, b_row, depth,
            )  # fmt: skip
        while row + 4 <= m:
            row = _rows(
                FOUR, row, c, c_from, c_row, start, start_from, start_row,
                a, a_offset, a_row, a_step, b, panel, b_row, depth,
            )  # fmt: skip
        while row < m:
            row = _rows(
                ONE, row, c, c_from, c_row, start, start_from, start_row,
                a, a_offset, a_row, a_step, b, panel, b_row, depth,
            )  # fmt: skip


@stage
def add_product(c, start, a, panels, m, n, depth):  # type: ignore[no-untyped-def]
    """c (m, n) = start + a (m, depth) · W (depth, n), for W packed in panels; the others are matrices as above."""
    _product(*c, *start, *a, 1, panels, COLUMNS * depth, COLUMNS, m, n, depth)


@stage
def add_outer(c, c_offset, begun, zeros, a, a_row, b, b_row, m, n, count):  # type: ignore[no-untyped-def]
    """c (m, n) += aᵀ b over `count` tokens, or = if it has not begun; a and b have a row per token."""
    if begun:
        _product(c, c_offset, n, c, c_offset, n, a, 0, 1, a_row, b, COLUMNS, b_row, m, n, count)
    else:
        _product(c, c_offset, n, zeros, 0, 0, a, 0, 1, a_row, b, COLUMNS, b_row, m, n, count)


@njit()
def pack_kernel(address):  # type: ignore[no-untyped-def]
    """Bring float32 weights into panels: see `records.PACKING_JOB`."""
    p, counter = array_at(address, PACKING)[0], array_at(address, WORDS)
    jobs = array_at(address + PACKING.itemsize, PACKING_JOB)
    while True:
        task = fetch_add(counter)
        if task >= p.tasks:
            return
        job = jobs[task]
        source, target = array_at(job.matrix, SINGLE), array_at(job.panels, SINGLE)
        columns = job.columns
        if job.depth == 0:
            for row in range(0, job.rows, LANES):
                for column in range(0, columns, LANES):
                    no_unroll()
                    offset = row // COLUMNS * COLUMNS * columns + column * COLUMNS + row % COLUMNS
                    transpose(source, row * columns + column, columns, target, offset, COLUMNS, LANES - 1)
        else:
            for column in range(0, columns, COLUMNS):
                for row in range(job.rows):
                    no_unroll()
                    offset = column * job.depth + (job.first + row) * COLUMNS
                    store(target, offset, load(source, row * columns + column))
                    store(target, offset + LANES, load(source, row * columns + column + LANES))


def _sum_kernel(numbers: Any) -> Any:
    @njit(key=(str(numbers.dtype),))
    def sum_kernel(address):  # type: ignore[no-untyped-def]
        sum_tasks(address, numbers)

    return sum_kernel


@stage
def sum_tasks(address, numbers):  # type: ignore[no-untyped-def]
    """total (size) = parts[0] + parts[1] + …, in this order whatever the number of threads, unlike torch's sums."""
    p, counter = array_at(address, SUM)[0], array_at(address, WORDS)
    parts, total = array_at(p.parts, numbers), array_at(p.total, numbers)
    while True:
        task = fetch_add(counter)
        if task >= p.tasks:
            return
        for offset in range(task * p.piece, min((task + 1) * p.piece, p.size), LANES):
            value = load(parts, offset)
            for part in range(1, p.num_parts):
                no_unroll()
                value = add(value, load(parts, part * p.size + offset))
            store(total, offset, value)


SUM_KERNELS = {False: _sum_kernel(SINGLE), True: _sum_kernel(DOUBLE)}
