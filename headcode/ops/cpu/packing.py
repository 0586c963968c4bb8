"""How the attention kernels bring tensors (batch, head, length, dim) into their own layouts, and back.

Rows are (length, head, dim), for queries and their gradients. A tile is one block of keys with the keys innermost, so
that one vector holds LANES keys: (head, dims in groups of n, keys in groups of LANES, n, LANES). The n vectors that are
worked on together, in registers, are then neighbours in memory, and one pointer serves them all. Widths are padded
with zeros to a multiple of n = len(like).
"""

from headcode.ops.cpu.kernel import array_at, no_unroll, stage
from headcode.ops.cpu.records import LANES
from headcode.ops.cpu.simd import constant, load, store, transpose, transpose_back
from headcode.ops.cpu.simd_math import multiply


@stage
def _joined(tensor, heads, width, padded):  # type: ignore[no-untyped-def]
    """Whether the heads of a token lie side by side, as in a fused projection, and fill whole vectors."""
    return tensor.dim == 1 and tensor.head == width and padded == width and heads * width % LANES == 0


@stage
def _copy_row(  # type: ignore[no-untyped-def]
    target,
    target_offset,
    target_head,
    target_dim,
    source,
    source_offset,
    source_head,
    source_dim,
    heads,
    width,
    joined,
    scale,
):
    """One row (head, dim) times a scale; `*_head` and `*_dim` are strides."""
    if joined:
        for d in range(0, heads * width, LANES):
            no_unroll()
            vector = multiply(load(source, source_offset + d), constant(target, scale))
            store(target, target_offset + d, vector)
        return
    for h in range(heads):
        for d in range(width):
            no_unroll()
            value = source[source_offset + h * source_head + d * source_dim] * scale
            target[target_offset + h * target_head + d * target_dim] = value


@stage
def pack_rows(target, tensor, b, first, last, heads, width, padded, scale):  # type: ignore[no-untyped-def]
    """Rows first … last-1 of batch entry b, times a scale, to target (rows, head, padded), whose padding stays 0."""
    source, scale = array_at(tensor.address, target), target.dtype.type(scale)
    joined = _joined(tensor, heads, width, padded)
    for t in range(first, last):
        packed, given = (t - first) * heads * padded, b * tensor.batch + t * tensor.length
        _copy_row(target, packed, padded, 1, source, given, tensor.head, tensor.dim, heads, width, joined, scale)


@stage
def unpack_rows(tensor, source, b, first, last, heads, width, padded, scale):  # type: ignore[no-untyped-def]
    """The other way, times a scale."""
    target, scale = array_at(tensor.address, source), source.dtype.type(scale)
    joined = _joined(tensor, heads, width, padded)
    for t in range(first, last):
        packed, given = (t - first) * heads * padded, b * tensor.batch + t * tensor.length
        _copy_row(target, given, tensor.head, tensor.dim, source, packed, padded, 1, heads, width, joined, scale)


@stage
def tile_offset(column, j, block, n):  # type: ignore[no-untyped-def]
    """Where a tile has key j of a column h·D + d: columns go in groups of n, whose vectors of keys take turns."""
    return column // n * n * block + j // LANES * LANES * n + column % n * LANES + j % LANES


@stage
def _keys_of_block(tensor, b, key, p, width, padded):  # type: ignore[no-untyped-def]
    """How many keys a block has, the offset of the first, and how many of them can be transposed in whole squares."""
    count = min(p.keys - key, p.block)
    num_joined = count // LANES * LANES if _joined(tensor, p.heads, width, padded) else 0
    return count, b * tensor.batch + key * tensor.length, num_joined


@stage
def pack_tile(target, tensor, b, key, p, width, padded, visible, like):  # type: ignore[no-untyped-def]
    """The block of keys from `key` on; zero for padding dims, for keys past the end and for masked keys."""
    source = array_at(tensor.address, target)
    block, step, n = p.block, tensor.length, len(like)
    count, base, num_joined = _keys_of_block(tensor, b, key, p, width, padded)
    for j in range(0, num_joined, LANES):
        for d in range(0, p.heads * width, LANES):
            no_unroll()
            transpose(source, base + j * step + d, step, target, d * block + j * n, n * block, like)
    for column in range(p.heads * padded):
        h, d = column // padded, column % padded
        start = base + h * tensor.head + d * tensor.dim
        for j in range(num_joined, block):
            no_unroll()
            value = source[start + j * step] if d < width and j < count else 0
            target[tile_offset(column, j, block, n)] = value
        if p.mask != 0:
            for j in range(count):
                no_unroll()
                if visible[j] == 0:
                    target[tile_offset(column, j, block, n)] = 0


@stage
def unpack_tile(tensor, source, b, key, p, width, padded, like):  # type: ignore[no-untyped-def]
    """The other way, without padding."""
    target = array_at(tensor.address, source)
    block, step, n = p.block, tensor.length, len(like)
    count, base, num_joined = _keys_of_block(tensor, b, key, p, width, padded)
    for j in range(0, num_joined, LANES):
        for d in range(0, p.heads * width, LANES):
            no_unroll()
            transpose_back(source, d * block + j * n, n * block, target, base + j * step + d, step, like)
    for h in range(p.heads):
        for d in range(width):
            start = base + h * tensor.head + d * tensor.dim
            for j in range(num_joined, count):
                no_unroll()
                target[start + j * step] = source[tile_offset(h * padded + d, j, block, n)]
