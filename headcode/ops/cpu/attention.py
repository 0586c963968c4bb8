"""The fused CPU backend: no tensor of size Tq×Tk, all heads of a pair together, everything recomputed for gradients.

The kernels (`_cpu_forward`, `_cpu_backward`, `_cpu_delta`) are compiled by Numba at first use and cached. They are cut
into tasks by the shapes alone and summed in a fixed order, so results are bitwise the same for any number of threads.

They leave out masked pairs by multiplying with 0, but 0 · NaN is NaN. A masked call whose result has a NaN is therefore
computed again by the chunked backend, which selects.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headcode.jit import address_of, why_disabled
from headcode.ops import chunked
from headcode.ops import dropout as dropout_hash
from headcode.ops.cpu.team import run_native_in_team
from headcode.ops.options import AttentionGradients, AttentionInputs, AttentionOptions, Problem
from headcode.ops.registry import RMS_EPSILON
from headcode.private_api import flash_attention, flash_attention_backward

NORM_CODES = {"none": 0, "rms_head": 1, "softmax": 2}
NET_CODES = {"linear": 0, "deep_linear": 1, "relu": 2, "gelu": 3, "silu": 4}
DTYPES = (torch.float32, torch.float64)
# Found out once: torch.compile can trace neither package searches nor the environment.
_NO_KERNELS = why_disabled()

LANES = 8
BLOCK = 96
"""Keys that are worked on together, at most; measured, see docs/kernels.md."""
TASK_WORK = 2**20
"""Multiplications that are worth a task of their own: some 50 microseconds."""
MOST_BATCH_TASKS = 64
MOST_SPLITS = 8
"""Into how many parts a single batch entry is cut; each costs one more copy of the gradient of q."""


def unsupported(problem: Problem) -> str | None:
    """Why this backend cannot serve a problem, or None."""
    if problem.device != "cpu":
        return f"it runs on the CPU, and the tensors are on {problem.device}"
    if _NO_KERNELS:
        return _NO_KERNELS
    if problem.dtype not in DTYPES:
        return f"it computes in float32 and float64, not {str(problem.dtype).removeprefix('torch.')}"
    options = problem.options
    if options.norm not in NORM_CODES:
        return f"it has the norms {', '.join(NORM_CODES)}, not {options.norm}"
    if options.value_net not in NET_CODES:
        return f"it has the value nets {', '.join(NET_CODES)}, not {options.value_net}"
    if options.pooling != "sum":
        return f"it pools by sum, not by {options.pooling}"
    if problem.mask == "dense":
        return "its masks are causal and per key, not per (query, key)"
    if problem.bias:
        return "its bias is the relative band, not one of size Tq×Tk"
    return None


def saved_shape(batch: int, heads: int, queries: int, norm: str) -> list[int]:
    """Softmax keeps the log of each query's sum of exponentials."""
    return [batch, heads, queries] if norm == "softmax" else [0]


def forward(inputs: AttentionInputs, options: AttentionOptions, *, out: Tensor, saved: Tensor) -> None:
    """Fill `out` (B, H, Tq, Dv) and, for softmax, `saved` (B, H, Tq)."""
    if out.numel() == 0 or inputs.k.shape[2] == 0:
        out.zero_()
        saved.zero_()
        return
    _forward(inputs, options, out, saved)
    if _may_leak(inputs, options, out):
        chunked.forward(inputs, options, out=out, saved=saved)


def _forward(inputs: AttentionInputs, options: AttentionOptions, out: Tensor, saved: Tensor) -> None:
    q, k, v, mask, _, relative_bias = inputs
    if prefers_torch(Problem.of(inputs, options)):
        result, log_sums = flash_attention(q, k, v, options.causal, options.scale)
        out.copy_(result)
        saved.copy_(log_sums)
        return
    q, k, v = (t.resolve_neg() for t in (q, k, v))  # kernels read the numbers that are there
    band = _padded(relative_bias, q, k)
    call = AttentionCall(q, k, v, mask, band, saved, options, _stream(options))
    call.share_out_forward()
    _launch("forward", call, (q, k, v, out))


def _may_leak(inputs: AttentionInputs, options: AttentionOptions, result: Tensor) -> bool:
    """Whether a number that is not finite may have come through a mask: there is one, and the result has a NaN."""
    return (inputs.mask is not None or options.causal) and bool(result.sum().isnan())


def backward(
    grad: Tensor,
    inputs: AttentionInputs,
    options: AttentionOptions,
    *,
    out: Tensor,
    saved: Tensor,
    gradients: AttentionGradients,
) -> None:
    """Fill the gradients of q, k, v and, where asked for, of the band."""
    if out.numel() == 0 or inputs.k.shape[2] == 0:
        for gradient in gradients:
            if gradient is not None:
                gradient.zero_()
        return
    _backward(grad, inputs, options, out, saved, gradients)
    # A pair that leaks has a NaN as the gradient of its score, and that is summed into the gradient of q.
    if _may_leak(inputs, options, gradients.q):
        chunked.backward(grad, inputs, options, out=out, saved=saved, gradients=gradients)


def _backward(
    grad: Tensor,
    inputs: AttentionInputs,
    options: AttentionOptions,
    out: Tensor,
    saved: Tensor,
    gradients: AttentionGradients,
) -> None:
    q, k, v, mask, _, relative_bias = inputs
    grad_q, grad_k, grad_v, _, grad_relative_bias = gradients
    if prefers_torch(Problem.of(inputs, options)):
        by_torch = flash_attention_backward(grad, q, k, v, out, saved, options.causal, options.scale)
        for target, gradient in zip((grad_q, grad_k, grad_v), by_torch, strict=True):
            target.copy_(gradient)
        return
    grad, q, k, v = (t.resolve_neg() for t in (grad, q, k, v))
    band = _padded(relative_bias, q, k)
    call = AttentionCall(q, k, v, mask, band, saved, options, _stream(options))
    tensors = (q, k, v, out, grad, grad_q, grad_k, grad_v)
    if options.norm == "softmax":
        delta = (grad * out).sum(-1).contiguous()  # (B, H, Tq)
        call.fields["delta"] = delta.data_ptr()
        if call.needs_delta_kernel:
            call.share_out_forward()
            _launch("delta", call, tensors)
    num_tasks, num_splits = call.share_out_backward()
    if num_splits > 1:
        parts = q.new_empty(call.partial_q_shape(num_splits))
        call.fields["partial_q"] = parts.data_ptr()
    if grad_relative_bias is not None:
        band_parts = q.new_empty(num_tasks, q.shape[1], call.band_length)
        call.fields["partial_band"] = band_parts.data_ptr()
    _launch("backward", call, tensors)
    if num_splits > 1:
        finish_queries(parts, grad_q, options.scale)
    if grad_relative_bias is not None:
        grad_relative_bias.copy_(_sum_parts(band_parts)[:, 1 : q.shape[2] + k.shape[2]])


def finish_queries(parts: Tensor, grad_q: Tensor, scale: float) -> None:
    """grad_q from what the parts of each batch entry have summed up of it."""
    total = _sum_parts(parts)[:, : grad_q.shape[2], :, : grad_q.shape[3]].transpose(1, 2)
    torch.mul(total, scale, out=grad_q)


TORCH_FROM_WIDTH = 16
"""Forward plus backward, one thread, against torch 2.13: at width 8 ours takes 0.4 to 0.65 of torch's time, from
length 64 to 1024; at 16, 0.9 to 1.4; at 64, 1.3 to 2.2. docs/kernels.md has the table."""


def prefers_torch(problem: Problem) -> bool:
    """Whether torch's own fused attention can serve a call and is faster: the one place where that is decided.

    It is softmax with a linear value net, without dropout of ours, without a band (it would need all of Tq×Tk) and
    without padding (what it answers for a query that sees no key has changed between versions). Its causal mask is
    ours only with as many queries as keys, the first at the first.
    """
    options = problem.options
    if options.norm != "softmax" or options.value_net != "linear" or options.dropout > 0:
        return False
    if problem.mask != "none" or problem.relative_bias:
        return False
    if options.causal and (problem.queries != problem.keys or options.query_offset != 0):
        return False
    return problem.qk_width == problem.v_width and problem.qk_width >= TORCH_FROM_WIDTH


def _stream(options: AttentionOptions) -> int:
    return dropout_hash.stream_number(options.dropout_seed) if options.dropout > 0 else 0


def band_length(queries: int, keys: int) -> int:
    """Of a band as the kernels read it: one number before it and a block after it, so that none reads past an end."""
    return queries + keys + block_of(keys)


def _padded(band: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    if band is None:
        return None
    queries, keys = q.shape[2], k.shape[2]
    padded = q.new_zeros(q.shape[1], band_length(queries, keys))
    padded[:, 1 : queries + keys] = band
    return padded


def block_of(keys: int) -> int:
    """Keys that are worked on together."""
    return min(_round_up(keys, LANES), BLOCK)


_NO_BAND = np.zeros(BLOCK)
"""Without a band, every score starts from this one row of zeros, of whichever type. Plans keep its address for good, so
it is made once; and not by torch, whose default device need not be the CPU."""


class AttentionCall:
    """One call in the kernels' terms. Its tensors may be sections of a program that is planned (`ops.program`)."""

    def __init__(
        self, q: Any, k: Any, v: Any, mask: Tensor | None, band: Any, saved: Any, options: AttentionOptions, stream: Any
    ) -> None:
        self.batch, self.heads, self.queries, qk_width = q.shape
        self.keys, v_width = k.shape[2], v.shape[3]
        self.dtype = q.dtype
        # Rows of one vector each: as many as leave room for two queries' sums in 16 registers.
        self.num_rows = 2 if max(qk_width, v_width) <= 2 or q.dtype == torch.float64 else 4
        self.qk_padded, v_padded = (_round_up(width, self.num_rows) for width in (qk_width, v_width))
        self.block = block_of(self.keys)
        self.work = self.batch * self.queries * self.keys * self.heads * (self.qk_padded + 2 * v_padded)
        self.band_length = 0 if band is None else band_length(self.queries, self.keys)
        self.needs_delta_kernel = options.norm == "softmax" and options.value_net != "linear"
        dropout = options.dropout
        self.fields: dict[str, Any] = {
            "batch": self.batch,
            "heads": self.heads,
            "queries": self.queries,
            "keys": self.keys,
            "qk_width": qk_width,
            "v_width": v_width,
            "qk_padded": self.qk_padded,
            "v_padded": v_padded,
            "block": self.block,
            "norm": NORM_CODES[options.norm],
            "net": NET_CODES[options.value_net],
            "causal": int(options.causal),
            "query_offset": options.query_offset,
            "threshold": dropout_hash.threshold(dropout) if dropout > 0 else 0,
            "stream": stream,
            "mask": 0 if mask is None else mask.data_ptr(),
            "mask_batch": 0 if mask is None or mask.shape[0] == 1 else mask.stride(0),
            "mask_key": 0 if mask is None or mask.shape[3] == 1 else mask.stride(3),
            "band": _NO_BAND.ctypes.data if band is None else band.data_ptr(),
            "band_step": 0 if band is None else 1,
            "band_length": self.band_length,
            "saved": saved.data_ptr(),
            "scale": options.scale,
            "keep_scale": 1 / (1 - dropout),
            "epsilon": RMS_EPSILON,
        }
        self._kept = band, saved, mask  # alive as long as the record that has their addresses

    def share_out_forward(self) -> int:
        """Tasks of the forward pass, and of the softmax's delta."""
        return self._share_out(self.queries, 2, self.work)[0]

    def share_out_backward(self) -> tuple[int, int]:
        """Tasks of the backward pass, and the parts of a batch entry that each sum up a gradient of q."""
        return self._share_out(self.keys, self.block, 3 * self.work)

    def _share_out(self, length: int, unit: int, work: int) -> tuple[int, int]:
        """Cut the work into tasks of some batch entries and a stretch of `length`, a multiple of unit long.

        By the shapes alone: the number of threads must not change what is summed with what.
        """
        num_wanted = max(1, min(MOST_BATCH_TASKS, work // TASK_WORK))
        batch_step = -(-self.batch // min(self.batch, num_wanted))
        num_groups = -(-self.batch // batch_step)
        num_splits = min(MOST_SPLITS, -(-num_wanted // num_groups)) if batch_step == 1 else 1
        length_step = _round_up(-(-length // num_splits), unit)
        num_splits = -(-length // length_step)
        num_tasks = num_groups * num_splits
        self.fields.update(tasks=num_tasks, splits=num_splits, batch_step=batch_step, length_step=length_step)
        return num_tasks, num_splits

    def partial_q_shape(self, num_splits: int) -> tuple[int, ...]:
        return num_splits, self.batch, _round_up(self.queries, 2), self.heads, self.qk_padded

    def kernel(self, name: str) -> int:
        """The address of a kernel, in the variant for this call."""
        return _kernel(name, "_double" if self.dtype == torch.float64 else "_narrow" if self.num_rows == 2 else "")

    def record(self, table: Any) -> list[Any]:
        """The words of a record, whose table of tensors is at that address."""
        from headcode.ops.cpu.packing import SPEC

        return [table if field == "tensors" else self.fields.get(field, 0) for field in SPEC.names or ()]


def table_of(tensors: Sequence[Any]) -> list[Any]:
    """The kernels' table of up to 8 tensors: of each the address and the strides of batch, head, length and dim."""
    words = [word for t in tensors for word in (t.data_ptr(), *t.stride())]
    return words + [0] * (40 - len(words))


def _launch(name: str, call: AttentionCall, tensors: Sequence[Tensor]) -> None:
    from headcode.ops.cpu.packing import SPEC

    table = np.array(table_of(tensors))
    record = np.array([tuple(call.record(table.ctypes.data))], SPEC)
    run_native_in_team(call.kernel(name), record.ctypes.data, min(torch.get_num_threads(), call.fields["tasks"]))


@functools.cache
def _kernel(name: str, variant: str) -> int:
    module = importlib.import_module(f"headcode.ops.cpu.attention_{name}")
    return address_of(getattr(module, f"{name}{variant}_kernel"))


def _sum_parts(parts: Tensor) -> Tensor:
    """The sum over the first axis, always in the same order: torch's depends on the number of threads."""
    from headcode.ops.cpu.packing import sum_parts_kernel

    sum_parts_kernel(parts.view(parts.shape[0], -1).numpy())
    return parts[0]


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
