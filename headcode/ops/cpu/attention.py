"""The CPU backend of the attention op: no tensor of size Tq×Tk, everything recomputed for gradients.

The kernels leave out masked pairs by multiplying with 0, but 0 · NaN is NaN. A masked call whose result has a NaN is
therefore computed again by the chunked backend, which selects.
"""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from headcode.jit import why_disabled
from headcode.ops import chunked, pooling
from headcode.ops.cpu.attention_plan import AttentionPlan, band_length, dropout_stream
from headcode.ops.cpu.launch import Area, BoundProgram, Program, Section, whole
from headcode.ops.cpu.records import NET_CODES, NORM_CODES
from headcode.ops.options import AttentionGradients, AttentionInputs, AttentionOptions, Problem
from headcode.private_api import processor_features

DTYPES = (torch.float32, torch.float64)
# Found out once: torch.compile can trace neither package searches nor the environment.
NO_KERNELS = why_disabled()


@functools.cache
def why_no_bf16() -> str | None:
    """Why products of bf16 numbers cannot be computed by kernels here, or None."""
    if NO_KERNELS:
        return f"there are no kernels: {NO_KERNELS}"
    return None if "+avx512bf16" in processor_features() else "the processor has no avx512_bf16"


def unsupported(problem: Problem) -> str | None:
    """Why this backend cannot serve a problem, or None."""
    if problem.device != "cpu":
        return f"it runs on the CPU, and the tensors are on {problem.device}"
    if NO_KERNELS:
        return NO_KERNELS
    if problem.dtype not in DTYPES:
        return f"it computes in float32 and float64, not {str(problem.dtype).removeprefix('torch.')}"
    options = problem.options
    if options.norm not in NORM_CODES:
        return f"it has the norms {', '.join(NORM_CODES)}, not {options.norm}"
    if options.value_net not in NET_CODES:
        return f"it has the value nets {', '.join(NET_CODES)}, not {options.value_net}"
    if options.pooling == "max":
        return "it pools by sum, mean and sqrt, not by max"
    if problem.mask == "dense":
        return "its masks are causal and per key, not per (query, key)"
    if problem.bias:
        return "its bias is the relative band, not one of size Tq×Tk"
    return None


def forward(inputs: AttentionInputs, options: AttentionOptions, *, out: Tensor, saved: Tensor) -> None:
    """Fill `out` (B, H, Tq, Dv) and, for softmax, `saved` (B, H, Tq)."""
    plan, program = _bind(inputs, options, {"out": out, "saved": saved})
    plan.run_forward(program, pooling.divisor(inputs, options))
    if _may_leak(inputs, options, out):
        chunked.forward(inputs, options, out=out, saved=saved)


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
    divisor = pooling.divisor(inputs, options)
    # The plan divides in place, and the gradient is not ours to change.
    unpooled = grad.resolve_neg() if divisor is None else grad.clone()
    buffers = {"grad_q": gradients.q, "grad_k": gradients.k, "grad_v": gradients.v}
    tensors = {"out": out, "saved": saved, "grad": unpooled, **buffers}
    plan, program = _bind(inputs, options, tensors, gradients.relative_bias is not None)
    plan.run_backward(program, divisor)
    if gradients.relative_bias is not None and plan.grad_band is not None:
        gradients.relative_bias.copy_(program.view(plan.grad_band)[:, 1 : plan.queries + plan.keys])
    # A pair that leaks has a NaN as the gradient of its score, and that is summed into the gradient of q.
    if _may_leak(inputs, options, gradients.q):
        chunked.backward(grad, inputs, options, out=out, saved=saved, gradients=gradients)


def _may_leak(inputs: AttentionInputs, options: AttentionOptions, result: Tensor) -> bool:
    """Whether a number that is not finite may have come through a mask: there is one, and the result has a NaN."""
    return (inputs.mask is not None or options.causal or options.window is not None) and bool(result.sum().isnan())


def _bind(
    inputs: AttentionInputs, options: AttentionOptions, tensors: dict[str, Tensor], band_needs_grad: bool = False
) -> tuple[AttentionPlan, BoundProgram]:
    """The plan for a call of these shapes, and its launches with this call's addresses."""
    q, k, v, mask, _, relative_bias, _ = inputs
    # Kernels read the numbers that are in memory, without a sign that is yet to be applied.
    tensors |= {"q": q.resolve_neg(), "k": k.resolve_neg(), "v": v.resolve_neg()}
    if mask is not None:
        tensors["mask"] = mask
    if relative_bias is not None:
        queries, keys = q.shape[2], k.shape[2]
        band = q.new_zeros(q.shape[1], band_length(queries, keys))
        band[:, 1 : queries + keys] = relative_bias
        tensors["band"] = band
    sections = tuple([(name, whole(name, tensor)) for name, tensor in tensors.items()])
    plan, program, scratch_size = _plan(sections, dataclasses.replace(options, dropout_seed=0), band_needs_grad)
    if scratch_size:
        tensors["scratch"] = q.new_empty(scratch_size)
    return plan, program.bind(tensors, dropout_stream=dropout_stream(options))


@functools.lru_cache(maxsize=256)
def _plan(
    sections: tuple[tuple[str, Section], ...], options: AttentionOptions, band_needs_grad: bool
) -> tuple[AttentionPlan, Program, int]:
    """A plan, its program, and the numbers of scratch memory that this needs."""
    tensors: dict[str, Any] = dict(sections)
    plan, program = AttentionPlan(tensors, options), Program()
    if "grad" not in tensors:
        plan.plan_forward(program)
        return plan, program, 0
    scratch = Area("scratch", tensors["q"].dtype)
    plan.plan_backward(program, scratch, band_needs_grad=band_needs_grad)
    return plan, program, scratch.size
