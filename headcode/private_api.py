"""What headcode uses of other packages although they do not promise to keep it: all of it, in this one file.

Nothing public answers these questions. Tested with torch 2.13.0; a name that another version lacks is mended here.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks

__all__ = ["FakeTensor", "has_global_hooks"]


def forward_mode_active() -> bool:
    """Whether derivatives are computed forward: inside `torch.autograd.forward_ad.dual_level`."""
    return forward_ad._current_level >= 0


def functional_transforms_active() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp, …) is at work."""
    return torch._C._are_functorch_transforms_active()


def dispatch_modes_active() -> bool:
    """Whether a TorchDispatchMode watches or replaces operations: fake tensors, tracing, functional transforms."""
    return bool(torch._C._len_torch_dispatch_stack()) or torch._C._functorch.peek_interpreter_stack() is not None


def driver_version() -> str:
    """Of the CUDA driver."""
    return str(getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")())


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """torch's fused softmax attention on the CPU: output, and the log of each query's sum of exponentials."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; `out` and `log_sums` are what `flash_attention` gave."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, log_sums, 0.0, causal, scale=scale
    )
