"""GELU for feed-forward networks, in the tanh form: torch's own, or in training on a CPU one pass for value and slope.

torch's GELU costs as much as the matrix product before it, forward and backward. Ours takes one exponential in the
forward pass, keeps the slope, and its backward pass is a product.
"""

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from headcode.jit import numba_enabled
from headcode.ops.cpu.records import LANES
from headcode.ops.cpu.team import run_in_team
from headcode.ops.registry import gelu as torch_gelu
from headcode.private_api import functional_transforms_active

PIECE = 2**15
"""Numbers that one thread works on at a time: input, value and slope fit in its cache."""


def gelu(x: Tensor, backend: str = "auto") -> Tensor:
    """GELU of every number; `backend="reference"` is torch's own."""
    if backend in ("auto", "cpu") and _has_fast_path(x):
        return _Gelu.apply(x)
    return torch_gelu(x)


def _has_fast_path(x: Tensor) -> bool:
    return (
        x.requires_grad
        and torch.is_grad_enabled()
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.is_contiguous()
        and x.numel() % LANES == 0
        and x.numel() > 0
        and not torch.compiler.is_compiling()
        and not functional_transforms_active()
        and _kernels_enabled()
    )


@functools.cache
def _kernels_enabled() -> bool:
    return numba_enabled()


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        value, slope = torch.empty_like(x), torch.empty_like(x)
        _fill(x, value, slope)
        ctx.save_for_backward(x, slope)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, slope = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives, by a formula that has them
            return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
        return grad * slope


def _fill(x: Tensor, value: Tensor, slope: Tensor) -> None:
    from headcode.ops.cpu.activations import gelu_with_slope

    arrays = [t.detach().view(-1).numpy() for t in (x, value, slope)]
    count = x.numel()
    # Taking the next number is atomic under the GIL, which the kernel itself does not hold.
    pieces = itertools.count()

    def work() -> None:
        while (start := next(pieces) * PIECE) < count:
            gelu_with_slope(*arrays, start, min(start + PIECE, count))

    run_in_team(work, min(torch.get_num_threads(), -(-count // PIECE)))
