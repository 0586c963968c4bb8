"""Matrix products for the fused blocks, small enough to stay in a core's cache between the steps around them.

The factors are float32, or numbers rounded to bf16 and two in a word (`factors`): a kernel is compiled for one of the
two, which differ in the instruction that multiplies, and in how many words there are.

A tile of a product is held in registers while the depth runs by: 8 rows and 32 columns with AVX-512, 6 rows and 16
columns without. Per step of depth it takes one row of b, and one number of a for each row. The right factor is read
in panels of COLUMNS = 16 columns, so that what the inner loop reads of it follows in memory. Every number is summed up
in the order of the depth, whatever the tile. One core comes within a few percent of its peak with it, and nothing has
to leave the cache for a bias, a residual or a gradient to be added.

A matrix is a tuple: its array, the offset of its first number in there, and the stride of its rows. Needs Numba;
imported at first use.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from headcode.jit import njit
from headcode.ops.cpu.factors import (
    MOST_DEPTH,
    emit_product,
    factor_of_tokens,
    in_words,
    left_factor,
    pack_rows,
    pack_transposed,
)
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
    product_kernels,
    stage,
)
from headcode.ops.cpu.records import COLUMNS, LANES
from headcode.ops.cpu.simd import (
    emit_address,
    emit_load,
    emit_prefetch,
    emit_splat,
    emit_store,
    load,
    store,
)
from headcode.ops.cpu.simd_math import add
from headcode.private_api import processor_features

# AVX-512 has 32 registers of 16 numbers, other processors 16 of 8 or as much: half as many sums fit.
TILE_ROWS, TILE_PANELS = (8, 2) if "+avx512f" in processor_features() else (6, 1)


@intrinsic
def _tile(  # type: ignore[no-untyped-def]
    typingctx, c, c_offset, c_row, start, start_offset, start_row,
    a, a_offset, a_row, a_step, b, b_offset, b_row, b_panel, m, n, depth,
):  # fmt: skip
    """c = start + a·b, TILE_ROWS by TILE_PANELS · COLUMNS; `*_row` is the stride of rows, a_step that of a's columns.

    Of fewer rows (m) or columns (n) the last ones are computed several times over, and written with the same numbers:
    tiles of other sizes would have to be compiled too.
    """

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        (
            c, c_offset, c_row, start, start_offset, start_row, a, a_offset, a_row, a_step,
            b, b_offset, b_row, b_panel, m, n, depth,
        ) = arguments  # fmt: skip
        word, vector = ir.IntType(64), ir.VectorType(ir.FloatType(), COLUMNS)

        def first_indices(number: int, available: Any, unit: int) -> list[Any]:
            """0, 1, … of rows or panels, but never beyond the last one that there is."""
            last = builder.sub(builder.sdiv(available, ir.Constant(word, unit)), ir.Constant(word, 1))
            wanted = [ir.Constant(word, i) for i in range(number)]
            return [builder.select(builder.icmp_signed("<", i, last), i, last) for i in wanted]

        rows, panels = first_indices(TILE_ROWS, m, 1), first_indices(TILE_PANELS, n, COLUMNS)
        columns = [builder.mul(panel, ir.Constant(word, COLUMNS)) for panel in panels]

        def addresses(argument: int, array: Any, offset: Any, stride: Any, indices: list[Any]) -> list[Any]:
            first = emit_address(context, builder, signature.args[argument], array, offset)
            return [builder.gep(first, [builder.mul(i, stride)]) for i in indices]

        starts = [
            [builder.gep(row, [column]) for column in columns]
            for row in addresses(3, start, start_offset, start_row, rows)
        ]
        # Until it is written at the end, it has come from wherever it was; a start that is not c is near.
        for row in addresses(0, c, c_offset, c_row, rows):
            for column in columns:
                emit_prefetch(builder, builder.gep(row, [column]))
        left = addresses(6, a, a_offset, a_row, rows)
        right = addresses(10, b, b_offset, b_panel, panels)

        before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        done, column, step = builder.phi(word), builder.phi(word), builder.phi(word)
        totals = [[builder.phi(vector) for _ in panels] for _ in rows]
        values = [emit_load(builder, builder.gep(address, [step]), COLUMNS) for address in right]
        results = []
        for address, row in zip(left, totals, strict=True):
            factor = emit_splat(builder, builder.load(builder.gep(address, [column])), COLUMNS)
            results.append([emit_product(builder, factor, value, t) for value, t in zip(values, row, strict=True)])
        now = builder.add(done, ir.Constant(word, 1))
        carried = [
            (done, ir.Constant(word, 0), now),
            (column, ir.Constant(word, 0), builder.add(column, a_step)),
            (step, ir.Constant(word, 0), builder.add(step, b_row)),
        ]
        for row, result in zip(totals, results, strict=True):
            carried += [(t, ir.Constant(vector, None), r) for t, r in zip(row, result, strict=True)]
        for phi, first, following in carried:
            phi.add_incoming(first, before)
            phi.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", now, depth), loop, after)

        builder.position_at_end(after)
        # All are read before any is written: a row that is there twice must not be added to twice.
        sums = [
            [builder.fadd(result, emit_load(builder, address, COLUMNS)) for result, address in zip(*pair, strict=True)]
            for pair in zip(results, starts, strict=True)
        ]
        for c_address, row in zip(addresses(0, c, c_offset, c_row, rows), sums, strict=True):
            for offset, total in zip(columns, row, strict=True):
                emit_store(builder, total, builder.gep(c_address, [offset]))
        return context.get_dummy_value()

    whole = types.int64
    sides = (c, whole, whole, start, whole, whole, a, whole, whole, whole, b, whole, whole, whole)
    return types.void(*sides, whole, whole, whole), codegen


@stage
def _product(  # type: ignore[no-untyped-def]
    c, c_offset, c_row, start, start_offset, start_row,
    a, a_offset, a_row, a_step, b, b_offset, b_panel, b_row, m, n, depth,
):  # fmt: skip
    """c (m, n) = start + a (m, depth) · b (depth, n), with n a multiple of COLUMNS and the panels of b `b_panel` apart.

    `start` may be c itself, or one row for all with start_row 0. With a_row and a_step exchanged, a is read across.
    """
    for column in range(0, n, TILE_PANELS * COLUMNS):
        panel = b_offset + column // COLUMNS * b_panel
        for row in range(0, m, TILE_ROWS):
            # Not as tuples: taking arrays out of one counts references, for every tile anew.
            _tile(
                c, c_offset + row * c_row + column, c_row, start, start_offset + row * start_row + column, start_row,
                a, a_offset + row * a_row, a_row, a_step, b, panel, b_row, b_panel, m - row, n - column, depth,
            )  # fmt: skip


@stage
def add_product(c, start, a, panels, m, n, depth, space):  # type: ignore[no-untyped-def]
    """c (m, n) = start + a (m, depth) · W (depth, n), for W packed in panels; the others are float32 matrices."""
    panel = COLUMNS * in_words(panels, depth)
    numbers, offset, row = a
    for first in range(0, depth, MOST_DEPTH):
        piece = min(depth - first, MOST_DEPTH)
        left, left_offset, left_row = left_factor(space, numbers, offset + first, row, m, piece)
        begun, begun_offset, begun_row = c if first else start
        _product(
            *c, begun, begun_offset, begun_row, left, left_offset, left_row, 1,
            panels, COLUMNS * in_words(panels, first), panel, COLUMNS, m, n, in_words(panels, piece),
        )  # fmt: skip


@stage
def add_outer(c, c_offset, begun, zeros, a, a_row, b, b_row, m, n, count, space):  # type: ignore[no-untyped-def]
    """c (m, n) += aᵀ b over `count` tokens, or = if it has not begun; a and b have a row per token."""
    depth = in_words(space, count)
    left, left_offset, left_row = factor_of_tokens(space, 0, a, 0, a_row, m, count)
    right, right_offset, right_row = factor_of_tokens(space, depth * left_row, b, 0, b_row, n, count)
    start, start_offset, start_row = (c, c_offset, n) if begun else (zeros, 0, 0)
    _product(
        c, c_offset, n, start, start_offset, start_row, left, left_offset, 1, left_row,
        right, right_offset, COLUMNS, right_row, m, n, depth,
    )  # fmt: skip


@product_kernels
def pack_kernels(address, factors):  # type: ignore[no-untyped-def]
    """Bring float32 weights into panels: see `records.PACKING_JOB`."""
    p, counter = array_at(address, PACKING)[0], array_at(address, WORDS)
    jobs = array_at(address + PACKING.itemsize, PACKING_JOB)
    while True:
        task = fetch_add(counter)
        if task >= p.tasks:
            return
        job = jobs[task]
        source = array_at(job.matrix, SINGLE)
        if job.rows == 1:
            copied = array_at(job.panels, SINGLE)
            for column in range(0, job.columns, LANES):
                no_unroll()
                store(copied, column, load(source, column))
        elif job.depth == 0:
            pack_transposed(array_at(job.panels, factors), source, job.rows, job.columns)
        else:
            pack_rows(array_at(job.panels, factors), source, job.rows, job.columns, job.depth, job.first)


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
