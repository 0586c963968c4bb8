"""What a call looks like to the fused CPU kernels, and how they bring tensors into their own layout and back.

Rows are (length, head, dim), for queries and their gradients. A tile is one block of keys with the keys innermost, so
that one vector holds 8 keys: (head, dims in groups of n, keys in groups of 8, n, 8). The n vectors that are worked on
together, in registers, are then neighbours in memory, and one pointer serves them all. Widths are padded with zeros to
a multiple of n.
"""

import numpy as np
from numba import carray

from headcode.jit import njit
from headcode.ops.cpu.simd import LANES, constant, load, memory, rolled, store, transpose, transpose_back
from headcode.ops.cpu.simd_math import multiply

# Only `*_kernel` functions are called from Python; the others need no way in from there.
stage = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)

NONE, RMS_HEAD, SOFTMAX = range(3)
LINEAR, DEEP_LINEAR, RELU, GELU, SILU = range(5)

SPEC = np.dtype(
    [
        (name, np.int64)
        for name in (
            # tasks that were taken (stands first), and the address of the table of tensors
            *("counter", "tensors"),
            # shapes: queries, keys and batch entries; widths as given and as padded; keys per block
            *("batch", "heads", "queries", "keys", "qk_width", "v_width", "qk_padded", "v_padded", "block"),
            *("norm", "net", "causal", "query_offset", "threshold", "stream"),
            # the work: tasks, parts per batch entry, batch entries and queries (or keys) per task
            *("tasks", "splits", "batch_step", "length_step"),
            # addresses, 0 where there is nothing, and strides
            *("mask", "mask_batch", "mask_key", "band", "band_step", "band_length"),
            *("saved", "delta", "partial_q", "partial_band"),
        )
    ]
    + [(name, np.float64) for name in ("scale", "keep_scale", "epsilon")]
)
"""A call, as the kernels see it: they get the address of such a record."""

SPECS, WORDS, OCTETS = np.empty(0, SPEC), np.empty(0, np.int64), np.empty(0, np.uint8)
"""Empty arrays, which tell types."""
# What makes a kernel's variants: the type of the numbers, and the rows of dims that are held in registers.
SINGLE, DOUBLE = np.empty(0, np.float32), np.empty(0, np.float64)
TWO, FOUR = (0,) * 2, (0,) * 4

Q, K, V, OUT, GRAD, GRAD_Q, GRAD_K, GRAD_V = range(8)
"""Rows of the kernels' table of tensors: an address, then the strides of batch, head, length and dim."""

ANYWHERE = 2**48


@stage
def array_at(address, like):  # type: ignore[no-untyped-def]
    """The memory from an address on, as an array of like's type whose end nobody checks."""
    return carray(memory(address, like), ANYWHERE)


@stage
def table_at(address):  # type: ignore[no-untyped-def]
    """The table of a call's tensors."""
    return carray(memory(address, WORDS), (8, 5))


@stage
def task_range(p, task, length):  # type: ignore[no-untyped-def]
    """The batch entries, and the part of a length, that a task covers: first, end, first, end."""
    batch = task // p.splits * p.batch_step
    start = task % p.splits * p.length_step
    return batch, min(batch + p.batch_step, p.batch), start, min(start + p.length_step, length)


@stage
def _joined(tensor, heads, width, padded):  # type: ignore[no-untyped-def]
    """Whether the heads of a token lie side by side, as in a fused projection, and fill whole vectors."""
    return tensor[4] == 1 and tensor[2] == width and padded == width and heads * width % LANES == 0


@stage
def pack_rows(target, tensor, b, first, last, heads, width, padded, scale):  # type: ignore[no-untyped-def]
    """Rows first … last-1 of batch entry b, times a scale."""
    source = array_at(tensor[0], target)
    scale = target.dtype.type(scale)
    place = 0
    joined = _joined(tensor, heads, width, padded)
    for t in range(first, last):
        start = b * tensor[1] + t * tensor[3]
        if joined:
            for d in range(0, heads * width, LANES):
                rolled()
                store(target, place + d, multiply(load(source, start + d), constant(target, scale)))
            place += heads * width
            continue
        for h in range(heads):
            for d in range(padded):
                rolled()
                target[place + d] = source[start + h * tensor[2] + d * tensor[4]] * scale if d < width else 0
            place += padded


@stage
def unpack_rows(tensor, source, b, first, last, heads, width, padded, scale):  # type: ignore[no-untyped-def]
    """The other way, times a scale."""
    target = array_at(tensor[0], source)
    scale = source.dtype.type(scale)
    place = 0
    joined = _joined(tensor, heads, width, padded)
    for t in range(first, last):
        start = b * tensor[1] + t * tensor[3]
        if joined:
            for d in range(0, heads * width, LANES):
                rolled()
                store(target, start + d, multiply(load(source, place + d), constant(source, scale)))
            place += heads * width
            continue
        for h in range(heads):
            for d in range(width):
                rolled()
                target[start + h * tensor[2] + d * tensor[4]] = source[place + d] * scale
            place += padded


@stage
def place_in_tile(column, j, block, n):  # type: ignore[no-untyped-def]
    """Where a tile has key j of a column h·D + d: columns go in groups of n, whose vectors of keys take turns."""
    return column // n * n * block + j // LANES * LANES * n + column % n * LANES + j % LANES


@stage
def pack_tile(target, tensor, b, key, p, width, padded, visible, like):  # type: ignore[no-untyped-def]
    """The block of keys from `key` on; zero for padding dims, for keys past the end and for masked keys."""
    source = array_at(tensor[0], target)
    block, step, n = p.block, tensor[3], len(like)
    count = min(p.keys - key, block)
    base = b * tensor[1] + key * step
    done = 0
    if _joined(tensor, p.heads, width, padded):
        done = count // LANES * LANES
        for j in range(0, done, LANES):
            for d in range(0, p.heads * width, LANES):
                rolled()
                transpose(source, base + j * step + d, step, target, d * block + j * n, n * block, like)
    for h in range(p.heads):
        for d in range(padded):
            start = base + h * tensor[2] + d * tensor[4]
            column = h * padded + d
            for j in range(done, block):
                rolled()
                value = source[start + j * step] if d < width and j < count else 0
                target[place_in_tile(column, j, block, n)] = value
            if p.mask != 0:
                for j in range(count):
                    rolled()
                    if visible[j] == 0:
                        target[place_in_tile(column, j, block, n)] = 0


@stage
def unpack_tile(tensor, source, b, key, p, width, padded, like):  # type: ignore[no-untyped-def]
    """The other way."""
    target = array_at(tensor[0], source)
    block, step, n = p.block, tensor[3], len(like)
    count = min(p.keys - key, block)
    base = b * tensor[1] + key * step
    done = 0
    if _joined(tensor, p.heads, width, padded):
        done = count // LANES * LANES
        for j in range(0, done, LANES):
            for d in range(0, p.heads * width, LANES):
                rolled()
                transpose_back(source, d * block + j * n, n * block, target, base + j * step + d, step, like)
    for h in range(p.heads):
        for d in range(width):
            start = base + h * tensor[2] + d * tensor[4]
            for j in range(done, count):
                rolled()
                target[start + j * step] = source[place_in_tile(h * padded + d, j, block, n)]


@njit()
def sum_parts_kernel(parts):  # type: ignore[no-untyped-def]
    """parts[0] += parts[1] + parts[2] + …, in this order."""
    total = parts[0]
    for i in range(1, parts.shape[0]):
        part = parts[i]
        for j in range(total.size):
            total[j] += part[j]
