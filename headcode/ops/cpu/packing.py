"""How the attention kernels bring tensors (batch, head, length, dim) into their own layouts, and back.

Rows are (length, head, dim), for queries and their gradients. A tile is one block of keys with the keys innermost, so
that one vector holds LANES keys: (keys in groups of LANES, head, dim, LANES). The vectors that are worked on together
are then neighbours in memory, and one pointer serves them all. Widths are padded with zeros to a multiple of n, the
length of ROWS.
"""

from headcode.ops.cpu.kernel import NUMBERS, ROWS, array_at, no_unroll, stage
from headcode.ops.cpu.records import CACHE_LINE, LANES
from headcode.ops.cpu.simd import constant, load, load_rows, prefetch, store, store_rows
from headcode.ops.cpu.simd_math import multiply, where_positive
from headcode.ops.cpu.simd_shuffles import copy_numbers, load_apart, store_apart, transpose, transpose_back


@stage
def _layout(tensor, heads, width, padded):  # type: ignore[no-untyped-def]
    """Runs of columns h·D + d that lie side by side: how many, how long, and whether each is whole squares.

    The heads of a token lie side by side in a fused projection; otherwise a run is one head.
    """
    plain = tensor.dim == 1 and width == padded
    if plain and tensor.head == width and heads * width % LANES == 0:
        return 1, heads * width, True
    return heads, width, plain and width % LANES == 0


@stage
def ask_for(tensor, b, first, last, heads, width):  # type: ignore[no-untyped-def]
    """Have tokens first … last-1 of batch entry b brought near; there need not be any."""
    numbers = array_at(tensor.address, NUMBERS)
    in_line = CACHE_LINE // NUMBERS.itemsize
    step = in_line if tensor.head == width else max(tensor.head, 1)
    for t in range(first, last, max(in_line // max(tensor.length, 1), 1)):
        start = b * tensor.batch + t * tensor.length
        for offset in range(start, start + heads * tensor.head, step):
            no_unroll()
            prefetch(numbers, offset)


@stage
def pack_rows(target, tensor, b, first, last, heads, width, padded, scale):  # type: ignore[no-untyped-def]
    """Rows first … last-1 of batch entry b, times a scale, to target (rows, head, padded), whose padding stays 0."""
    source, scale = array_at(tensor.address, NUMBERS), target.dtype.type(scale)
    num_runs, run, in_vectors = _layout(tensor, heads, width, padded)
    whole = tensor.dim == 1 and width % len(ROWS) == 0
    for t in range(first, last):
        for h in range(num_runs):
            packed = ((t - first) * heads + h) * padded
            given = b * tensor.batch + t * tensor.length + h * tensor.head
            if in_vectors:
                for d in range(0, run, LANES):
                    no_unroll()
                    store(target, packed + d, multiply(load(source, given + d), constant(NUMBERS, scale)))
            elif whole:
                for d in range(0, width, len(ROWS)):
                    no_unroll()
                    copy_numbers(target, packed + d, source, given + d, scale, ROWS)
            else:
                for d in range(width):
                    no_unroll()
                    target[packed + d] = source[given + d * tensor.dim] * scale


@stage
def unpack_rows(tensor, source, b, first, last, heads, width, padded, scale):  # type: ignore[no-untyped-def]
    """The other way, times a scale."""
    target, scale = array_at(tensor.address, NUMBERS), source.dtype.type(scale)
    num_runs, run, in_vectors = _layout(tensor, heads, width, padded)
    whole = tensor.dim == 1 and width % len(ROWS) == 0
    for t in range(first, last):
        for h in range(num_runs):
            packed = ((t - first) * heads + h) * padded
            given = b * tensor.batch + t * tensor.length + h * tensor.head
            if in_vectors:
                for d in range(0, run, LANES):
                    no_unroll()
                    store(target, given + d, multiply(load(source, packed + d), constant(NUMBERS, scale)))
            elif whole:
                for d in range(0, width, len(ROWS)):
                    no_unroll()
                    copy_numbers(target, given + d, source, packed + d, scale, ROWS)
            else:
                for d in range(width):
                    no_unroll()
                    target[given + d * tensor.dim] = source[packed + d] * scale


@stage
def pack_tile(target, tensor, b, key, p, width, padded, visible, count):  # type: ignore[no-untyped-def]
    """`count` keys from `key` on; zero for padding dims, for keys past the end and for masked keys."""
    source = array_at(tensor.address, NUMBERS)
    step, columns = tensor.length, p.heads * padded
    num_runs, run, in_squares = _layout(tensor, p.heads, width, padded)
    # Without anything between them, all numbers of a head's keys follow each other.
    in_one = tensor.dim == 1 and step == width == padded == len(ROWS)
    for j in range(0, count, LANES):
        num_there = min(p.keys - key - j, LANES)
        base, tile = b * tensor.batch + (key + j) * step, j * columns
        for part in range(num_runs):
            given, packed = base + part * tensor.head, tile + part * padded * LANES
            if in_squares:
                for d in range(0, run, LANES):
                    no_unroll()
                    transpose(source, given + d, step, target, packed + d * LANES, LANES, num_there - 1)
            elif in_one:
                store_rows(target, packed, load_apart(source, given, num_there * len(ROWS), ROWS))
            else:
                for d in range(padded):
                    for lane in range(LANES):
                        no_unroll()
                        is_there = d < width and lane < num_there
                        value = source[given + lane * step + d * tensor.dim] if is_there else 0
                        target[packed + d * LANES + lane] = value
        if p.mask != 0 or num_there < LANES:
            seen, zero = load(visible, j), constant(NUMBERS, 0.0)
            for vector in range(tile, tile + columns * LANES, LANES):
                no_unroll()
                store(target, vector, where_positive(seen, load(target, vector), zero))


@stage
def unpack_tile(tensor, source, b, key, p, width, padded, count):  # type: ignore[no-untyped-def]
    """The other way, without padding."""
    target = array_at(tensor.address, NUMBERS)
    step, columns = tensor.length, p.heads * padded
    num_runs, run, in_squares = _layout(tensor, p.heads, width, padded)
    in_one = tensor.dim == 1 and step == width == padded == len(ROWS)
    for j in range(0, count, LANES):
        num_there = min(p.keys - key - j, LANES)
        base = b * tensor.batch + (key + j) * step
        for part in range(num_runs):
            given, packed = base + part * tensor.head, j * columns + part * padded * LANES
            if in_squares:
                for d in range(0, run, LANES):
                    no_unroll()
                    transpose_back(source, packed + d * LANES, LANES, target, given + d, step, num_there - 1)
            elif in_one:
                store_apart(target, given, num_there * len(ROWS), load_rows(source, packed, ROWS))
            else:
                for d in range(width):
                    for lane in range(num_there):
                        no_unroll()
                        target[given + lane * step + d * tensor.dim] = source[packed + d * LANES + lane]
