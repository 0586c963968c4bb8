"""Stages of the fused CPU kernels: factors of pairs, scores, softmax, hidden layers.

One task of a kernel walks over blocks of keys that stay in the cache, and in each over the queries. A block of keys
is packed with the keys innermost, (head, dim, key), so that one vector holds 8 keys and every stage runs along them.
Everything that is shared by the heads of a pair — mask, dropout, the scale of `rms_head` — is one number per pair, its
*factor* c: with raw codes y (the scores, or their softmax) the code is z = c·y, and a pair that must not count has c = 0.
Keys that are masked for every query, and those that fill the last block, are packed as zeros, whatever they hold.

`like` is a tuple whose length is the number of rows (dims) that are held in registers at once; widths are padded to
a multiple of it.
"""

import math

import numpy as np

from headcode.jit import njit
from headcode.ops._simd import (
    LANES,
    add,
    constant,
    divide,
    dot_rows,
    exp,
    keep_lanes,
    lane_maximum,
    lane_sum,
    load,
    load_rows,
    maximum,
    muladd,
    muladd_rows,
    multiply,
    splat_rows,
    sqrt,
    store,
    store_rows,
    subtract,
    where_positive,
    zero_rows,
)
from headcode.ops._cpu_packing import GELU, RELU, SILU, array_at
from headcode.ops.dropout import MASK32, MIX_FACTORS, QUERY_FACTOR

GELU_SLOPE = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715


@njit()
def fill_visible(visible, hidden, p, b, key, octets):  # type: ignore[no-untyped-def]
    """Per key of a block: `visible` 1 or 0, and `hidden`, which is added to the scores of a softmax, 0 or -inf."""
    mask = array_at(p.mask, octets)
    for j in range(p.block):
        seen = key + j < p.keys
        if seen and p.mask != 0:
            seen = mask[b * p.mask_batch + (key + j) * p.mask_key] != 0
        visible[j] = 1 if seen else 0
        hidden[j] = 0 if seen else -np.inf


@njit()
def first_seeing(p, key, first):  # type: ignore[no-untyped-def]
    """The first query, in steps of two, that sees this block of keys."""
    if p.causal and key > p.query_offset + first and p.keys > p.block:
        return first + (key - p.query_offset - first) // 2 * 2
    return first


@njit()
def band_start(p, key, i):  # type: ignore[no-untyped-def]
    """Where the band's entry of (query i, key) stands; one entry before the band belongs to an odd query's partner."""
    return (key - i + p.queries) * p.band_step


@njit()
def _mix(x):  # type: ignore[no-untyped-def]
    x = ((x ^ (x >> 16)) * MIX_FACTORS[0]) & MASK32
    x = ((x ^ (x >> 15)) * MIX_FACTORS[1]) & MASK32
    return x ^ (x >> 16)


@njit()
def dropout_row(p, position):  # type: ignore[no-untyped-def]
    """The hash of a query's row, see `ops.dropout`."""
    return _mix((p.stream + (position & MASK32) * QUERY_FACTOR) & MASK32)


@njit()
def pair_factors(factor, hidden, place, visible, key_hidden, p, key, count, i):  # type: ignore[no-untyped-def]
    """Factors, and what a softmax adds, of query i and one block of keys, from what is known per key."""
    if i >= p.queries:
        # The partner of an odd last query is not there: with factors 0 it leaves no trace.
        for j in range(0, count, LANES):
            store(factor, place + j, constant(factor, 0.0))
            store(hidden, place + j, constant(factor, -np.inf))
        return
    position = p.query_offset + i
    if p.threshold > 0:
        row = dropout_row(p, position)
        for j in range(0, count, LANES):
            keep = multiply(keep_lanes(row, key + j, p.threshold, factor), constant(factor, p.keep_scale))
            store(factor, place + j, multiply(load(visible, j), keep))
            store(hidden, place + j, load(key_hidden, j))
    else:
        for j in range(0, count, LANES):
            store(factor, place + j, load(visible, j))
            store(hidden, place + j, load(key_hidden, j))
    if p.causal and key + count - 1 > position:
        for j in range(max(position + 1 - key, 0), count):
            factor[place + j] = 0
            hidden[place + j] = -np.inf


@njit()
def scores(s, p, query, place, tile, band, band_place, count, like):  # type: ignore[no-untyped-def]
    """s[query, h, key] of two queries and one block of keys; queries are packed with the scale in them."""
    heads, width, block, band_length = p.heads, p.qk_padded, p.block, p.band_length
    row = heads * width
    other = heads * block
    for h in range(heads):
        for d in range(0, width, len(like)):
            first = splat_rows(query, place + h * width + d, like)
            second = splat_rows(query, place + row + h * width + d, like)
            start = s if d > 0 else band
            start_first = h * block if d > 0 else band_place + h * band_length
            start_second = start_first + other if d > 0 else start_first - p.band_step
            rows = (h * width + d) * block
            for j in range(0, count, LANES):
                keys = load_rows(tile, rows + j, block, like)
                store(s, h * block + j, dot_rows(first, keys, load(start, start_first + j)))
                store(s, other + h * block + j, dot_rows(second, keys, load(start, start_second + j)))


@njit()
def softmax_statistics(s, start, p, hidden, hidden_place, count, largest, total, place):  # type: ignore[no-untyped-def]
    """Update every head's running maximum and sum of exponentials with one more block of keys."""
    for h in range(p.heads):
        top = load(hidden, hidden_place)
        top = add(top, load(s, start + h * p.block))
        for j in range(LANES, count, LANES):
            top = maximum(add(load(s, start + h * p.block + j), load(hidden, hidden_place + j)), top)
        before = largest[place + h]
        now = max(lane_maximum(top), before)
        largest[place + h] = now
        if now == -np.inf:
            continue
        shift = constant(s, now)
        sums = constant(s, 0.0)
        for j in range(0, count, LANES):
            score = add(load(s, start + h * p.block + j), load(hidden, hidden_place + j))
            sums = add(sums, exp(subtract(score, shift)))
        total[place + h] = total[place + h] * math.exp(before - now) + lane_sum(sums)


@njit()
def softmax_codes(s, start, p, hidden, hidden_place, count, saved, place):  # type: ignore[no-untyped-def]
    """Scores to codes, in place, given each head's log of the sum of exponentials (stored `queries` apart)."""
    for h in range(p.heads):
        shift = constant(s, saved[place + h * p.queries])
        for j in range(0, count, LANES):
            score = add(load(s, start + h * p.block + j), load(hidden, hidden_place + j))
            store(s, start + h * p.block + j, exp(subtract(score, shift)))


@njit()
def softmax_whole(s, start, p, hidden, hidden_place, count, saved, place):  # type: ignore[no-untyped-def]
    """Scores to codes, in place, where one block holds all keys; keeps the log of each sum of exponentials."""
    for h in range(p.heads):
        top = add(load(s, start + h * p.block), load(hidden, hidden_place))
        for j in range(LANES, count, LANES):
            top = maximum(add(load(s, start + h * p.block + j), load(hidden, hidden_place + j)), top)
        largest = lane_maximum(top)
        if largest == -np.inf:
            # No key is seen: shifted by a finite number instead, every exponential below is 0.
            largest = s.dtype.type(0)
        shift = constant(s, largest)
        sums = constant(s, 0.0)
        for j in range(0, count, LANES):
            score = add(load(s, start + h * p.block + j), load(hidden, hidden_place + j))
            power = exp(subtract(score, shift))
            store(s, start + h * p.block + j, power)
            sums = add(sums, power)
        total = lane_sum(sums)
        saved[place + h * p.queries] = log_sum(largest, total)
        inverse = constant(s, 1 / total if total > 0 else 0.0)
        for j in range(0, count, LANES):
            store(s, start + h * p.block + j, multiply(load(s, start + h * p.block + j), inverse))


@njit()
def log_sum(largest, total):  # type: ignore[no-untyped-def]
    """The log of a sum of exponentials; 0 for a query that sees no key, so that its codes come out as e**-inf = 0."""
    return largest + math.log(total) if total != 0 else 0.0


@njit()
def activate(x, net, like):  # type: ignore[no-untyped-def]
    """φ(x) and φ'(x) of a two-layer value net; `like` is an array of x's type."""
    one = constant(like, 1.0)
    if net == RELU:
        zero = constant(like, 0.0)
        return maximum(x, zero), where_positive(x, one, zero)
    if net == GELU:
        # (1 + tanh(y)) / 2 is the logistic function of 2y.
        square = multiply(x, x)
        cubic = muladd(square, constant(like, 2 * GELU_SLOPE * GELU_CUBIC), constant(like, 2 * GELU_SLOPE))
        gate = _logistic(multiply(x, cubic), like)
        inner = muladd(square, constant(like, 6 * GELU_SLOPE * GELU_CUBIC), constant(like, 2 * GELU_SLOPE))
        value = multiply(x, gate)
        return value, muladd(multiply(value, subtract(one, gate)), inner, gate)
    if net == SILU:
        gate = _logistic(x, like)
        value = multiply(x, gate)
        return value, muladd(value, subtract(one, gate), gate)
    return x, one


@njit()
def _logistic(x, like):  # type: ignore[no-untyped-def]
    one = constant(like, 1.0)
    return divide(one, add(one, exp(subtract(constant(like, 0.0), x))))


@njit()
def mix_values(mixed, squares, s, p, tile, count, like):  # type: ignore[no-untyped-def]
    """mixed[query, d, key] = Σ_h s[query, h, key] v[h, d, key], and squares[query, key] = Σ_h s². Two queries."""
    heads, width, block = p.heads, p.v_padded, p.block
    other = heads * block
    for d in range(0, width, len(like)):
        for j in range(0, count, LANES):
            first, second = zero_rows(s, like), zero_rows(s, like)
            first_square = second_square = constant(s, 0.0)
            for h in range(heads):
                a, b = load(s, h * block + j), load(s, other + h * block + j)
                values = load_rows(tile, (h * width + d) * block + j, block, like)
                first, second = muladd_rows(a, values, first), muladd_rows(b, values, second)
                first_square, second_square = muladd(a, a, first_square), muladd(b, b, second_square)
            store_rows(mixed, d * block + j, block, first)
            store_rows(mixed, (width + d) * block + j, block, second)
            store(squares, j, first_square)
            store(squares, block + j, second_square)


@njit()
def rms_inverse(square, p, like):  # type: ignore[no-untyped-def]
    """1 / sqrt(mean over heads of s² + ε) of 8 pairs, from Σ_h s²."""
    mean = muladd(square, constant(like, 1 / p.heads), constant(like, p.epsilon))
    return divide(constant(like, 1.0), sqrt(mean))
