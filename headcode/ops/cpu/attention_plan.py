"""One attention call in the kernels' terms: its launches, forward and backward, for the op and for the fused block.

Backward, in this order: torch computes Δ = g·o for the softmax, and for its two-layer value nets a kernel adds the rest
(`attention_delta`); the backward kernel fills the gradients of keys and values and, if a single task has all of a batch
entry's keys, of the queries; what several tasks have summed up is added in a fixed order. Work is cut into tasks by the
shapes alone, so that the number of threads does not change what is summed with what.
"""

import functools
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headcode.ops import dropout as dropout_hash
from headcode.ops.cpu import records
from headcode.ops.cpu.launch import Area, BoundProgram, Program, Section, Value, Word, record
from headcode.ops.cpu.library import KernelName
from headcode.ops.cpu.records import BLOCK, LANES, NET_CODES, NORM_CODES, Variant
from headcode.ops.options import AttentionOptions, Problem
from headcode.ops.registry import RMS_EPSILON
from headcode.private_api import flash_attention, flash_attention_backward, processor_features

TASK_WORK = 2**20
"""Multiplications that are worth a task of their own: some 50 microseconds."""
MOST_BATCH_TASKS = 64
MOST_SPLITS = 8
"""Into how many parts a single batch entry is cut; each costs one more copy of the gradient of q."""
TORCH_FROM_WIDTH = 16
"""Forward plus backward, one thread, against torch 2.13: at width 8 ours takes 0.4 to 0.65 of torch's time, from
length 64 to 1024; at 16, 0.9 to 1.4; at 64, 1.3 to 2.2. docs/kernels.md has the table."""

_NO_BAND = np.zeros(BLOCK)
"""Without a band, every score starts from this one row of zeros, of whichever type. Plans keep its address for good, so
it is made once; and not by torch, whose default device need not be the CPU."""


def prefers_torch(problem: Problem) -> bool:
    """Whether torch's own fused attention can serve a call and is faster: the one place where that is decided.

    It is softmax with a linear value net and a sum over keys, without dropout of ours, without a window or a band (it
    would need all of Tq×Tk) and without padding (what it answers for a query that sees no key has changed between
    versions). Its causal mask is ours only with as many queries as keys, the first at the first.
    """
    options = problem.options
    if options.norm != "softmax" or options.value_net != "linear" or options.pooling != "sum":
        return False
    if options.dropout > 0 or options.window is not None:
        return False
    if problem.mask != "none" or problem.relative_bias:
        return False
    if options.causal and (problem.queries != problem.keys or options.query_offset != 0):
        return False
    return problem.qk_width == problem.v_width and problem.qk_width >= TORCH_FROM_WIDTH


def saved_shape(batch: int, heads: int, queries: int, norm: str) -> list[int]:
    """Softmax keeps the log of each query's sum of exponentials."""
    return [batch, heads, queries] if norm == "softmax" else [0]


def band_length(queries: int, keys: int) -> int:
    """Of a band as the kernels read it: one number before it and a block after it, so that none reads past an end."""
    return queries + keys + _block_of(keys)


def dropout_stream(options: AttentionOptions) -> int:
    """What a plan leaves open besides addresses."""
    return dropout_hash.stream_number(options.dropout_seed) if options.dropout > 0 else 0


class AttentionPlan:
    """The launches of one call, for any dropout seed.

    Its `tensors` are q, k, v, out and saved, mask and band if there are any, and for a backward pass grad, grad_q,
    grad_k and grad_v.
    """

    def __init__(self, tensors: Mapping[str, Section], options: AttentionOptions) -> None:
        self.tensors, self.options = tensors, options
        q, mask, band = tensors["q"], tensors.get("mask"), tensors.get("band")
        self.batch, self.heads, self.queries, qk_width = q.shape
        self.keys, v_width = tensors["v"].shape[2:]
        self.by_torch = prefers_torch(
            Problem(
                *(self.batch, self.heads, self.queries, self.keys, qk_width, v_width, q.dtype, "cpu"),
                *("none" if mask is None else "key_padding", False, band is not None, options),
            )
        )
        self.needs_delta_kernel = options.norm == "softmax" and options.value_net != "linear"
        double = q.dtype == torch.float64
        # Rows of one vector each: as many as leave room for two queries' sums in 16 registers.
        num_rows = 2 if max(qk_width, v_width) <= 2 or double else 4
        self.qk_padded, v_padded = (_round_up(width, num_rows) for width in (qk_width, v_width))
        self.variant = Variant(
            norm=NORM_CODES[options.norm],
            net=NET_CODES[options.value_net],
            rows=num_rows,
            wide=max(self.qk_padded, v_padded) > num_rows,
            lanes=LANES if double else float32_lanes(),
            double=double,
        )
        self.block = _block_of(self.keys)
        self.work = self.batch * self.queries * self.keys * self.heads * (self.qk_padded + 2 * v_padded)
        self.fields: dict[str, Word] = {
            **{name: section for name, section in tensors.items() if name in (records.ATTENTION.names or ())},
            "batch": self.batch,
            "heads": self.heads,
            "queries": self.queries,
            "keys": self.keys,
            "qk_width": qk_width,
            "v_width": v_width,
            "qk_padded": self.qk_padded,
            "v_padded": v_padded,
            "block": self.block,
            "causal": options.causal,
            "query_offset": options.query_offset,
            "window": options.window or 0,
            "dropout_threshold": dropout_hash.threshold(options.dropout) if options.dropout > 0 else 0,
            "dropout_stream": Value("dropout_stream"),
            "mask_batch": 0 if mask is None or mask.shape[0] == 1 else mask.strides[0],
            "mask_key": 0 if mask is None or mask.shape[3] == 1 else mask.strides[3],
            "band": _NO_BAND.ctypes.data if band is None else band,
            "band_step": int(band is not None),
            "band_length": 0 if band is None else band.shape[1],
            "scale": float(options.scale),
            "keep_scale": 1 / (1 - options.dropout),
            "epsilon": RMS_EPSILON,
        }

    def plan_forward(self, program: Program) -> None:
        if not self.by_torch:
            tasks = self._tasks(self.queries, 2, self.work)
            given = {name: word for name, word in self.fields.items() if not name.startswith("grad")}
            self._launch(program, "attention", "attention_forward", given, **tasks)

    def run_forward(self, program: BoundProgram, divisor: Tensor | None = None) -> None:
        """Fill out, and for softmax `saved`; `divisor` is what pooling divides by, if anything."""
        out = program.view(self.tensors["out"])
        if not self.by_torch:
            program.run("attention")
            if divisor is not None:
                out.div_(divisor)
            return
        q, k, v, saved = (program.view(self.tensors[name]) for name in ("q", "k", "v", "saved"))
        result, log_sums = flash_attention(q, k, v, self.options.causal, self.options.scale)
        out.copy_(result)
        saved.copy_(log_sums)

    def plan_backward(self, program: Program, scratch: Area, *, band_needs_grad: bool) -> None:
        """Takes from `scratch` what the gradients need in between."""
        self.delta = self.partial_q = self.sum_q = self.grad_band = None
        if self.by_torch:
            return
        if self.options.norm == "softmax":
            self.fields["delta"] = self.delta = scratch.take(self.batch, self.heads, self.queries)
        if self.needs_delta_kernel:
            self._launch(program, "delta", "attention_delta", self.fields, **self._tasks(self.queries, 2, self.work))
        tasks = self._tasks(self.keys, self.block, 3 * self.work)
        if tasks["splits"] > 1:
            shape = (self.batch, _round_up(self.queries, 2), self.heads, self.qk_padded)
            self.fields["partial_q"] = self.partial_q = scratch.take(tasks["splits"], *shape)
            self.sum_q = scratch.take(*shape)
            program.launch_sum("sum of queries", self.partial_q, self.sum_q)
        if band_needs_grad:
            band = self.tensors["band"]
            self.fields["partial_band"] = parts = scratch.take(tasks["tasks"], *band.shape)
            self.grad_band = scratch.take(*band.shape)
            program.launch_sum("sum of bands", parts, self.grad_band)
        self._launch(program, "attention", "attention_backward", self.fields, **tasks)

    def run_backward(self, program: BoundProgram, divisor: Tensor | None = None) -> None:
        """Fill grad_q, grad_k, grad_v and, as the section `grad_band`, the gradient of the band.

        Where pooling divides, `grad` is divided in place.
        """
        grad, out = program.view(self.tensors["grad"]), program.view(self.tensors["out"])
        grad_q = program.view(self.tensors["grad_q"])
        if self.by_torch:
            q, k, v, saved = (program.view(self.tensors[name]) for name in ("q", "k", "v", "saved"))
            found = flash_attention_backward(grad, q, k, v, out, saved, self.options.causal, self.options.scale)
            for name, gradient in zip(("grad_q", "grad_k", "grad_v"), found, strict=True):
                program.view(self.tensors[name]).copy_(gradient)
            return
        if self.delta is not None:
            torch.sum(grad * out, -1, out=program.view(self.delta))  # the same before and after the division
        if divisor is not None:
            grad.div_(divisor)
        if self.needs_delta_kernel:
            program.run("delta")
        program.run("attention")
        if self.sum_q is not None:
            program.run("sum of queries")
            total = program.view(self.sum_q)[:, : self.queries, :, : grad_q.shape[3]].transpose(1, 2)
            torch.mul(total, self.options.scale, out=grad_q)
        if self.grad_band is not None:
            program.run("sum of bands")

    def _launch(
        self, program: Program, name: str, module: str, fields: dict[str, Word], *, tasks: int, **work: int
    ) -> None:
        words = record(records.ATTENTION, **fields, **work)
        program.launch(name, KernelName(module, "KERNELS", self.variant), words, tasks)

    def _tasks(self, length: int, unit: int, work: int) -> dict[str, int]:
        """Cut the work into tasks of some batch entries and a stretch of `length`, a multiple of unit long."""
        num_wanted = max(1, min(MOST_BATCH_TASKS, work // TASK_WORK))
        batch_step = -(-self.batch // min(self.batch, num_wanted))
        num_groups = -(-self.batch // batch_step)
        num_splits = min(MOST_SPLITS, -(-num_wanted // num_groups)) if batch_step == 1 else 1
        length_step = _round_up(-(-length // num_splits), unit)
        num_splits = -(-length // length_step)
        return {
            "tasks": num_groups * num_splits,
            "splits": num_splits,
            "batch_step": batch_step,
            "length_step": length_step,
        }


@functools.cache
def float32_lanes() -> int:
    """Numbers in a vector of the float32 kernels: a whole register of AVX-512, elsewhere LANES."""
    return 2 * LANES if "+avx512f" in processor_features().split(",") else LANES


def _block_of(keys: int) -> int:
    """Keys that are worked on together: whole vectors, of whichever length."""
    return min(_round_up(keys, 2 * LANES), BLOCK)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
