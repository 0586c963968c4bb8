"""What Python and the kernels agree on: widths of vectors, codes of norms and value nets, and the records of launches.

A record is a row of 64-bit words: all that a kernel is told about one launch. The kernel gets its address and nothing
else. The first word counts the tasks that threads have taken so far. An address is 0 where there is nothing. Needs no
Numba.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

LANES = 8
"""Numbers in one vector: the whole package is compiled for this width."""
COLUMNS = 2 * LANES
"""Columns of a tile of a matrix product: all widths of a fused block are multiples of it."""
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
        # codes of the norm and the value net; the position of the first query; dropout, whose threshold is 0 without
        *("norm", "net", "causal", "query_offset", "dropout_threshold", "dropout_stream"),
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
