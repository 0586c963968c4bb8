"""Stages that the attention kernels share: factors of pairs, scores, softmax, the mix of values.

A kernel walks over blocks of keys that stay in the cache, and in each over the queries, two at a time: what is loaded
of a key then serves both. A block is packed with the keys innermost, so that every stage runs along them, LANES per
vector. `count` is the number of its keys, rounded up to whole vectors; i is the first of the two queries.

Whatever the heads of a pair share — mask, dropout, the scale of `rms_head` — is one number, the pair's *factor* c: with
raw codes y (the scores, or their softmax) the code is z = c·y, and a pair that must not count has c = 0. Keys that are
masked for every query, and those that fill the last block, are packed as zeros, whatever they hold.

Buffers of a thread, all one-dimensional:

    query, grad, grad_query      rows of the task's queries, see `packing`
    key_tile, value_tile         one block of keys and values
    s, grad_s                    (2, head, key): scores, then raw codes y, of two queries; their gradient
    mixed, grad_mixed            two tiles of (dim, key): Σ_h y v and Σ_h y g of each pair, then what comes of them
    squares, pull                (2, key): Σ_h s²; -κ, which couples the heads under `rms_head`
    visible, key_hidden          (key): 1 and 0 where a key may be seen, else 0 and -inf
    factor, hidden               (2, key): c of each pair; what a softmax adds to its score, 0 or -inf

`p` is the launch's ATTENTION record. `like` is a tuple whose length n is the number of dims held in registers at once.
"""

import math

import numpy as np

from headcode.ops.cpu.kernel import BYTES, array_at, inlined_stage, no_unroll, stage
from headcode.ops.cpu.packing import pack_tile
from headcode.ops.cpu.records import LANES, SOFTMAX
from headcode.ops.cpu.simd import (
    constant,
    dot_rows,
    load,
    load_rows,
    muladd,
    muladd_rows,
    splat_rows,
    store,
    store_rows,
    zero_rows,
)
from headcode.ops.cpu.simd_math import (
    add,
    divide,
    exp,
    keep_lanes,
    lane_maximum,
    lane_sum,
    maximum,
    multiply,
    sqrt,
    subtract,
)
from headcode.ops.dropout import MASK32, MIX_FACTORS, QUERY_FACTOR


@stage
def task_range(p, task, length):  # type: ignore[no-untyped-def]
    """The batch entries, and the stretch of a length, that a task covers: first, end, first, end."""
    batch = task // p.splits * p.batch_step
    start = task % p.splits * p.length_step
    return batch, min(batch + p.batch_step, p.batch), start, min(start + p.length_step, length)


@stage
def block_buffers(p, numbers):  # type: ignore[no-untyped-def]
    """key_tile, value_tile, s, mixed, squares, visible, key_hidden, factor, hidden."""
    heads, block, dtype = p.heads, p.block, numbers.dtype
    tiles = np.empty(heads * p.qk_padded * block, dtype), np.empty(heads * p.v_padded * block, dtype)
    pairs = np.empty(2 * heads * block, dtype), np.empty(2 * p.v_padded * block, dtype), np.empty(2 * block, dtype)
    masks = np.empty(block, dtype), np.empty(block, dtype), np.empty(2 * block, dtype), np.empty(2 * block, dtype)
    return tiles + pairs + masks


@stage
def pack_block(key_tile, value_tile, visible, key_hidden, p, b, key, with_values, like):  # type: ignore[no-untyped-def]
    """Bring one block of keys, and of values if asked for, into the cache."""
    mask = array_at(p.mask, BYTES)
    for j in range(p.block):
        no_unroll()
        seen = key + j < p.keys
        if seen and p.mask != 0:
            seen = mask[b * p.mask_batch + (key + j) * p.mask_key] != 0
        visible[j] = 1 if seen else 0
        key_hidden[j] = 0 if seen else -np.inf
    pack_tile(key_tile, p.k, b, key, p, p.qk_width, p.qk_padded, visible, like)
    if with_values:
        pack_tile(value_tile, p.v, b, key, p, p.v_width, p.v_padded, visible, like)


@stage
def num_lanes(p, key):  # type: ignore[no-untyped-def]
    """`count`: the keys of this block, filled up to whole vectors."""
    return min(p.block, (p.keys - key + LANES - 1) // LANES * LANES)


@stage
def first_seeing(p, key, first):  # type: ignore[no-untyped-def]
    """The first query, in steps of two, that sees this block of keys; a single block is always visited."""
    if p.causal and key > p.query_offset + first and p.keys > p.block:
        return first + (key - p.query_offset - first) // 2 * 2
    return first


@stage
def band_offset(p, key, i):  # type: ignore[no-untyped-def]
    """Where the band's entry of (query i, key) stands; one entry before the band belongs to an odd query's partner."""
    return (key - i + p.queries) * p.band_step


@stage
def _mix(x):  # type: ignore[no-untyped-def]
    x = ((x ^ (x >> 16)) * MIX_FACTORS[0]) & MASK32
    x = ((x ^ (x >> 15)) * MIX_FACTORS[1]) & MASK32
    return x ^ (x >> 16)


@stage
def _pair_factors(factor, hidden, visible, key_hidden, p, key, i, count):  # type: ignore[no-untyped-def]
    """Factors of two queries with one block of keys, and what a softmax adds, from what is known per key."""
    for second in range(2):
        offset = second * p.block
        position = p.query_offset + i + second
        # The partner of an odd last query is not there: with factors 0 it leaves no trace.
        num_seen = count if i + second < p.queries else 0
        if p.causal:
            num_seen = max(min(num_seen, position + 1 - key), 0)
        row = _mix((p.dropout_stream + (position & MASK32) * QUERY_FACTOR) & MASK32)
        for j in range(0, count, LANES):
            no_unroll()
            seen = load(visible, j)
            if p.dropout_threshold > 0:
                keep = keep_lanes(row, key + j, p.dropout_threshold, factor)
                seen = multiply(seen, multiply(keep, constant(factor, p.keep_scale)))
            store(factor, offset + j, seen)
            store(hidden, offset + j, load(key_hidden, j))
        for j in range(num_seen, count):
            no_unroll()
            factor[offset + j] = 0
            hidden[offset + j] = -np.inf


@inlined_stage
def pair_scores(  # type: ignore[no-untyped-def]
    s, factor, hidden, visible, key_hidden, p, query, query_row, key_tile, key, i, count, like
):
    """Factors and scores of two queries, whose rows start at `query_row`."""
    _pair_factors(factor, hidden, visible, key_hidden, p, key, i, count)
    _scores(s, p, query, query_row, key_tile, key, i, count, like)


@stage
def _scores(s, p, query, query_row, key_tile, key, i, count, like):  # type: ignore[no-untyped-def]
    """s = q·k + band, of two queries, which are packed with the scale."""
    heads, width, block, band_length = p.heads, p.qk_padded, p.block, p.band_length
    band, band_start = array_at(p.band, s), band_offset(p, key, i)
    n = len(like)
    row, other = heads * width, heads * block
    for h in range(heads):
        for d in range(0, width, n):
            first = splat_rows(query, query_row + h * width + d, like)
            second = splat_rows(query, query_row + row + h * width + d, like)
            start = s if d > 0 else band
            start_first = h * block if d > 0 else band_start + h * band_length
            start_second = start_first + other if d > 0 else start_first - p.band_step
            rows = (h * width + d) * block
            for j in range(0, count, LANES):
                no_unroll()
                keys = load_rows(key_tile, rows + j * n, like)
                store(s, h * block + j, dot_rows(first, keys, load(start, start_first + j)))
                store(s, other + h * block + j, dot_rows(second, keys, load(start, start_second + j)))


@inlined_stage
def recompute_codes(  # type: ignore[no-untyped-def]
    s, factor, hidden, visible, key_hidden, p, query, query_row, key_tile, b, key, i, count, like
):
    """Raw codes of two queries in a backward pass: the scores, or their softmax by what the forward pass has saved."""
    pair_scores(s, factor, hidden, visible, key_hidden, p, query, query_row, key_tile, key, i, count, like)
    if p.norm == SOFTMAX:
        softmax_codes(s, p, hidden, b, i, count)


@stage
def statistic_offset(p, b, i, line):  # type: ignore[no-untyped-def]
    """Where (batch, head, query) numbers have those of line `head`, or of line `heads + head` for the second query."""
    second = line // p.heads
    return (b * p.heads + line - second * p.heads) * p.queries + i + second


@stage
def num_lines(p, i):  # type: ignore[no-untyped-def]
    """Lines of s that belong to queries: an odd last one has no partner."""
    return min(2, p.queries - i) * p.heads


@inlined_stage
def _largest(s, line, hidden, pair, count):  # type: ignore[no-untyped-def]
    """The largest score that a line of s holds of visible keys."""
    top = add(load(s, line), load(hidden, pair))
    for j in range(LANES, count, LANES):
        no_unroll()
        top = maximum(add(load(s, line + j), load(hidden, pair + j)), top)
    return lane_maximum(top)


@stage
def softmax_statistics(s, p, hidden, count, largest, total, offset):  # type: ignore[no-untyped-def]
    """Update every head's running maximum and sum of exponentials with one more block of keys, for two queries."""
    for row in range(2 * p.heads):
        line, pair = row * p.block, row // p.heads * p.block
        before = largest[offset + row]
        now = max(_largest(s, line, hidden, pair, count), before)
        largest[offset + row] = now
        if now == -np.inf:
            continue
        sums = constant(s, 0.0)
        for j in range(0, count, LANES):
            no_unroll()
            score = add(load(s, line + j), load(hidden, pair + j))
            sums = add(sums, exp(subtract(score, constant(s, now))))
        total[offset + row] = total[offset + row] * math.exp(before - now) + lane_sum(sums)


@stage
def log_sum(largest, total):  # type: ignore[no-untyped-def]
    """The log of a sum of exponentials; 0 for a query that sees no key, so that its codes come out as e**-inf = 0."""
    return largest + math.log(total) if total != 0 else 0.0


@stage
def softmax_codes(s, p, hidden, b, i, count):  # type: ignore[no-untyped-def]
    """Scores to codes, in place, given each head's log of the sum of exponentials."""
    saved = array_at(p.saved, s)
    for row in range(num_lines(p, i)):
        line, pair = row * p.block, row // p.heads * p.block
        shift = constant(s, saved[statistic_offset(p, b, i, row)])
        for j in range(0, count, LANES):
            no_unroll()
            score = add(load(s, line + j), load(hidden, pair + j))
            store(s, line + j, exp(subtract(score, shift)))


@stage
def softmax_whole(s, p, hidden, b, i, count):  # type: ignore[no-untyped-def]
    """Scores to codes, in place, where one block holds all keys; saves the log of each sum of exponentials."""
    saved = array_at(p.saved, s)
    for row in range(num_lines(p, i)):
        line, pair = row * p.block, row // p.heads * p.block
        largest = _largest(s, line, hidden, pair, count)
        # Where no key is seen, any finite shift makes all exponentials 0.
        shift = constant(s, largest if largest != -np.inf else 0.0)
        sums = constant(s, 0.0)
        for j in range(0, count, LANES):
            no_unroll()
            power = exp(subtract(add(load(s, line + j), load(hidden, pair + j)), shift))
            store(s, line + j, power)
            sums = add(sums, power)
        total = lane_sum(sums)
        saved[statistic_offset(p, b, i, row)] = log_sum(largest, total)
        inverse = constant(s, 1 / total if total != 0 else 0.0)
        for j in range(0, count, LANES):
            no_unroll()
            store(s, line + j, multiply(load(s, line + j), inverse))


@stage
def mix_values(mixed, squares, s, p, value_tile, count, like):  # type: ignore[no-untyped-def]
    """mixed = Σ_h s v and squares = Σ_h s², of two queries and one block of keys."""
    heads, width, block = p.heads, p.v_padded, p.block
    n = len(like)
    other = heads * block
    for d in range(0, width, n):
        for j in range(0, count, LANES):
            first, second = zero_rows(s, like), zero_rows(s, like)
            first_square = second_square = constant(s, 0.0)
            for h in range(heads):
                no_unroll()
                a, b = load(s, h * block + j), load(s, other + h * block + j)
                values = load_rows(value_tile, (h * width + d) * block + j * n, like)
                first, second = muladd_rows(a, values, first), muladd_rows(b, values, second)
                first_square, second_square = muladd(a, a, first_square), muladd(b, b, second_square)
            store_rows(mixed, d * block + j * n, first)
            store_rows(mixed, (width + d) * block + j * n, second)
            store(squares, j, first_square)
            store(squares, block + j, second_square)


@stage
def rms_inverse(square, p, like):  # type: ignore[no-untyped-def]
    """1 / sqrt(mean over heads of s² + ε) of one vector of pairs, from Σ_h s²."""
    mean = muladd(square, constant(like, 1 / p.heads), constant(like, p.epsilon))
    return divide(constant(like, 1.0), sqrt(mean))
