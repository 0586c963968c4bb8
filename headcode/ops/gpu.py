"""The fused GPU backend: Triton kernels, no tensor of size Tq×Tk, all heads of a pair together, gradients recomputed.

The kernels (`_gpu_kernels`, made of `_gpu_tiles` and `_gpu_value`) are imported and compiled at the first launch, never
at import, and their tiles are chosen then (`_gpu_tuning`). Without a GPU they run under Triton's interpreter, with
TRITON_INTERPRET=1 set before Python starts: that is how they are tested. They have never run on a GPU; docs/gpu.md says
how to check them on one.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headcode.ops import reference

if TYPE_CHECKING:
    from headcode.ops._gpu_plan import GpuCall
    from headcode.ops.backends import Problem

NORMS = ("none", "rms_head", "softmax")
NETS = ("linear", "deep_linear", "relu", "gelu", "silu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_HEADS = 64
MOST_WIDTH = 128
OLDEST_CAPABILITY = 8

# Found out once: torch.compile can trace neither package searches nor the environment.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def unsupported(problem: Problem) -> str | None:
    """Why this backend cannot serve a problem, or None."""
    if why := _wrong_device(problem.device):
        return why
    if not _HAS_TRITON:
        return "it needs Triton, which is not installed (pip install 'headcode[triton]')"
    if problem.dtype not in DTYPES:
        return f"it computes in float32, bfloat16 and float16, not {str(problem.dtype).removeprefix('torch.')}"
    if problem.norm not in NORMS:
        return f"it has the norms {', '.join(NORMS)}, not {problem.norm}"
    if problem.value_net not in NETS:
        return f"it has the value nets {', '.join(NETS)}, not {problem.value_net}"
    if problem.pooling == "max":
        return "it pools by sum and mean, not by max"
    if problem.dense_bias:
        return "its bias is the relative band, not one of size Tq×Tk"
    if problem.heads > MOST_HEADS:
        return f"it takes up to {MOST_HEADS} heads, not {problem.heads}"
    if max(problem.qk_width, problem.v_width) > MOST_WIDTH:
        return f"it takes heads up to {MOST_WIDTH} wide, not {max(problem.qk_width, problem.v_width)}"
    return None


def _wrong_device(device: str) -> str | None:
    if device == "cpu":
        return None if INTERPRETED else "it runs on NVIDIA GPUs, and the tensors are on cpu"
    if has_no_kernels(device):
        what = f"AMD ROCm {torch.version.hip}" if device == "cuda" else device
        return f"it runs on NVIDIA GPUs, and the tensors are on {what}"
    if INTERPRETED:
        return "TRITON_INTERPRET=1 makes it run on the CPU, and the tensors are on cuda"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if properties.major < OLDEST_CAPABILITY:
        capability = f"{properties.major}.{properties.minor}"
        return f"it needs compute capability {OLDEST_CAPABILITY}.0 or above, and this GPU has {capability}"
    return None


def avoided(problem: Problem) -> str | None:
    """Why `auto` does not take this backend although it can serve, or None."""
    return "Triton's interpreter is for checks; ask for backend='triton' by name" if problem.device == "cpu" else None


def has_no_kernels(device: str) -> bool:
    """Whether tensors are on an accelerator that no fused kernel of ours knows: AMD, Apple, Intel, …"""
    return device != "cpu" and (device != "cuda" or torch.version.hip is not None)


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
    call = _call(q, k, v, mask, relative_bias, saved, options)
    if options["norm"] == "softmax":
        call.run("log_sums")
    call.run("forward", out=out)
    if options["pooling"] == "mean":
        out.div_(key_count(q, k, mask, options))


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
    call = _call(q, k, v, mask, relative_bias, saved, options)
    if options["norm"] == "softmax":
        call.delta = torch.empty_like(saved)
        if options["value_net"] == "linear":
            torch.sum(grad.float() * out.float(), -1, out=call.delta)
    if options["pooling"] == "mean":
        grad = (grad / key_count(q, k, mask, options)).to(grad.dtype)
    call.grad = call.laid_out(grad, call.v_wide)
    if options["norm"] == "softmax" and options["value_net"] != "linear":
        call.run("delta")
    call.run("query", grad_q=grad_q)
    call.run("key", grad_k=grad_k, grad_v=grad_v)
    if grad_relative_bias is not None:
        grad_relative_bias.copy_(call.band_gradient())


def _call(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, band: Tensor | None, saved: Tensor, options: dict[str, Any]
) -> GpuCall:
    from headcode.ops._gpu_plan import GpuCall

    return GpuCall(q, k, v, mask, None if band is None else band.contiguous(), saved, options)


def key_count(q: Tensor, k: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    """How many keys each query sees, at least 1, in O(T) memory unless the mask itself is larger."""
    num_queries, num_keys, offset = q.shape[2], k.shape[2], options["query_offset"]
    numbers = torch.empty(0, dtype=torch.float32, device=q.device)
    if mask is not None and mask.shape[2] > 1:
        visible = reference.visible_pairs(mask, options["causal"], num_queries, num_keys, offset, q.device)
        return reference.key_count(visible, num_keys, numbers)
    if not options["causal"]:
        return reference.key_count(mask, num_keys, numbers)
    seen = (torch.arange(num_queries, device=q.device) + offset + 1).clamp(0, num_keys)  # (Tq,)
    if mask is not None:
        up_to = torch.nn.functional.pad(mask.expand(-1, -1, -1, num_keys).cumsum(-1), (1, 0))
        seen = up_to[:, :, 0, seen]  # (B or 1, 1, Tq)
    return seen.clamp(min=1).to(numbers)[..., None]
