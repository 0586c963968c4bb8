"""The fused CPU backend: no tensor of size Tq×Tk, all heads of a pair together, everything recomputed for gradients.

The kernels (`_cpu_forward`, `_cpu_backward`, `_cpu_delta`) are compiled by Numba at first use and cached. They are cut
into tasks by the shapes alone and summed in a fixed order, so results are bitwise the same for any number of threads.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headcode.jit import address_of, why_disabled
from headcode.ops import dropout as dropout_hash
from headcode.ops.registry import RMS_EPSILON
from headcode.ops.team import run_native_in_team

if TYPE_CHECKING:
    from headcode.ops.backends import Problem

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
    if problem.norm not in NORM_CODES:
        return f"it has the norms {', '.join(NORM_CODES)}, not {problem.norm}"
    if problem.value_net not in NET_CODES:
        return f"it has the value nets {', '.join(NET_CODES)}, not {problem.value_net}"
    if problem.pooling != "sum":
        return f"it pools by sum, not by {problem.pooling}"
    if problem.mask == "dense":
        return "its masks are causal and per key, not per (query, key)"
    if problem.dense_bias:
        return "its bias is the relative band, not one of size Tq×Tk"
    return None


def saved_shape(batch: int, heads: int, queries: int, norm: str) -> list[int]:
    """Softmax keeps the log of each query's sum of exponentials."""
    return [batch, heads, queries] if norm == "softmax" else [0]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    relative_bias: Tensor | None,
    *,
    out: Tensor,
    saved: Tensor,
    **options: Any,
) -> None:
    """Fill `out` (B, H, Tq, Dv) and, for softmax, `saved` (B, H, Tq)."""
    if out.numel() == 0 or k.shape[2] == 0:
        out.zero_()
        saved.zero_()
        return
    if _served_by_torch(q, k, v, mask, relative_bias, options):
        result, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, options["causal"], scale=options["scale"]
        )
        out.copy_(result)
        saved.copy_(log_sums)
        return
    call = _Call(q, k, v, mask, relative_bias, saved, options)
    call.tensors[:4] = [_row(t) for t in (q, k, v, out)]
    call.share_out(call.queries, 2, call.work)
    call.launch("forward")


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    relative_bias: Tensor | None,
    *,
    out: Tensor,
    saved: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    grad_bias: Tensor | None,
    grad_relative_bias: Tensor | None,
    **options: Any,
) -> None:
    """Fill the gradients of q, k, v and, where asked for, of the band."""
    if out.numel() == 0 or k.shape[2] == 0:
        for gradient in (grad_q, grad_k, grad_v, grad_relative_bias):
            if gradient is not None:
                gradient.zero_()
        return
    if _served_by_torch(q, k, v, mask, relative_bias, options):
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, saved, 0.0, options["causal"], scale=options["scale"]
        )
        for target, gradient in zip((grad_q, grad_k, grad_v), gradients, strict=True):
            target.copy_(gradient)
        return
    call = _Call(q, k, v, mask, relative_bias, saved, options)
    call.tensors[:] = [_row(t) for t in (q, k, v, out, grad, grad_q, grad_k, grad_v)]
    if options["norm"] == "softmax":
        delta = (grad * out).sum(-1).contiguous()  # (B, H, Tq)
        call.fields["delta"] = delta.data_ptr()
        if options["value_net"] != "linear":
            call.share_out(call.queries, 2, call.work)
            call.launch("delta")
    num_tasks, num_splits = call.share_out(k.shape[2], call.block, 3 * call.work)
    if num_splits > 1:
        parts = q.new_empty(num_splits, q.shape[0], _round_up(q.shape[2], 2), q.shape[1], call.qk_padded)
        call.fields["partial_q"] = parts.data_ptr()
    if grad_relative_bias is not None:
        band_parts = q.new_empty(num_tasks, q.shape[1], call.band_length)
        call.fields["partial_band"] = band_parts.data_ptr()
    call.launch("backward")
    if num_splits > 1:
        total = _sum_parts(parts)[:, : q.shape[2], :, : q.shape[3]].transpose(1, 2)
        torch.mul(total, options["scale"], out=grad_q)
    if grad_relative_bias is not None:
        grad_relative_bias.copy_(_sum_parts(band_parts)[:, 1 : q.shape[2] + k.shape[2]])


TORCH_FROM_WIDTH = 16
"""Forward plus backward, one thread, against torch 2.13: at width 8 ours takes 0.4 to 0.65 of torch's time, from
length 64 to 1024; at 16, 0.9 to 1.4; at 64, 1.3 to 2.2. docs/kernels.md has the table."""


def prefers_torch(
    *, norm: str, value_net: str, qk_width: int, v_width: int, causal: bool, square: bool, plain: bool
) -> bool:
    """Whether torch's own fused attention can serve a call and is faster: the one place where that is decided.

    It is softmax with a linear value net, `plain`: without dropout of ours, without a band (it would need all of Tq×Tk)
    and without padding (what it answers for a query that sees no key has changed between versions). Its causal mask
    is ours only if the call is `square`: as many queries as keys, the first at the first.
    """
    if norm != "softmax" or value_net != "linear" or not plain or (causal and not square):
        return False
    return qk_width == v_width and qk_width >= TORCH_FROM_WIDTH


def _served_by_torch(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, band: Tensor | None, options: dict[str, Any]
) -> bool:
    return prefers_torch(
        norm=options["norm"],
        value_net=options["value_net"],
        qk_width=q.shape[3],
        v_width=v.shape[3],
        causal=options["causal"],
        square=q.shape[2] == k.shape[2] and options["query_offset"] == 0,
        plain=mask is None and band is None and options["dropout"] == 0,
    )


def _row(t: Tensor) -> tuple[int, ...]:
    return (t.data_ptr(), *t.stride())


class _Call:
    """One call in the kernels' terms: a record of numbers and addresses, and a table of tensors."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        band: Tensor | None,
        saved: Tensor,
        options: dict[str, Any],
    ) -> None:
        batch, heads, self.queries, qk_width = q.shape
        keys, v_width = k.shape[2], v.shape[3]
        self.dtype = q.dtype
        self.batch = batch
        # Rows of one vector each: as many as leave room for two queries' sums in 16 registers.
        self.num_rows = 2 if max(qk_width, v_width) <= 2 or q.dtype == torch.float64 else 4
        self.qk_padded, v_padded = (_round_up(width, self.num_rows) for width in (qk_width, v_width))
        self.block = min(_round_up(keys, LANES), BLOCK)
        self.work = batch * self.queries * keys * heads * (self.qk_padded + 2 * v_padded)
        if band is None:
            # Every score starts from this one row of zeros.
            self.band_length = 0
            self.band = q.new_zeros(self.block)
        else:
            self.band_length = self.queries + keys + self.block
            self.band = q.new_zeros(heads, self.band_length)
            self.band[:, 1 : self.queries + keys] = band
        dropout = options["dropout"]
        self.tensors = np.zeros((8, 5), np.int64)
        self.fields = {
            "batch": batch,
            "heads": heads,
            "queries": self.queries,
            "keys": keys,
            "qk_width": qk_width,
            "v_width": v_width,
            "qk_padded": self.qk_padded,
            "v_padded": v_padded,
            "block": self.block,
            "norm": NORM_CODES[options["norm"]],
            "net": NET_CODES[options["value_net"]],
            "causal": options["causal"],
            "query_offset": options["query_offset"],
            "threshold": dropout_hash.threshold(dropout) if dropout > 0 else 0,
            "stream": dropout_hash.stream_number(options["dropout_seed"]) if dropout > 0 else 0,
            "mask": 0 if mask is None else mask.data_ptr(),
            "mask_batch": 0 if mask is None or mask.shape[0] == 1 else mask.stride(0),
            "mask_key": 0 if mask is None or mask.shape[3] == 1 else mask.stride(3),
            "band": self.band.data_ptr(),
            "band_step": 0 if band is None else 1,
            "band_length": self.band_length,
            "saved": saved.data_ptr(),
            "scale": options["scale"],
            "keep_scale": 1 / (1 - dropout),
            "epsilon": RMS_EPSILON,
        }

    def share_out(self, length: int, unit: int, work: int) -> tuple[int, int]:
        """Cut the work into tasks of some batch entries and a stretch of `length`, a multiple of unit long.

        By the shapes alone: the number of threads must not change what is summed with what.
        """
        num_wanted = max(1, min(MOST_BATCH_TASKS, work // TASK_WORK))
        batch_step = -(-self.batch // min(self.batch, num_wanted))
        num_groups = -(-self.batch // batch_step)
        num_splits = min(MOST_SPLITS, -(-num_wanted // num_groups)) if batch_step == 1 else 1
        length_step = _round_up(-(-length // num_splits), unit)
        num_splits = -(-length // length_step)
        self.fields.update(
            tasks=num_groups * num_splits, splits=num_splits, batch_step=batch_step, length_step=length_step
        )
        return num_groups * num_splits, num_splits

    def launch(self, name: str) -> None:
        variant = "_double" if self.dtype == torch.float64 else "_narrow" if self.num_rows == 2 else ""
        record, kernel = _kernel(name, variant)
        self.fields["tensors"] = self.tensors.ctypes.data
        spec = np.array([tuple([self.fields.get(field, 0) for field in record.names or ()])], record)
        run_native_in_team(kernel, spec.ctypes.data, min(torch.get_num_threads(), self.fields["tasks"]))


@functools.cache
def _kernel(name: str, variant: str) -> tuple[np.dtype[Any], int]:
    """The record that describes a call, and the address of a kernel."""
    from headcode.ops._cpu_packing import SPEC

    module = importlib.import_module(f"headcode.ops._cpu_{name}")
    return SPEC, address_of(getattr(module, f"{name}{variant}_kernel"))


def _sum_parts(parts: Tensor) -> Tensor:
    """The sum over the first axis, always in the same order: torch's depends on the number of threads."""
    from headcode.ops._cpu_packing import sum_parts_kernel

    sum_parts_kernel(parts.view(parts.shape[0], -1).numpy())
    return parts[0]


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
