"""What headcode uses of other packages although they do not promise to keep it: all of it, in this one file.

Nothing public answers these questions. Tested with torch 2.13.0, Numba 0.68.1 and llvmlite 0.50.0; a name that another
version lacks is mended here. Neither package is imported before it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def kernel_address(kernel: Any, signature: tuple[Any, ...]) -> int:
    """The address of a compiled kernel of Numba, as C would call it. `numba.cfunc` is public but has no cache."""
    compiled = kernel.overloads[signature]
    return compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name)


def set_kernel_cache(kernel: Any, cache: Any) -> None:
    """Have a kernel of Numba ask this cache, which must have what `headcode.jit` gives it, in place of Numba's own."""
    kernel._cache = cache


def kernel_cache(kernel: Any) -> Any:
    """What `set_kernel_cache` gave a kernel, or Numba's own."""
    return kernel._cache


def kernel_target(kernel: Any) -> Any:
    """What a kernel of Numba is compiled for, as its cache is told."""
    return kernel.targetctx


def pickle_kernel(compiled: Any) -> bytes | None:
    """A compiled kernel in bytes; None if it holds addresses of this process, of no use to another."""
    from numba.core import serialize

    held = compiled.lifted or compiled.library.has_dynamic_globals
    return None if held else serialize.dumps(compiled._reduce())


def rebuild_kernel(target_context: Any, reduced: Any) -> Any:
    """The compiled kernel of what `pickle_kernel` put into bytes."""
    from numba.core.compiler import CompileResult

    return CompileResult._rebuild(target_context, *reduced)


def processor_features() -> str:
    """The features of the processor that Numba compiles for, as LLVM writes them: +avx2,-avx512f,…"""
    from numba.core.registry import cpu_target

    return str(cpu_target.target_context.codegen().magic_tuple()[2])


def array_data(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    """The pointer to an array's first number, in code that an intrinsic of Numba generates."""
    return context.make_array(array_type)(context, builder, array).data


def fake_tensor_type() -> type[Tensor]:
    """What tensors without numbers are, as torch.compile makes them."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def has_global_hooks() -> bool:
    """Whether hooks of all modules are set."""
    from torch.nn.modules import module

    return module._has_any_global_hook()


def forward_mode_active() -> bool:
    """Whether derivatives are computed forward: inside `torch.autograd.forward_ad.dual_level`."""
    from torch.autograd import forward_ad

    return forward_ad._current_level >= 0


def functional_transforms_active() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp, …) is at work."""
    import torch

    return torch._C._are_functorch_transforms_active()


def onnx_export_active() -> bool:
    """Whether a model is being exported to ONNX, by either exporter; torch.compile need not ask."""
    import sys

    import torch

    # To ask torch would load its exporter, which nobody who exports nothing needs.
    exporters = ("torch.onnx._internal.exporter._flags", "torch.onnx._internal.torchscript_exporter._globals")
    if torch.compiler.is_dynamo_compiling() or not any(name in sys.modules for name in exporters):
        return False
    return torch.onnx.is_in_onnx_export()


def dispatch_modes_active() -> bool:
    """Whether a TorchDispatchMode watches or replaces operations: fake tensors, tracing, functional transforms."""
    import torch

    return bool(torch._C._len_torch_dispatch_stack()) or torch._C._functorch.peek_interpreter_stack() is not None


def driver_version() -> str:
    """Of the CUDA driver."""
    import torch

    return str(getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")())


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """torch's fused softmax attention on the CPU: output, and the log of each query's sum of exponentials."""
    import torch

    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; `out` and `log_sums` are what `flash_attention` gave."""
    import torch

    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, log_sums, 0.0, causal, scale=scale
    )


def fused_adamw(
    parameters: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
    epsilon: float,
    found_inf: Tensor | None,
) -> None:
    """torch's AdamW in one kernel; everything is changed in place. Where `found_inf` is 1, nothing is."""
    import torch

    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        parameters,
        gradients,
        averages,
        squares,
        [],
        steps,
        amsgrad=False,
        lr=learning_rate,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=epsilon,
        maximize=False,
        grad_scale=None,
        found_inf=found_inf,
    )
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf] * len(steps))
