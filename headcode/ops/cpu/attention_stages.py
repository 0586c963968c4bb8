"""Stages that the attention kernels share: factors of pairs, scores, softmax, the mix of values.

A kernel walks over blocks of keys that stay in the cache, and in each over the queries, two at a time: what is loaded
of a key then serves both. A block is packed with the keys innermost, so that every stage runs along them, LANES per
vector. `count` is the number of its keys, rounded up to whole vectors; i is the first of the two queries.

Whatever the heads of a pair share — mask, dropout, the scale of `rms_head` — is one number, the pair's *factor* c: with
raw codes y (the scores, or their softmax) the code is z = c·y, and a pair that must not count has c = 0. Keys that are
masked for every query, and those that fill the last vector, are packed as zeros, whatever they hold.

Buffers of a thread, all one-dimensional. Where vectors of keys are worked on together, they are neighbours: `key` is
(keys in groups of LANES, …, LANES), with what stands in brackets after it in between.

    query, grad, grad_query      rows of the task's queries, see `packing`
    key_tile, value_tile         one block of keys and values: key (head, dim)
    s, grad_s                    key (head, query): scores, then raw codes y, of two queries; their gradient
    mixed, grad_mixed            key (query, dim): Σ_h y v and Σ_h y g of each pair, then what comes of them
    squares, pull                key (query): Σ_h s²; -κ, which couples the heads under `rms_head`
    visible                      (key): 1 where a key may be seen, else 0
    factor, hidden               key (query): c of each pair; what a softmax adds to its score, 0 or -inf

`p` is the launch's ATTENTION record. A kernel is compiled for its norm, value net, numbers and vectors (`kernel`); ROWS
is how many dims are held in registers at once, and widths are padded to a multiple of it.
"""

import math

import numpy as np

from headcode.ops.cpu.kernel import BYTES, NORM, NUMBERS, ROWS, WIDE, array_at, inlined_stage, no_unroll, stage
from headcode.ops.cpu.packing import ask_for, pack_tile
from headcode.ops.cpu.records import CACHE_LINE, LANES, RMS_HEAD, SOFTMAX
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
    lanes_below,
    maximum,
    multiply,
    sqrt,
    subtract,
    where_positive,
)
from headcode.ops.dropout import MASK32, MIX_FACTORS, QUERY_FACTOR


@stage
def task_range(p, task, length):  # type: ignore[no-untyped-def]
    """The batch entries, and the stretch of a length, that a task covers: first, end, first, end."""
    batch = task // p.splits * p.batch_step
    start = task % p.splits * p.length_step
    return batch, min(batch + p.batch_step, p.batch), start, min(start + p.length_step, length)


@inlined_stage
def qk_width(p):  # type: ignore[no-untyped-def]
    """Dims of queries and keys, padded."""
    return p.qk_padded if WIDE else len(ROWS)


@inlined_stage
def v_width(p):  # type: ignore[no-untyped-def]
    """Dims of values, padded."""
    return p.v_padded if WIDE else len(ROWS)


@stage
def buffer(size):  # type: ignore[no-untyped-def]
    """Memory whose vectors do not cross lines of the cache, which would cost every second load."""
    spare = CACHE_LINE // NUMBERS.itemsize
    memory = np.empty(size + spare, NUMBERS.dtype)
    start = -(memory.ctypes.data // NUMBERS.itemsize) % spare
    return memory[start : start + size]


@stage
def fill(numbers, value):  # type: ignore[no-untyped-def]
    """numbers[:] = value, which takes Numba longer to compile."""
    for i in range(len(numbers)):
        numbers[i] = value


@stage
def block_buffers(p):  # type: ignore[no-untyped-def]
    """key_tile, value_tile, s, mixed, squares, visible, factor, hidden."""
    heads, block = p.heads, p.block
    tiles = buffer(heads * qk_width(p) * block), buffer(heads * v_width(p) * block)
    pairs = buffer(2 * heads * block), buffer(2 * v_width(p) * block), buffer(2 * block)
    return tiles + pairs + (buffer(block), buffer(2 * block), buffer(2 * block))


@stage
def pack_block(key_tile, value_tile, visible, p, b, key, with_values, count):  # type: ignore[no-untyped-def]
    """Bring one block of keys, and of values if asked for, into the cache."""
    mask = array_at(p.mask, BYTES)
    for j in range(count):
        no_unroll()
        seen = key + j < p.keys
        if seen and p.mask != 0:
            seen = mask[b * p.mask_batch + (key + j) * p.mask_key] != 0
        visible[j] = 1 if seen else 0
    pack_tile(key_tile, p.k, b, key, p, p.qk_width, qk_width(p), visible, count)
    if with_values:
        pack_tile(value_tile, p.v, b, key, p, p.v_width, v_width(p), visible, count)


@stage
def ask_for_next(p, b, i):  # type: ignore[no-untyped-def]
    """While two queries are worked on, have a share of the next batch entry brought near, if it is a single block."""
    if p.keys <= p.block:
        first, last = i * p.keys // p.queries, (i + 2) * p.keys // p.queries
        ask_for(p.q, b + 1, i, i + 2, p.heads, p.qk_width)
        ask_for(p.k, b + 1, first, last, p.heads, p.qk_width)
        ask_for(p.v, b + 1, first, last, p.heads, p.v_width)
        if p.grad.address != 0:
            ask_for(p.grad, b + 1, i, i + 2, p.heads, p.v_width)


@stage
def num_lanes(p, key):  # type: ignore[no-untyped-def]
    """`count`: the keys of this block, filled up to whole vectors."""
    return min(p.block, (p.keys - key + LANES - 1) // LANES * LANES)


@stage
def first_seeing(p, key, first):  # type: ignore[no-untyped-def]
    """The first query, in steps of two, that sees this block of keys; a single block is always visited."""
    if p.keys > p.block and (p.causal or p.window > 0):
        later = key - p.query_offset - first
        if not p.causal:
            later -= p.window - 1
        return first + max(later, 0) // 2 * 2
    return first


@stage
def end_seeing(p, key, end):  # type: ignore[no-untyped-def]
    """One past the last query that sees this block of keys; a single block is always visited."""
    if p.window > 0 and p.keys > p.block:
        return min(end, key + p.block + p.window - 1 - p.query_offset)
    return end


@inlined_stage
def line(heads, j, h):  # type: ignore[no-untyped-def]
    """Where s has the LANES keys from j on with head h: first those of the first query, then those of the second."""
    return 2 * (j * heads + h * LANES)


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
def _pair_factors(factor, hidden, visible, p, key, i, count):  # type: ignore[no-untyped-def]
    """Factors of two queries with one block of keys, and what a softmax adds, from what is known per key."""
    for second in range(2):
        position = p.query_offset + i + second
        # The partner of an odd last query is not there: with factors 0 it leaves no trace.
        num_seen = count if i + second < p.queries else 0
        if p.causal:
            num_seen = max(min(num_seen, position + 1 - key), 0)
        num_left = 0  # behind by the window
        if p.window > 0:
            num_seen = max(min(num_seen, position + p.window - key), 0)
            num_left = max(position - p.window + 1 - key, 0)
        row = _mix((p.dropout_stream + (position & MASK32) * QUERY_FACTOR) & MASK32)
        for j in range(0, count, LANES):
            no_unroll()
            pair = 2 * j + second * LANES
            seen = multiply(load(visible, j), lanes_below(num_seen - j, NUMBERS))
            if num_left > 0:
                seen = multiply(seen, subtract(constant(NUMBERS, 1.0), lanes_below(num_left - j, NUMBERS)))
            if NORM == SOFTMAX:
                store(hidden, pair, where_positive(seen, constant(NUMBERS, 0.0), constant(NUMBERS, -np.inf)))
            if p.dropout_threshold > 0:
                keep = keep_lanes(row, key + j, p.dropout_threshold, NUMBERS)
                seen = multiply(seen, multiply(keep, constant(NUMBERS, p.keep_scale)))
            store(factor, pair, seen)


@inlined_stage
def pair_scores(s, factor, hidden, visible, p, query, query_row, key_tile, key, i, count):  # type: ignore[no-untyped-def]
    """Factors and scores of two queries, whose rows start at `query_row`."""
    _pair_factors(factor, hidden, visible, p, key, i, count)
    _scores(s, p, query, query_row, key_tile, key, i, count)


@stage
def _scores(s, p, query, query_row, key_tile, key, i, count):  # type: ignore[no-untyped-def]
    """s = q·k + band, of two queries, which are packed with the scale."""
    heads, width, band_step = p.heads, qk_width(p), p.band_step
    band, band_start = array_at(p.band, NUMBERS), band_offset(p, key, i)
    columns = heads * width
    for h in range(heads):
        band_first = band_start + h * p.band_length
        for d in range(0, width, len(ROWS)):
            column = h * width + d
            first = splat_rows(query, query_row + column, ROWS)
            second = splat_rows(query, query_row + columns + column, ROWS)
            for j in range(0, count, LANES):
                no_unroll()
                to = line(heads, j, h)
                if d == 0:
                    a, b = load(band, band_first + j), load(band, band_first - band_step + j)
                else:
                    a, b = load(s, to), load(s, to + LANES)
                keys = load_rows(key_tile, j * columns + column * LANES, ROWS)
                store(s, to, dot_rows(first, keys, a))
                store(s, to + LANES, dot_rows(second, keys, b))


@inlined_stage
def recompute_codes(s, factor, hidden, visible, p, query, query_row, key_tile, b, key, i, count):  # type: ignore[no-untyped-def]
    """Raw codes of two queries in a backward pass: the scores, or their softmax by what the forward pass has saved."""
    pair_scores(s, factor, hidden, visible, p, query, query_row, key_tile, key, i, count)
    if NORM == SOFTMAX:
        softmax_codes(s, p, hidden, b, i, count)


@stage
def statistic_offset(p, b, i, h, second):  # type: ignore[no-untyped-def]
    """Where (batch, head, query) numbers have those of head h of the first or second query."""
    return (b * p.heads + h) * p.queries + i + second


@stage
def num_queries(p, i):  # type: ignore[no-untyped-def]
    """Two, but an odd last query has no partner."""
    return min(2, p.queries - i)


@inlined_stage
def _largest(s, heads, h, second, hidden, count):  # type: ignore[no-untyped-def]
    """The largest score of a head's visible keys."""
    offset = second * LANES
    top = constant(NUMBERS, -np.inf)
    for j in range(0, count, LANES):
        no_unroll()
        top = maximum(add(load(s, line(heads, j, h) + offset), load(hidden, 2 * j + offset)), top)
    return lane_maximum(top)


@stage
def softmax_statistics(s, p, hidden, count, largest, total, start):  # type: ignore[no-untyped-def]
    """Update every head's running maximum and sum of exponentials with one more block of keys, for two queries."""
    heads = p.heads
    for second in range(2):
        offset = second * LANES
        for h in range(heads):
            place = start + second * heads + h
            before = largest[place]
            now = max(_largest(s, heads, h, second, hidden, count), before)
            largest[place] = now
            if now == -np.inf:
                continue
            sums = constant(NUMBERS, 0.0)
            for j in range(0, count, LANES):
                no_unroll()
                score = add(load(s, line(heads, j, h) + offset), load(hidden, 2 * j + offset))
                sums = add(sums, exp(subtract(score, constant(NUMBERS, now))))
            total[place] = total[place] * math.exp(before - now) + lane_sum(sums)


@stage
def log_sum(largest, total):  # type: ignore[no-untyped-def]
    """The log of a sum of exponentials; 0 for a query that sees no key, so that its codes come out as e**-inf = 0."""
    return largest + math.log(total) if total != 0 else 0.0


@stage
def softmax_codes(s, p, hidden, b, i, count):  # type: ignore[no-untyped-def]
    """Scores to codes, in place, given each head's log of the sum of exponentials."""
    heads, saved = p.heads, array_at(p.saved, NUMBERS)
    for second in range(num_queries(p, i)):
        offset = second * LANES
        for h in range(heads):
            shift = constant(NUMBERS, saved[statistic_offset(p, b, i, h, second)])
            for j in range(0, count, LANES):
                no_unroll()
                to = line(heads, j, h) + offset
                store(s, to, exp(subtract(add(load(s, to), load(hidden, 2 * j + offset)), shift)))


@stage
def softmax_whole(s, p, hidden, b, i, count):  # type: ignore[no-untyped-def]
    """Scores to codes, in place, where one block holds all keys; saves the log of each sum of exponentials."""
    heads, saved = p.heads, array_at(p.saved, NUMBERS)
    for second in range(num_queries(p, i)):
        offset = second * LANES
        for h in range(heads):
            largest = _largest(s, heads, h, second, hidden, count)
            # Where no key is seen, any finite shift makes all exponentials 0.
            shift = constant(NUMBERS, largest if largest != -np.inf else 0.0)
            sums = constant(NUMBERS, 0.0)
            for j in range(0, count, LANES):
                no_unroll()
                to = line(heads, j, h) + offset
                power = exp(subtract(add(load(s, to), load(hidden, 2 * j + offset)), shift))
                store(s, to, power)
                sums = add(sums, power)
            total = lane_sum(sums)
            saved[statistic_offset(p, b, i, h, second)] = log_sum(largest, total)
            inverse = constant(NUMBERS, 1 / total if total != 0 else 0.0)
            for j in range(0, count, LANES):
                no_unroll()
                to = line(heads, j, h) + offset
                store(s, to, multiply(load(s, to), inverse))


@stage
def mix_values(mixed, squares, s, p, value_tile, count):  # type: ignore[no-untyped-def]
    """mixed = Σ_h s v and squares = Σ_h s², of two queries and one block of keys."""
    heads, width = p.heads, v_width(p)
    columns = heads * width
    for j in range(0, count, LANES):
        for d in range(0, width, len(ROWS)):
            first, second = zero_rows(NUMBERS, ROWS), zero_rows(NUMBERS, ROWS)
            first_square = second_square = constant(NUMBERS, 0.0)
            for h in range(heads):
                no_unroll()
                a, b = load(s, line(heads, j, h)), load(s, line(heads, j, h) + LANES)
                values = load_rows(value_tile, j * columns + (h * width + d) * LANES, ROWS)
                first, second = muladd_rows(a, values, first), muladd_rows(b, values, second)
                if NORM == RMS_HEAD:
                    first_square, second_square = muladd(a, a, first_square), muladd(b, b, second_square)
            store_rows(mixed, 2 * j * width + d * LANES, first)
            store_rows(mixed, 2 * j * width + (width + d) * LANES, second)
            if NORM == RMS_HEAD and d == 0:
                store(squares, 2 * j, first_square)
                store(squares, 2 * j + LANES, second_square)


@stage
def rms_inverse(square, p):  # type: ignore[no-untyped-def]
    """1 / sqrt(mean over heads of s² + ε) of one vector of pairs, from Σ_h s²."""
    mean = muladd(square, constant(NUMBERS, 1 / p.heads), constant(NUMBERS, p.epsilon))
    return divide(constant(NUMBERS, 1.0), sqrt(mean))
