"""The fused forward kernel: tasks of (batch entries, queries), each over all heads and all keys."""

import numpy as np

from headcode.jit import njit
from headcode.ops.cpu.attention_stages import (
    activate,
    band_start,
    fill_visible,
    first_seeing,
    log_sum,
    mix_values,
    num_lanes,
    pair_factors,
    rms_inverse,
    scores,
    softmax_codes,
    softmax_statistics,
    softmax_whole,
)
from headcode.ops.cpu.packing import (
    DOUBLE,
    FOUR,
    LINEAR,
    OCTETS,
    OUT,
    RMS_HEAD,
    SINGLE,
    SOFTMAX,
    SPECS,
    TWO,
    WORDS,
    K,
    Q,
    V,
    array_at,
    pack_rows,
    pack_tile,
    place_in_tile,
    stage,
    table_at,
    task_range,
    unpack_rows,
)
from headcode.ops.cpu.simd import (
    LANES,
    add_lane_sums,
    constant,
    load,
    load_rows,
    muladd,
    muladd_rows,
    rolled,
    store,
    take_next,
    zero_rows,
)
from headcode.ops.cpu.simd_math import multiply


@stage
def _forward(address, like, numbers):  # type: ignore[no-untyped-def]
    p, counter = array_at(address, SPECS)[0], array_at(address, WORDS)
    tensors = table_at(p.tensors)
    heads, block, keys = p.heads, p.block, p.keys
    qk_row, v_row = heads * p.qk_padded, heads * p.v_padded
    dtype = numbers.dtype
    rows = (p.length_step + 1) // 2 * 2
    query = np.zeros(rows * qk_row, dtype)
    out = np.empty(rows * v_row, dtype)
    key_tile = np.empty(qk_row * block, dtype)
    value_tile = np.empty(v_row * block, dtype)
    s = np.empty(2 * heads * block, dtype)
    mixed = np.empty(2 * p.v_padded * block, dtype)
    squares = np.empty(2 * block, dtype)
    visible = np.empty(block, dtype)
    key_hidden = np.empty(block, dtype)
    factor = np.empty(2 * block, dtype)
    hidden = np.empty(2 * block, dtype)
    band = array_at(p.band, numbers)
    saved = array_at(p.saved, numbers)
    single = keys <= block
    # Softmax over several blocks needs a first pass over all keys, for its sums; a single block is done on the spot.
    several = p.norm == SOFTMAX and not single
    largest = np.empty(rows * heads if several else 0, dtype)
    total = np.empty(rows * heads if several else 0, dtype)
    while True:
        task = take_next(counter)
        if task >= p.tasks:
            return
        b0, b1, q0, q1 = task_range(p, task, p.queries)
        for b in range(b0, b1):
            pack_rows(query, tensors[Q], b, q0, q1, heads, p.qk_width, p.qk_padded, p.scale)
            out[:] = 0
            largest[:] = -np.inf
            total[:] = 0
            for step in range(0 if several else 1, 2):
                for key in range(0, keys, block):
                    count = num_lanes(p, key)
                    fill_visible(visible, key_hidden, p, b, key, OCTETS)
                    pack_tile(key_tile, tensors[K], b, key, p, p.qk_width, p.qk_padded, visible, like)
                    if step == 1:
                        pack_tile(value_tile, tensors[V], b, key, p, p.v_width, p.v_padded, visible, like)
                    for i in range(first_seeing(p, key, q0), q1, 2):
                        pair_factors(factor, hidden, visible, key_hidden, p, key, count, i)
                        start = band_start(p, key, i)
                        scores(s, p, query, (i - q0) * qk_row, key_tile, band, start, count, like)
                        place = b * heads * p.queries + i
                        if step == 0:
                            softmax_statistics(s, p, hidden, count, largest, total, (i - q0) * heads)
                            continue
                        if p.norm == SOFTMAX and single:
                            softmax_whole(s, p, hidden, count, saved, place, min(2, p.queries - i))
                        elif p.norm == SOFTMAX:
                            softmax_codes(s, p, hidden, count, saved, place, min(2, p.queries - i))
                        if p.net == LINEAR:
                            _pool_linear(out, (i - q0) * v_row, s, p, factor, value_tile, count, like)
                        else:
                            mix_values(mixed, squares, s, p, value_tile, count, like)
                            _hidden_layer(mixed, squares, factor, p, count, like)
                            _pool(out, (i - q0) * v_row, s, p, mixed, count, like)
                if step == 0:
                    for i in range(q0, q1):
                        for h in range(heads):
                            at = (i - q0) * heads + h
                            saved[(b * heads + h) * p.queries + i] = log_sum(largest[at], total[at])
            unpack_rows(tensors[OUT], out, b, q0, q1, heads, p.v_width, p.v_padded, 1.0)


@stage
def _hidden_layer(mixed, squares, factor, p, count, like):  # type: ignore[no-untyped-def]
    """In place: Σ_h y v of every pair becomes c·φ(c Σ_h y v), so that pooling it with y gives the output."""
    for second in range(2):
        pair, start = second * p.block, second * p.v_padded * p.block
        for j in range(0, count, LANES):
            c = load(factor, pair + j)
            if p.norm == RMS_HEAD:
                c = multiply(c, rms_inverse(load(squares, pair + j), p, squares))
            for d in range(p.v_padded):
                rolled()
                place = start + place_in_tile(d, j, p.block, len(like))
                value, _ = activate(multiply(c, load(mixed, place)), p.net, mixed)
                store(mixed, place, multiply(c, value))


@stage
def _pool(out, place, s, p, hidden, count, like):  # type: ignore[no-untyped-def]
    """out[h, d] += Σ_key s[h, key] hidden[d, key], of two queries; two heads share each load of `hidden`."""
    heads, block, width = p.heads, p.block, p.v_padded
    n = len(like)
    for second in range(2):
        codes, start, to = second * heads * block, second * width * block, place + second * heads * width
        for h in range(0, heads, 2):
            # An odd last head is its own partner, and is added once.
            partner = min(h + 1, heads - 1)
            for d in range(0, width, n):
                total, other_total = zero_rows(out, like), zero_rows(out, like)
                for j in range(0, count, LANES):
                    rolled()
                    values = load_rows(hidden, start + d * block + j * n, like)
                    total = muladd_rows(load(s, codes + h * block + j), values, total)
                    other_total = muladd_rows(load(s, codes + partner * block + j), values, other_total)
                add_lane_sums(out, to + h * width + d, total)
                if partner > h:
                    add_lane_sums(out, to + partner * width + d, other_total)


@stage
def _pool_linear(out, place, s, p, factor, tile, count, like):  # type: ignore[no-untyped-def]
    """out[h, d] += Σ_key c[key] s[h, key] v[h, d, key], of two queries; `factor` becomes c."""
    heads, block, width = p.heads, p.block, p.v_padded
    n = len(like)
    other, row = heads * block, heads * width
    if p.norm == RMS_HEAD:
        rms_factors(factor, s, p, count)
    for h in range(heads):
        for d in range(0, width, n):
            first, second = zero_rows(out, like), zero_rows(out, like)
            rows = (h * width + d) * block
            for j in range(0, count, LANES):
                rolled()
                values = load_rows(tile, rows + j * n, like)
                first = muladd_rows(multiply(load(s, h * block + j), load(factor, j)), values, first)
                code = multiply(load(s, other + h * block + j), load(factor, block + j))
                second = muladd_rows(code, values, second)
            add_lane_sums(out, place + h * width + d, first)
            add_lane_sums(out, place + row + h * width + d, second)


@stage
def rms_factors(factor, s, p, count):  # type: ignore[no-untyped-def]
    """Multiply the factors of two queries by 1/rms of their scores over the heads."""
    for second in range(2):
        for j in range(0, count, LANES):
            square = constant(s, 0.0)
            for h in range(p.heads):
                rolled()
                score = load(s, (second * p.heads + h) * p.block + j)
                square = muladd(score, score, square)
            place = second * p.block + j
            store(factor, place, multiply(load(factor, place), rms_inverse(square, p, s)))


@njit()
def forward_kernel(address):  # type: ignore[no-untyped-def]
    """Take tasks until none is left, of the call whose record is at the address."""
    _forward(address, FOUR, SINGLE)


@njit()
def forward_narrow_kernel(address):  # type: ignore[no-untyped-def]
    """The same for widths up to 2."""
    _forward(address, TWO, SINGLE)


@njit()
def forward_double_kernel(address):  # type: ignore[no-untyped-def]
    """The same in float64."""
    _forward(address, TWO, DOUBLE)
