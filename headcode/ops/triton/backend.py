"""The fused GPU backend: Triton kernels, no tensor of size Tq×Tk, all heads of a pair together, gradients recomputed.

Without a GPU the kernels run under Triton's interpreter, with TRITON_INTERPRET=1 set before Python starts: that is how
they are tested. They have never run on a GPU; docs/gpu.md says how to check them on one.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from headcode.ops import pooling
from headcode.ops.options import AttentionGradients, AttentionInputs, AttentionOptions, Problem

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
    options = problem.options
    if options.norm not in NORMS:
        return f"it has the norms {', '.join(NORMS)}, not {options.norm}"
    if options.value_net not in NETS:
        return f"it has the value nets {', '.join(NETS)}, not {options.value_net}"
    if options.pooling == "max":
        return "it pools by sum, mean and sqrt, not by max"
    if options.window is not None:
        return "its masks are causal, per key and per pair, not a window"
    if problem.bias:
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


def forward(inputs: AttentionInputs, options: AttentionOptions, *, out: Tensor, saved: Tensor) -> None:
    """Fill `out` (B, H, Tq, Dv) and, for softmax, `saved` (B, H, Tq)."""
    from headcode.ops.triton.plan import TritonCall

    call = TritonCall(inputs, options, saved)
    if options.norm == "softmax":
        call.run("log_sums")
    call.run("forward", out=out)
    if (divisor := pooling.divisor(inputs, options)) is not None:
        out.div_(divisor)


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
    from headcode.ops.triton.plan import TritonCall

    call = TritonCall(inputs, options, saved)
    two_layer = options.value_net != "linear"
    if options.norm == "softmax":
        call.delta = torch.empty_like(saved)
        if not two_layer:
            torch.sum(grad.float() * out.float(), -1, out=call.delta)
    if (divisor := pooling.divisor(inputs, options)) is not None:
        grad = (grad / divisor).to(grad.dtype)
    call.grad = call.laid_out(grad, call.v_wide)
    if options.norm == "softmax" and two_layer:
        call.run("delta")
    call.run("query", grad_q=gradients.q)
    call.run("key", grad_k=gradients.k, grad_v=gradients.v)
    if gradients.relative_bias is not None:
        gradients.relative_bias.copy_(call.band_gradient())
