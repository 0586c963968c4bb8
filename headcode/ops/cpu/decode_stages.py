"""Stages of decoding: products of a few tokens with weights, and their attention over what the cache holds.

Nothing is packed. Weights are read where the model has them, rows (out, in), keys and values where the cache has them:
a token uses each number once, so that to move it first would take longer than to use it. A product is a dot product
for each row of the weight, LANES rows at a time, with which all tokens take turns.

`p` is the launch's DECODE record, `layer` a DECODE_LAYER, b a sequence; all numbers are float32. Keys that are masked
are left out before anything is read of them: `index` lists the others, and `count` is their number.
"""

import numpy as np

from headcode.ops.cpu.activations import activate
from headcode.ops.cpu.attention_stages import rms_inverse
from headcode.ops.cpu.kernel import BYTES, NET, NORM, SINGLE, WORDS, array_at, inlined_stage, no_unroll, stage
from headcode.ops.cpu.records import LANES, LINEAR, RMS_HEAD, SOFTMAX
from headcode.ops.cpu.simd import (
    constant,
    load,
    load_steps,
    muladd,
    muladd_rows,
    splat,
    store,
    zero_rows,
)
from headcode.ops.cpu.simd_math import add, exp, lane_maximum, lane_sum, maximum, multiply, subtract
from headcode.ops.cpu.simd_shuffles import add_lane_sums

HALF = (0,) * (LANES // 2)


@inlined_stage
def _add_dots(target, offset, rows, first, step, x, x_offset, width):  # type: ignore[no-untyped-def]
    """target[offset + i] += row i · x, of LANES rows that begin `step` apart."""
    upper, lower = zero_rows(target, HALF), zero_rows(target, HALF)
    whole, middle = width // LANES * LANES, first + LANES // 2 * step
    for d in range(0, whole, LANES):
        no_unroll()
        vector = load(x, x_offset + d)
        upper = muladd_rows(vector, load_steps(rows, first + d, step, HALF), upper)
        lower = muladd_rows(vector, load_steps(rows, middle + d, step, HALF), lower)
    add_lane_sums(target, offset, upper, offset + LANES // 2, lower)
    for d in range(whole, width):
        for i in range(LANES):
            target[offset + i] += rows[first + i * step + d] * x[x_offset + d]


@inlined_stage
def _dot(rows, first, x, x_offset, width):  # type: ignore[no-untyped-def]
    whole = width // LANES * LANES
    sums = constant(SINGLE, 0.0)
    for d in range(0, whole, LANES):
        no_unroll()
        sums = muladd(load(rows, first + d), load(x, x_offset + d), sums)
    total = lane_sum(sums)
    for d in range(whole, width):
        total += rows[first + d] * x[x_offset + d]
    return total


@stage
def project(  # type: ignore[no-untyped-def]
    target, target_row, begun, weight, bias, source, depth, width, first, end, num_tokens
):
    """target[t, r] = (target[t, r] if begun, else 0) + bias[r] + W[r]·source[t], of rows r from `first` to `end`.

    Rows that the matrix (width, depth) does not have are another's. Weight and bias are addresses.
    """
    first, end = max(first, 0), min(end, width)
    weights, biases = array_at(weight, SINGLE), array_at(bias, SINGLE)
    whole = first + max(end - first, 0) // LANES * LANES
    for r in range(first, whole, LANES):
        for t in range(num_tokens):
            offset = t * target_row + r
            start = load(target, offset) if begun else constant(SINGLE, 0.0)
            if bias != 0:
                start = add(start, load(biases, r))
            store(target, offset, start)
            _add_dots(target, offset, weights, r * depth, depth, source, t * depth, depth)
    for r in range(whole, end):
        for t in range(num_tokens):
            total = _dot(weights, r * depth, source, t * depth, depth)
            if bias != 0:
                total += biases[r]
            offset = t * target_row + r
            target[offset] = target[offset] + total if begun else total


@stage
def _normalise_heads(rows, offset, heads, width, weight, epsilon):  # type: ignore[no-untyped-def]
    """In place: each head divided by its root mean square, times a weight that the heads share."""
    weights = array_at(weight, SINGLE)
    for first in range(offset, offset + heads * width, width):
        inverse = np.float32(1 / np.sqrt(_dot(rows, first, rows, first, width) / width + epsilon))
        for d in range(width):
            no_unroll()
            rows[first + d] *= inverse * weights[d]


@stage
def _rotate(rows, offset, heads, width, table):  # type: ignore[no-untyped-def]
    """In place: channel pairs (d, d + width/2) of each head, by the cosines and sines (width) of their angles."""
    half = width // 2
    whole = half // LANES * LANES
    for first in range(offset, offset + heads * width, width):
        for d in range(0, whole, LANES):
            no_unroll()
            cos, sin = load(table, d), load(table, half + d)
            one, other = load(rows, first + d), load(rows, first + half + d)
            store(rows, first + d, subtract(multiply(one, cos), multiply(other, sin)))
            store(rows, first + half + d, muladd(other, cos, multiply(one, sin)))
        for d in range(whole, half):
            no_unroll()
            one, other = rows[first + d], rows[first + half + d]
            rows[first + d] = one * table[d] - other * table[half + d]
            rows[first + half + d] = other * table[d] + one * table[half + d]


@stage
def prepare_heads(p, layer, row, position):  # type: ignore[no-untyped-def]
    """In place: queries and keys of one token, from `row` of `projected` on, normalised, turned and scaled."""
    projected, width = array_at(p.projected, SINGLE), p.heads * p.qk_width
    if layer.query_norm != 0:
        _normalise_heads(projected, row, p.heads, p.qk_width, layer.query_norm, layer.query_epsilon)
        _normalise_heads(projected, row + width, p.heads, p.qk_width, layer.key_norm, layer.key_epsilon)
    if p.rotations != 0:
        table = array_at(p.rotations, SINGLE)[position * p.qk_width :]
        _rotate(projected, row, 2 * p.heads, p.qk_width, table)
    for d in range(row, row + width, LANES):
        no_unroll()
        store(projected, d, multiply(load(projected, d), constant(SINGLE, p.scale)))


@stage
def append(p, cache, room, b, position, source, first, width):  # type: ignore[no-untyped-def]
    """A token's key or value of each head, from `first` on, to its position in the cache."""
    target = array_at(cache, SINGLE)
    for h in range(p.heads):
        offset = ((b * p.heads + h) * room + position) * width
        for d in range(width):
            no_unroll()
            target[offset + d] = source[first + h * width + d]


@stage
def list_visible(p, b, position, index):  # type: ignore[no-untyped-def]
    """Fill `index` with the keys that a token at this position sees; returns their number."""
    mask, count = array_at(p.mask, BYTES), 0
    for j in range(position + 1):
        if p.mask == 0 or mask[b * p.mask_batch + j * p.mask_key] == 0:
            index[count] = j
            count += 1
    return count


@stage
def _begin_scores(p, layer, s, row, position, index, count):  # type: ignore[no-untyped-def]
    """s (head, row) = the relative bias, or 0."""
    if layer.table == 0:
        for i in range(0, p.heads * row, LANES):
            no_unroll()
            store(s, i, constant(SINGLE, 0.0))
        return
    table, buckets = array_at(layer.table, SINGLE), array_at(p.buckets, WORDS)
    for i in range(count):
        bucket = buckets[min(position - index[i], p.num_buckets)]
        for h in range(p.heads):
            no_unroll()
            s[h * row + i] = table[h * p.num_buckets + bucket]


@stage
def score(p, layer, b, s, row, query, position, index, count):  # type: ignore[no-untyped-def]
    """s[h, i] = q[h]·k[h, index[i]] + bias."""
    keys, projected, width = array_at(layer.keys, SINGLE), array_at(p.projected, SINGLE), p.qk_width
    _begin_scores(p, layer, s, row, position, index, count)
    for h in range(p.heads):
        start, line, q = (b * p.heads + h) * layer.room, h * row, query + h * width
        for i in range(0, count, LANES):
            key, last = index[i], min(i + LANES, count) - 1
            if last == i + LANES - 1 and index[last] == key + LANES - 1:
                _add_dots(s, line + i, keys, (start + key) * width, width, projected, q, width)
            else:
                for j in range(i, last + 1):
                    s[line + j] += _dot(keys, (start + index[j]) * width, projected, q, width)


@stage
def _softmax(s, row, count):  # type: ignore[no-untyped-def]
    """In place, of one head, whose line begins at `row`."""
    end = row + (count + LANES - 1) // LANES * LANES
    for i in range(row + count, end):
        s[i] = -np.inf
    top = load(s, row)
    for i in range(row + LANES, end, LANES):
        no_unroll()
        top = maximum(load(s, i), top)
    shift, sums = constant(SINGLE, lane_maximum(top)), constant(SINGLE, 0.0)
    for i in range(row, end, LANES):
        no_unroll()
        power = exp(subtract(load(s, i), shift))
        store(s, i, power)
        sums = add(sums, power)
    inverse = constant(SINGLE, 1 / lane_sum(sums))
    for i in range(row, end, LANES):
        no_unroll()
        store(s, i, multiply(load(s, i), inverse))


@stage
def scores_to_codes(p, s, row, count):  # type: ignore[no-untyped-def]
    """In place, of all heads."""
    if NORM == SOFTMAX:
        for h in range(p.heads):
            _softmax(s, h * row, count)
    elif NORM == RMS_HEAD:
        for i in range(0, count, LANES):
            square = constant(SINGLE, 0.0)
            for line in range(i, i + p.heads * row, row):
                no_unroll()
                square = muladd(load(s, line), load(s, line), square)
            inverse = rms_inverse(square, p)
            for line in range(i, i + p.heads * row, row):
                no_unroll()
                store(s, line, multiply(load(s, line), inverse))


@stage
def _weigh(target, offset, codes, line, rows, first, step, index, count, width):  # type: ignore[no-untyped-def]
    """target (width) = Σ_i codes[i] rows[index[i]]. Four sums at a time do not wait for each other."""
    whole, fours = width // LANES * LANES, count // 4 * 4
    for d in range(0, whole, LANES):
        a = b = c = e = constant(SINGLE, 0.0)
        for i in range(0, fours, 4):
            no_unroll()
            a = muladd(splat(codes, line + i), load(rows, first + index[i] * step + d), a)
            b = muladd(splat(codes, line + i + 1), load(rows, first + index[i + 1] * step + d), b)
            c = muladd(splat(codes, line + i + 2), load(rows, first + index[i + 2] * step + d), c)
            e = muladd(splat(codes, line + i + 3), load(rows, first + index[i + 3] * step + d), e)
        for i in range(fours, count):
            no_unroll()
            a = muladd(splat(codes, line + i), load(rows, first + index[i] * step + d), a)
        store(target, offset + d, add(add(a, b), add(c, e)))
    for d in range(whole, width):
        total = np.float32(0)
        for i in range(count):
            total += codes[line + i] * rows[first + index[i] * step + d]
        target[offset + d] = total


@stage
def _hidden_layer(p, layer, b, hidden, step, s, row, index, count):  # type: ignore[no-untyped-def]
    """hidden (key, step) = φ(Σ_h z[h] v[h]) of the keys listed; `step` is the width rounded up to whole vectors."""
    values, width = array_at(layer.values, SINGLE), p.v_width
    start, between = b * p.heads * layer.room * width, layer.room * width
    whole = width // LANES * LANES
    for i in range(count):
        key, target = start + index[i] * width, index[i] * step
        for d in range(0, whole, LANES):
            total = constant(SINGLE, 0.0)
            for h in range(p.heads):
                no_unroll()
                total = muladd(splat(s, h * row + i), load(values, key + h * between + d), total)
            store(hidden, target + d, activate(total)[0])
        if whole < step:
            store(hidden, target + whole, constant(SINGLE, 0.0))
            for d in range(whole, width):
                for h in range(p.heads):
                    hidden[target + d] += s[h * row + i] * values[key + h * between + d]
            store(hidden, target + whole, activate(load(hidden, target + whole))[0])


@stage
def mix_values(p, layer, b, attended, first, s, row, index, count):  # type: ignore[no-untyped-def]
    """attended (heads, v_width), from `first` on: what the value nets that the codes generate make of the values."""
    width = p.v_width
    if NET == LINEAR:
        values = array_at(layer.values, SINGLE)
        for h in range(p.heads):
            start = (b * p.heads + h) * layer.room * width
            _weigh(attended, first + h * width, s, h * row, values, start, width, index, count, width)
        return
    step = (width + LANES - 1) // LANES * LANES
    hidden = np.empty((index[count - 1] + 1) * step, SINGLE.dtype)
    _hidden_layer(p, layer, b, hidden, step, s, row, index, count)
    for h in range(p.heads):
        _weigh(attended, first + h * width, s, h * row, hidden, 0, step, index, count, width)


@stage
def use_state(p, layer, b, t, projected, row, attended, first):  # type: ignore[no-untyped-def]
    """next_state = state + k vᵀ and attended = next_stateᵀ q, of each head of token t; a masked one adds nothing."""
    state = layer.state if t == 0 else layer.next_state
    before, after, mask = array_at(state, SINGLE), array_at(layer.next_state, SINGLE), array_at(p.mask, BYTES)
    seen = p.mask == 0 or mask[b * p.mask_batch + t * p.mask_key] == 0
    depth, width = p.qk_width, p.v_width
    whole = width // LANES * LANES
    for h in range(p.heads):
        q, k = row + h * depth, row + (p.heads + h) * depth
        v, out = row + 2 * p.heads * depth + h * width, first + h * width
        matrix = (b * p.heads + h) * depth * width
        for d in range(0, whole, LANES):
            value, total = load(projected, v + d), constant(SINGLE, 0.0)
            for i in range(depth):
                no_unroll()
                offset = matrix + i * width + d
                weight = load(before, offset) if state != 0 else constant(SINGLE, 0.0)
                if seen:
                    weight = muladd(splat(projected, k + i), value, weight)
                store(after, offset, weight)
                total = muladd(splat(projected, q + i), weight, total)
            store(attended, out + d, total)
        for d in range(whole, width):
            attended[out + d] = 0
            for i in range(depth):
                offset = matrix + i * width + d
                number = before[offset] if state != 0 else np.float32(0)
                if seen:
                    number += projected[k + i] * projected[v + d]
                after[offset] = number
                attended[out + d] += projected[q + i] * number
