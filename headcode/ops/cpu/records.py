"""What Python and the kernels agree on: widths of vectors, codes of norms and value nets, and the records of launches.

A record is a row of 64-bit words: all that a kernel is told about one launch. The kernel gets its address and nothing
else. The first word counts the tasks that threads have taken so far. An address is 0 where there is nothing. Needs no
Numba.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

LANES = 8
"""Numbers in one vector, but for the attention kernels where a machine has wider ones (`attention_plan`)."""
COLUMNS = 2 * LANES
"""Columns of a tile of a matrix product: all widths of a fused block are multiples of it."""
CACHE_LINE = 64
"""Bytes."""
BLOCK = 96
"""Keys that the attention kernels work on together, at most; measured, see docs/kernels.md."""

Products = Literal["float32", "bf16"]
"""Of a fused block: of float32 numbers, or of numbers rounded to bf16, whose sums are float32 all the same."""
NUMBERS_PER_WORD = {"float32": 1, "bf16": 2}
"""Of 32 bits, in what a product reads."""

NONE, RMS_HEAD, SOFTMAX = range(3)
NORM_CODES = {"none": NONE, "rms_head": RMS_HEAD, "softmax": SOFTMAX}
LINEAR, DEEP_LINEAR, RELU, GELU, SILU = range(5)
NET_CODES = {"linear": LINEAR, "deep_linear": DEEP_LINEAR, "relu": RELU, "gelu": GELU, "silu": SILU}


class Variant(NamedTuple):
    """What a kernel of attention or decoding is compiled for: everything else it reads from its record."""

    norm: int
    net: int
    rows: int
    """Dims whose vectors are held in registers at once: heads are padded to a multiple of it."""
    wide: bool
    """Whether heads may have more dims than that."""
    lanes: int
    double: bool


TENSOR = np.dtype([(name, np.int64) for name in ("address", "batch", "head", "length", "dim")])
"""A tensor (batch, head, length, dim) within a record: its address, and the strides of its axes in numbers."""


def _record(words: Sequence[str], tensors: Sequence[str] = (), floats: Sequence[str] = ()) -> np.dtype:
    fields: list[tuple] = [(name, np.int64) for name in ("counter", "tasks", *words)]
    fields += [(name, TENSOR) for name in tensors]
    return np.dtype(fields + [(name, np.float64) for name in floats])


ATTENTION = _record(
    [
        # sizes: widths as given and padded to whole rows of registers; keys in a block
        *("batch", "heads", "queries", "keys", "qk_width", "v_width", "qk_padded", "v_padded", "block"),
        # the position of the first query; 0 without a window; dropout, whose threshold is 0 without
        *("causal", "query_offset", "window", "dropout_threshold", "dropout_stream"),
        # a task: some batch entries and a stretch of queries (backward: of keys); `splits` tasks share a batch entry
        *("splits", "batch_step", "length_step"),
        # boolean key mask and its strides
        *("mask", "mask_batch", "mask_key"),
        # relative band (head, band_length), see `attention_stages.band_offset`; without one a row of zeros and step 0
        *("band", "band_step", "band_length"),
        # (batch, head, query): log of the softmax's sum of exponentials, and Σ_key y c dL/dz
        *("saved", "delta"),
        # gradients that several tasks sum up: of q (splits, batch, query, head, qk_padded), of the band (tasks, …)
        *("partial_q", "partial_band"),
    ],
    tensors=("q", "k", "v", "out", "grad", "grad_q", "grad_k", "grad_v"),
    floats=("scale", "keep_scale", "epsilon"),
)
"""Read by `attention_forward`, `attention_delta` and `attention_backward`."""

BLOCK_PART = _record(
    [
        # tokens in all; of each sequence of `length` tokens `taken` from `first` on; of one task, and of
        # those that it works on together
        *("tokens", "taken", "length", "first", "task_tokens", "chunk"),
        # widths: of the model, of a projection, of the heads together, and of the feed-forward before and after its
        # activation, which differ if that is gated
        *("dim", "width", "attended_width", "hidden_width", "inner_width"),
        # rotary positions, or address 0: (position, head_width), cosines beside sines; how many of a projection's first
        # columns they turn
        *("angles", "head_width", "rotated_width"),
        # activations and their gradients, one row per token; without a backward pass to come hidden is 0, and middle
        # is out; grad_x is added to if another launch has filled it
        *("x", "projected", "attended", "middle", "hidden", "out"),
        *("grad_x", "grad_x_begun", "grad_projected", "grad_attended", "grad_middle", "grad_out"),
        # of a LayerNorm: mean and 1 / standard deviation of each token
        "statistics",
        # weights (in panels, see `gemm`) and biases; what each task sums up of their gradients, `part_size` numbers
        *("norm_weight", "norm_bias", "weight", "bias", "output_weight", "output_bias"),
        *("hidden_weight", "hidden_bias", "inner_weight", "inner_bias", "parts", "part_size"),
    ],
    floats=("epsilon",),
)
"""Read by `block_forward` and `block_backward`."""

SUM = _record(["parts", "total", "num_parts", "size", "piece"])
"""Read by `gemm.sum_tasks`: total (size) = Σ parts (num_parts, size), `piece` numbers to a task."""

PACKING = _record([])
"""Read by `gemm.pack_kernels`: one task for each of the PACKING_JOBs that follow it."""
PACKING_JOB = np.dtype([(name, np.int64) for name in ("matrix", "rows", "columns", "panels", "depth", "first")])
"""A matrix (rows, columns) and where its panels go. One of a single row is copied as it is. Depth 0: panels of the
transpose, (rows/16, columns, 16), for products that sum over the columns. Otherwise: panels of the matrix itself,
(columns/16, depth, 16), for products that sum over the rows, which stand there from row `first` on, because other
matrices may share the panels. Of bf16 the middle axis has half as many words, see `factors`."""

LAYER_NORM = np.dtype(
    [(name, np.int64) for name in ("dim", "statistics", "norm_weight", "norm_bias")] + [("epsilon", np.float64)]
)
"""Of one LayerNorm: what `block_stages.measure` and `normalise` read."""

DECODE_CALL = (
    # 1 if a token was not in the vocabulary, and nothing was done
    "refused",
    # rows of a weight whose products are one task
    "piece",
    # sequences, new tokens of each (rows of activations in all), and of which of these there are logits
    *("batch", "new", "rows", "first_kept", "kept"),
    # tokens before the new ones; whether a state stands for them
    *("past", "recurrent"),
    # tokens and their strides
    *("tokens", "token_batch", "token_step"),
    # boolean mask of keys (of new ones if the past is a state), True where not seen
    *("mask", "mask_batch", "mask_key"),
    "logits",
)
"""The first words of a DECODE record: what differs from call to call."""
DECODE = np.dtype(
    [
        (name, np.int64)
        for name in (
            *DECODE_CALL,
            # pairs of words (tasks taken, tasks done), one for each stage
            "stages",
            # sizes; the widths of queries and values are those of one head
            *("dim", "heads", "qk_width", "v_width", "hidden_width", "inner_width"),
            *("outputs", "vocab_size", "num_layers"),
            # embeddings; vectors that are added at each position, which repeat; cosines and sines of each position
            *("embedding", "places", "num_places", "rotations"),
            # bucket of each distance up to num_buckets, or 0
            *("buckets", "num_buckets"),
            # the DECODE_LAYERs
            "layers",
            # activations
            *("x", "normed", "projected", "attended", "hidden", "inner"),
            *("output_weight", "output_bias"),
        )
    ]
    + [("final_norm", LAYER_NORM)]
    + [(name, np.float64) for name in ("scale", "epsilon", "output_scale")]
)
"""Read by `decode.decode`. Addresses are 0 where there is nothing."""

DECODE_LAYER = np.dtype(
    [("attention_norm", LAYER_NORM), ("feedforward_norm", LAYER_NORM)]
    + [
        (name, np.int64)
        for name in (
            # weights as the model has them, (out, in); 0 for a bias that is not there
            *("query_weight", "query_bias", "key_weight", "key_bias", "value_weight", "value_bias"),
            *("output_weight", "output_bias", "hidden_weight", "hidden_bias", "signal_weight"),
            *("inner_weight", "inner_bias", "query_norm", "key_norm", "table"),
            # (batch, head, room, width), of which `past` are filled; or (batch, head, Dk, Dv) before and after
            *("keys", "values", "room", "state", "next_state"),
        )
    ]
    + [(name, np.float64) for name in ("query_epsilon", "key_epsilon")]
)
"""One layer of a DECODE record."""
