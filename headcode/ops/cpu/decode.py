"""A few new tokens of each sequence through a whole model, in one call: from their embeddings to their logits.

A call is a chain of stages. Threads take a stage's tasks one by one and wait for its end before the next one: only for
tasks that somebody has taken, so that a thread which never comes keeps nobody waiting. Each number is the sum of one
task, however the rows of a product are cut into tasks: the bits do not depend on the number of threads.

Activations, one row per new token: x (dim) is the residual stream, normed (dim) its LayerNorm, projected the heads of
queries, keys and values side by side, attended their outputs, hidden and inner the feed-forward before and after its
activation.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from headcode import private_api
from headcode.ops.cpu.block_stages import activate_rows, measure, normalise
from headcode.ops.cpu.decode_stages import (
    append,
    list_visible,
    mix_values,
    prepare_heads,
    project,
    score,
    scores_to_codes,
    use_state,
)
from headcode.ops.cpu.kernel import DECODE, DECODE_LAYER, SINGLE, WORDS, Variants, array_at, fetch_add, no_unroll, stage
from headcode.ops.cpu.records import LANES
from headcode.ops.cpu.simd import constant, load, store
from headcode.ops.cpu.simd_math import add, multiply

_STAGE_BYTES = 2 * WORDS.itemsize


@intrinsic
def _add_after(typingctx, counter):  # type: ignore[no-untyped-def]
    """counter[1] += 1, seen by other threads only after all that was written before."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = private_api.array_data(context, builder, signature.args[0], arguments[0])
        second = builder.gep(data, [ir.Constant(ir.IntType(64), 1)])
        builder.atomic_rmw("add", second, ir.Constant(ir.IntType(64), 1), "acq_rel")
        return context.get_dummy_value()

    return types.void(counter), codegen


@intrinsic
def _load_before(typingctx, counter):  # type: ignore[no-untyped-def]
    """counter[1], read before anything that is read after it."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = private_api.array_data(context, builder, signature.args[0], arguments[0])
        return builder.load_atomic(builder.gep(data, [ir.Constant(ir.IntType(64), 1)]), "acquire", 8)

    return types.int64(counter), codegen


@stage
def _share(work, p, layer, number, num_tasks):  # type: ignore[no-untyped-def]
    """A stage: work(p, layer, task) for each of its tasks, shared by the threads; returns the next stage's number."""
    counter = array_at(p.stages + number * _STAGE_BYTES, WORDS)
    while True:
        task = fetch_add(counter)
        if task >= num_tasks:
            break
        work(p, layer, task)
        _add_after(counter)
    while _load_before(counter) < num_tasks:
        pass
    return number + 1


@stage
def _num_pieces(p, rows):  # type: ignore[no-untyped-def]
    return (rows + p.piece - 1) // p.piece


@stage
def _embed(p, layer, t):  # type: ignore[no-untyped-def]
    """x = the token's embedding, and the vector of its position."""
    table, places, x = array_at(p.embedding, SINGLE), array_at(p.places, SINGLE), array_at(p.x, SINGLE)
    row, place = _token(p, t) * p.dim, 0
    if p.places != 0:
        place = (p.past + t % p.new) % p.num_places * p.dim
    for d in range(0, p.dim, LANES):
        no_unroll()
        vector = load(table, row + d)
        if p.places != 0:
            vector = add(vector, load(places, place + d))
        store(x, t * p.dim + d, vector)


@stage
def _token(p, t):  # type: ignore[no-untyped-def]
    return array_at(p.tokens, WORDS)[t // p.new * p.token_batch + t % p.new * p.token_step]


@stage
def _norm(p, norm, t):  # type: ignore[no-untyped-def]
    x, normed = array_at(p.x, SINGLE), array_at(p.normed, SINGLE)
    measure(x, t * p.dim, norm, t)
    normalise(normed, t * p.dim, x, t * p.dim, norm, t)


@stage
def _final_norm(p, norm, row):  # type: ignore[no-untyped-def]
    """Of the tokens whose logits are asked for: one row for each of these."""
    x, normed = array_at(p.x, SINGLE), array_at(p.normed, SINGLE)
    source = (row // p.kept * p.new + p.first_kept + row % p.kept) * p.dim
    measure(x, source, norm, row)
    normalise(normed, row * p.dim, x, source, norm, row)
    for d in range(row * p.dim, (row + 1) * p.dim, LANES):
        no_unroll()
        store(normed, d, multiply(load(normed, d), constant(SINGLE, p.output_scale)))


@stage
def _project_heads(p, layer, task):  # type: ignore[no-untyped-def]
    """Queries, keys and values: rows of three matrices, one below the other."""
    projected, normed = array_at(p.projected, SINGLE), array_at(p.normed, SINGLE)
    qk, v = p.heads * p.qk_width, p.heads * p.v_width
    first, row, count = task * p.piece, 2 * qk + v, p.rows
    end = first + p.piece
    keys, values = projected[qk:], projected[2 * qk :]
    project(projected, row, False, layer.query_weight, layer.query_bias, normed, p.dim, qk, first, end, count)
    project(keys, row, False, layer.key_weight, layer.key_bias, normed, p.dim, qk, first - qk, end - qk, count)
    first, end = first - 2 * qk, end - 2 * qk
    project(values, row, False, layer.value_weight, layer.value_bias, normed, p.dim, v, first, end, count)


@stage
def _append(p, layer, t):  # type: ignore[no-untyped-def]
    """Queries and keys made ready, and keys and values put where all later tokens find them."""
    projected, qk = array_at(p.projected, SINGLE), p.heads * p.qk_width
    b, position, row = t // p.new, p.past + t % p.new, t * (2 * qk + p.heads * p.v_width)
    prepare_heads(p, layer, row, position)
    if not p.recurrent:
        append(p, layer.keys, layer.room, b, position, projected, row + qk, p.qk_width)
        append(p, layer.values, layer.room, b, position, projected, row + 2 * qk, p.v_width)


@stage
def _attend(p, layer, t):  # type: ignore[no-untyped-def]
    attended, v = array_at(p.attended, SINGLE), p.heads * p.v_width
    width = 2 * p.heads * p.qk_width + v
    b, position, first = t // p.new, p.past + t % p.new, t * v
    index = np.empty(position + 1, WORDS.dtype)
    count = list_visible(p, b, position, index)
    if count == 0:
        for d in range(first, first + v):
            attended[d] = 0
        return
    line = (count + LANES - 1) // LANES * LANES
    s = np.empty(p.heads * line, SINGLE.dtype)
    score(p, layer, b, s, line, t * width, position, index, count)
    scores_to_codes(p, s, line, count)
    mix_values(p, layer, b, attended, first, s, line, index, count)


@stage
def _attend_recurrently(p, layer, b):  # type: ignore[no-untyped-def]
    projected, attended = array_at(p.projected, SINGLE), array_at(p.attended, SINGLE)
    v = p.heads * p.v_width
    width = 2 * p.heads * p.qk_width + v
    for t in range(p.new):
        row = b * p.new + t
        use_state(p, layer, b, t, projected, row * width, attended, row * v)


@stage
def _project_attended(p, layer, task):  # type: ignore[no-untyped-def]
    x, attended, first = array_at(p.x, SINGLE), array_at(p.attended, SINGLE), task * p.piece
    weight, bias, depth = layer.output_weight, layer.output_bias, p.heads * p.v_width
    project(x, p.dim, True, weight, bias, attended, depth, p.dim, first, first + p.piece, p.rows)


@stage
def _project_hidden(p, layer, task):  # type: ignore[no-untyped-def]
    """One matrix, or if gated, that of the gate and below it that of the signal."""
    hidden, normed = array_at(p.hidden, SINGLE), array_at(p.normed, SINGLE)
    first, inner, row, count = task * p.piece, p.inner_width, p.hidden_width, p.rows
    end = first + p.piece
    project(hidden, row, False, layer.hidden_weight, layer.hidden_bias, normed, p.dim, inner, first, end, count)
    if row > inner:
        first, end, signals = first - inner, end - inner, hidden[inner:]
        project(signals, row, False, layer.signal_weight, 0, normed, p.dim, inner, first, end, count)


@stage
def _activate(p, layer, t):  # type: ignore[no-untyped-def]
    hidden, inner = array_at(p.hidden, SINGLE), array_at(p.inner, SINGLE)[t * p.inner_width :]
    activate_rows(inner, 0, inner, 0, hidden, t * p.hidden_width, p.hidden_width, p, 1, False)


@stage
def _project_inner(p, layer, task):  # type: ignore[no-untyped-def]
    x, inner, first = array_at(p.x, SINGLE), array_at(p.inner, SINGLE), task * p.piece
    weight, bias, depth = layer.inner_weight, layer.inner_bias, p.inner_width
    project(x, p.dim, True, weight, bias, inner, depth, p.dim, first, first + p.piece, p.rows)


@stage
def _project_outputs(p, layer, task):  # type: ignore[no-untyped-def]
    logits, normed, first = array_at(p.logits, SINGLE), array_at(p.normed, SINGLE), task * p.piece
    outputs, count = p.outputs, p.batch * p.kept
    end = first + p.piece
    project(logits, outputs, False, p.output_weight, p.output_bias, normed, p.dim, outputs, first, end, count)


@stage
def decode(address):  # type: ignore[no-untyped-def]
    """See `records.DECODE`."""
    p = array_at(address, DECODE)[0]
    rows, layers = p.rows, array_at(p.layers, DECODE_LAYER)
    for t in range(rows):
        if _token(p, t) < 0 or _token(p, t) >= p.vocab_size:
            array_at(address, WORDS)[0] = 1
            return
    heads_width = p.heads * (2 * p.qk_width + p.v_width)
    number = _share(_embed, p, p.final_norm, 0, rows)
    for i in range(p.num_layers):
        layer = layers[i]
        number = _share(_norm, p, layer.attention_norm, number, rows)
        number = _share(_project_heads, p, layer, number, _num_pieces(p, heads_width))
        number = _share(_append, p, layer, number, rows)
        if p.recurrent:
            number = _share(_attend_recurrently, p, layer, number, p.batch)
        else:
            number = _share(_attend, p, layer, number, rows)
        number = _share(_project_attended, p, layer, number, _num_pieces(p, p.dim))
        number = _share(_norm, p, layer.feedforward_norm, number, rows)
        number = _share(_project_hidden, p, layer, number, _num_pieces(p, p.hidden_width))
        number = _share(_activate, p, layer, number, rows)
        number = _share(_project_inner, p, layer, number, _num_pieces(p, p.dim))
    number = _share(_final_norm, p, p.final_norm, number, p.batch * p.kept)
    _share(_project_outputs, p, p.final_norm, number, _num_pieces(p, p.outputs))


KERNELS = Variants(decode)
