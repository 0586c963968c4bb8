"""Stages that the fused CPU kernels share: factors of pairs, scores, softmax, hidden layers.

A kernel walks over blocks of keys that stay in the cache, and in each over the queries, two at a time: what is loaded
of a key then serves both. A block is packed with the keys innermost, so that every stage runs along them, 8 per vector.

Whatever the heads of a pair share — mask, dropout, the scale of `rms_head` — is one number, the pair's *factor* c: with
raw codes y (the scores, or their softmax) the code is z = c·y, and a pair that must not count has c = 0. Keys that are
masked for every query, and those that fill the last block, are packed as zeros, whatever they hold.

Buffers of two queries: s and grad_s (2, head, key); mixed and grad_mixed, each as a tile; others (2, key).
`like` is a tuple whose length is the number of rows (dims) held in registers at once.
"""

import math

import numpy as np

from headcode.ops.cpu.packing import GELU, RELU, SILU, array_at, stage
from headcode.ops.cpu.simd import (
    LANES,
    constant,
    dot_rows,
    load,
    load_rows,
    muladd,
    muladd_rows,
    rolled,
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
    where_positive,
)
from headcode.ops.dropout import MASK32, MIX_FACTORS, QUERY_FACTOR

GELU_SLOPE = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715


@stage
def fill_visible(visible, hidden, p, b, key, octets):  # type: ignore[no-untyped-def]
    """Per key of a block: `visible` 1 or 0, and `hidden`, which is added to the scores of a softmax, 0 or -inf."""
    mask = array_at(p.mask, octets)
    for j in range(p.block):
        rolled()
        seen = key + j < p.keys
        if seen and p.mask != 0:
            seen = mask[b * p.mask_batch + (key + j) * p.mask_key] != 0
        visible[j] = 1 if seen else 0
        hidden[j] = 0 if seen else -np.inf


@stage
def num_lanes(p, key):  # type: ignore[no-untyped-def]
    """How many places of this block are worked on: its keys, filled up to whole vectors."""
    return min(p.block, (p.keys - key + LANES - 1) // LANES * LANES)


@stage
def first_seeing(p, key, first):  # type: ignore[no-untyped-def]
    """The first query, in steps of two, that sees this block of keys; a single block is always visited."""
    if p.causal and key > p.query_offset + first and p.keys > p.block:
        return first + (key - p.query_offset - first) // 2 * 2
    return first


@stage
def band_start(p, key, i):  # type: ignore[no-untyped-def]
    """Where the band's entry of (query i, key) stands; one entry before the band belongs to an odd query's partner."""
    return (key - i + p.queries) * p.band_step


@stage
def _mix(x):  # type: ignore[no-untyped-def]
    x = ((x ^ (x >> 16)) * MIX_FACTORS[0]) & MASK32
    x = ((x ^ (x >> 15)) * MIX_FACTORS[1]) & MASK32
    return x ^ (x >> 16)


@stage
def pair_factors(factor, hidden, visible, key_hidden, p, key, count, i):  # type: ignore[no-untyped-def]
    """Factors of two queries with one block of keys, and what a softmax adds, from what is known per key."""
    for second in range(2):
        place = second * p.block
        position = p.query_offset + i + second
        # The partner of an odd last query is not there: with factors 0 it leaves no trace.
        num_seen = count if i + second < p.queries else 0
        if p.causal:
            num_seen = max(min(num_seen, position + 1 - key), 0)
        row = _mix((p.stream + (position & MASK32) * QUERY_FACTOR) & MASK32)
        for j in range(0, count, LANES):
            rolled()
            seen = load(visible, j)
            if p.threshold > 0:
                keep = keep_lanes(row, key + j, p.threshold, factor)
                seen = multiply(seen, multiply(keep, constant(factor, p.keep_scale)))
            store(factor, place + j, seen)
            store(hidden, place + j, load(key_hidden, j))
        for j in range(num_seen, count):
            rolled()
            factor[place + j] = 0
            hidden[place + j] = -np.inf


@stage
def scores(s, p, query, place, tile, band, band_place, count, like):  # type: ignore[no-untyped-def]
    """s = q·k + band of two queries and one block of keys; queries are packed with the scale in them."""
    heads, width, block, band_length = p.heads, p.qk_padded, p.block, p.band_length
    n = len(like)
    row, other = heads * width, heads * block
    for h in range(heads):
        for d in range(0, width, n):
            first = splat_rows(query, place + h * width + d, like)
            second = splat_rows(query, place + row + h * width + d, like)
            start = s if d > 0 else band
            start_first = h * block if d > 0 else band_place + h * band_length
            start_second = start_first + other if d > 0 else start_first - p.band_step
            rows = (h * width + d) * block
            for j in range(0, count, LANES):
                rolled()
                keys = load_rows(tile, rows + j * n, like)
                store(s, h * block + j, dot_rows(first, keys, load(start, start_first + j)))
                store(s, other + h * block + j, dot_rows(second, keys, load(start, start_second + j)))


@stage
def softmax_statistics(s, p, hidden, count, largest, total, place):  # type: ignore[no-untyped-def]
    """Update every head's running maximum and sum of exponentials with one more block of keys, for two queries."""
    for row in range(2 * p.heads):
        codes, away = row * p.block, row // p.heads * p.block
        top = add(load(s, codes), load(hidden, away))
        for j in range(LANES, count, LANES):
            rolled()
            top = maximum(add(load(s, codes + j), load(hidden, away + j)), top)
        before = largest[place + row]
        now = max(lane_maximum(top), before)
        largest[place + row] = now
        if now == -np.inf:
            continue
        sums = constant(s, 0.0)
        for j in range(0, count, LANES):
            rolled()
            score = add(load(s, codes + j), load(hidden, away + j))
            sums = add(sums, exp(subtract(score, constant(s, now))))
        total[place + row] = total[place + row] * math.exp(before - now) + lane_sum(sums)


@stage
def log_sum(largest, total):  # type: ignore[no-untyped-def]
    """The log of a sum of exponentials; 0 for a query that sees no key, so that its codes come out as e**-inf = 0."""
    return largest + math.log(total) if total != 0 else 0.0


@stage
def softmax_codes(s, p, hidden, count, saved, place, num_queries):  # type: ignore[no-untyped-def]
    """Scores to codes, in place, given each head's log of the sum of exponentials (`queries` apart)."""
    for row in range(num_queries * p.heads):
        second = row // p.heads
        codes, away = row * p.block, second * p.block
        shift = constant(s, saved[place + second + (row - second * p.heads) * p.queries])
        for j in range(0, count, LANES):
            rolled()
            score = add(load(s, codes + j), load(hidden, away + j))
            store(s, codes + j, exp(subtract(score, shift)))


@stage
def softmax_whole(s, p, hidden, count, saved, place, num_queries):  # type: ignore[no-untyped-def]
    """Scores to codes, in place, where one block holds all keys; keeps the log of each sum of exponentials."""
    for row in range(num_queries * p.heads):
        second = row // p.heads
        codes, away = row * p.block, second * p.block
        top = add(load(s, codes), load(hidden, away))
        for j in range(LANES, count, LANES):
            rolled()
            top = maximum(add(load(s, codes + j), load(hidden, away + j)), top)
        largest = lane_maximum(top)
        # Where no key is seen, any finite shift makes all exponentials 0.
        shift = constant(s, largest if largest != -np.inf else 0.0)
        sums = constant(s, 0.0)
        for j in range(0, count, LANES):
            rolled()
            power = exp(subtract(add(load(s, codes + j), load(hidden, away + j)), shift))
            store(s, codes + j, power)
            sums = add(sums, power)
        total = lane_sum(sums)
        saved[place + second + (row - second * p.heads) * p.queries] = log_sum(largest, total)
        inverse = constant(s, 1 / total if total != 0 else 0.0)
        for j in range(0, count, LANES):
            rolled()
            store(s, codes + j, multiply(load(s, codes + j), inverse))


@stage
def mix_values(mixed, squares, s, p, tile, count, like):  # type: ignore[no-untyped-def]
    """mixed = Σ_h s v and squares = Σ_h s², of two queries and one block of keys."""
    heads, width, block = p.heads, p.v_padded, p.block
    n = len(like)
    other = heads * block
    for d in range(0, width, n):
        for j in range(0, count, LANES):
            first, second = zero_rows(s, like), zero_rows(s, like)
            first_square = second_square = constant(s, 0.0)
            for h in range(heads):
                rolled()
                a, b = load(s, h * block + j), load(s, other + h * block + j)
                values = load_rows(tile, (h * width + d) * block + j * n, like)
                first, second = muladd_rows(a, values, first), muladd_rows(b, values, second)
                first_square, second_square = muladd(a, a, first_square), muladd(b, b, second_square)
            store_rows(mixed, d * block + j * n, first)
            store_rows(mixed, (width + d) * block + j * n, second)
            store(squares, j, first_square)
            store(squares, block + j, second_square)


@stage
def rms_inverse(square, p, like):  # type: ignore[no-untyped-def]
    """1 / sqrt(mean over heads of s² + ε) of 8 pairs, from Σ_h s²."""
    mean = muladd(square, constant(like, 1 / p.heads), constant(like, p.epsilon))
    return divide(constant(like, 1.0), sqrt(mean))


@stage
def _logistic(x, like):  # type: ignore[no-untyped-def]
    one = constant(like, 1.0)
    return divide(one, add(one, exp(subtract(constant(like, 0.0), x))))


@stage
def activate(x, net, like):  # type: ignore[no-untyped-def]
    """φ(x) and φ'(x) of a two-layer value net; `like` is an array of x's type."""
    one = constant(like, 1.0)
    if net == RELU:
        zero = constant(like, 0.0)
        return maximum(x, zero), where_positive(x, one, zero)
    if net == GELU:
        # (1 + tanh(y)) / 2 is the logistic function of 2y.
        square = multiply(x, x)
        inner = muladd(square, constant(like, 2 * GELU_SLOPE * GELU_CUBIC), constant(like, 2 * GELU_SLOPE))
        gate = _logistic(multiply(x, inner), like)
        slope = muladd(square, constant(like, 6 * GELU_SLOPE * GELU_CUBIC), constant(like, 2 * GELU_SLOPE))
        value = multiply(x, gate)
        return value, muladd(multiply(value, subtract(one, gate)), slope, gate)
    if net == SILU:
        gate = _logistic(x, like)
        value = multiply(x, gate)
        return value, muladd(value, subtract(one, gate), gate)
    return x, one
