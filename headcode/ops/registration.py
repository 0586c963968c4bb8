"""The op as torch sees it: one forward and one backward custom op, with fake kernels and autograd.

Backends that recompute in their backward pass plug in here as modules with `saved_shape`, `forward` and `backward`.
They fill buffers that are allocated here, so that real and fake results agree on shape, dtype and strides. A custom op
takes flat arguments: those of `AttentionInputs`, then those of `AttentionOptions`, then the backend's name.
"""

import importlib
from dataclasses import fields
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from headcode.ops.options import AttentionGradients, AttentionInputs, AttentionOptions
from headcode.ops.registry import VALUE_NETS

BACKENDS = {
    "chunked": "headcode.ops.chunked",
    "cpu": "headcode.ops.cpu",
    "triton": "headcode.ops.triton.backend",
    "checked": "headcode.ops.triton.checked",
}
"""name -> module; imported at first use, so that a backend's own requirements are never needed before it is.
`checked` is what `auto` takes for `triton`."""

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, Tensor? relative_bias, Tensor? middle"
_OPTIONS = (
    "bool causal, float scale, str norm, str value_net, str pooling, float dropout, SymInt dropout_seed, "
    "SymInt query_offset, SymInt? window, str backend"
)
_OPTION_NAMES = tuple(field.name for field in fields(AttentionOptions))
_NUM_INPUTS = len(AttentionInputs._fields)


def hyper_attention(inputs: AttentionInputs, options: AttentionOptions, backend: str) -> Tensor:
    """The registered op's output (B, H, Tq, Dv)."""
    return registered(*flatten(inputs, options, backend))[0]


def compute(inputs: AttentionInputs, options: AttentionOptions, backend: str) -> tuple[Tensor, Tensor]:
    """The output (B, H, Tq, Dv), and what the backend keeps per query for the backward pass."""
    out, saved = _outputs(inputs, options, backend)
    if _is_empty(inputs, out):
        return out.zero_(), saved.zero_()
    _module(backend).forward(inputs, options, out=out, saved=saved)
    return out, saved


def compute_gradients(
    grad: Tensor,
    inputs: AttentionInputs,
    options: AttentionOptions,
    backend: str,
    out: Tensor,
    saved: Tensor,
    *need_grad: bool,
) -> AttentionGradients:
    """`need_grad`: for each of the inputs after the mask, whether it needs a gradient."""
    gradients = _gradients(inputs, *need_grad)
    if _is_empty(inputs, out):
        return AttentionGradients(*(t if t is None else t.zero_() for t in gradients))  # type: ignore[arg-type]
    _module(backend).backward(grad, inputs, options, out=out, saved=saved, gradients=gradients)
    return gradients


def _is_empty(inputs: AttentionInputs, out: Tensor) -> bool:
    """Whether there is no output, or no key to sum over: backends need not care."""
    return out.numel() == 0 or inputs.k.shape[2] == 0


def _module(backend: str) -> ModuleType:
    return importlib.import_module(BACKENDS[backend])


def _length_first(t: Tensor, width: int) -> Tensor:
    """A buffer (B, H, T, width) whose memory is (B, T, H, width): joining the heads afterwards is then free."""
    batch, heads, length, _ = t.shape
    return t.new_empty(batch, length, heads, width).transpose(1, 2)


def _outputs(inputs: AttentionInputs, options: AttentionOptions, backend: str) -> tuple[Tensor, Tensor]:
    q, v = inputs.q, inputs.v
    width = v.shape[3] // 2 if VALUE_NETS[options.value_net].gated else v.shape[3]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    shape = _module(backend).saved_shape(q.shape[0], q.shape[1], q.shape[2], options.norm)
    return _length_first(q, width), q.new_empty(shape, dtype=dtype)


def _gradients(inputs: AttentionInputs, *need_grad: bool) -> AttentionGradients:
    others = [
        t.new_empty(t.shape) if t is not None and need else None for t, need in zip(inputs[4:], need_grad, strict=True)
    ]
    # A leaf's gradient that is not laid out as the leaf would be copied.
    given = (t.new_empty(t.shape) if t.is_contiguous() else _length_first(t, t.shape[3]) for t in inputs[:3])
    return AttentionGradients(*given, *others)


def flatten(inputs: AttentionInputs, options: AttentionOptions, backend: str) -> tuple[Any, ...]:
    """The arguments of the registered op."""
    return *inputs, *[getattr(options, name) for name in _OPTION_NAMES], backend


def _unflatten(arguments: tuple[Any, ...]) -> tuple[AttentionInputs, AttentionOptions, str]:
    *options, backend = arguments[_NUM_INPUTS:]
    return AttentionInputs(*arguments[:_NUM_INPUTS]), AttentionOptions(*options), backend


def _flatten_gradients(gradients: AttentionGradients) -> tuple[Tensor, ...]:
    """An op cannot return None: what needs no gradient has an empty one."""
    return tuple(gradients.q.new_empty(0) if t is None else t for t in gradients)


@torch.library.custom_op(
    "headcode::hyper_attention", mutates_args=(), schema=f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)"
)
def registered(*arguments: Any) -> tuple[Tensor, Tensor]:
    return compute(*_unflatten(arguments))


@registered.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _outputs(*_unflatten(arguments))


@torch.library.custom_op(
    "headcode::hyper_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_INPUTS}, {_OPTIONS}, Tensor out, Tensor saved, bool bias_needs_grad, "
    "bool relative_bias_needs_grad, bool middle_needs_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def registered_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *call, out, saved, bias_needs_grad, relative_bias_needs_grad, middle_needs_grad = arguments
    needs = (bias_needs_grad, relative_bias_needs_grad, middle_needs_grad)
    return _flatten_gradients(compute_gradients(grad, *_unflatten(tuple(call)), out, saved, *needs))


@registered_backward.register_fake
def _(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return _flatten_gradients(_gradients(AttentionInputs(*arguments[:_NUM_INPUTS]), *arguments[-3:]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_NUM_INPUTS], *output)
    ctx.options = inputs[_NUM_INPUTS:]


def _backward(ctx: Any, grad: Tensor, grad_saved: Tensor) -> tuple[Any, ...]:
    *tensors, out, saved = ctx.saved_tensors
    _, _, _, _, *needs = ctx.needs_input_grad[:_NUM_INPUTS]
    gradients = registered_backward(grad, *tensors, *ctx.options, out, saved, *needs)
    return (*in_order(gradients, needs), *(None for _ in ctx.options))


def in_order(gradients: tuple[Tensor | None, ...], need_grad: list[bool]) -> tuple[Tensor | None, ...]:
    """Gradients in the order of `AttentionInputs`, where the mask has none."""
    grad_q, grad_k, grad_v, *others = gradients
    return grad_q, grad_k, grad_v, None, *(t if n else None for t, n in zip(others, need_grad, strict=True))


registered.register_autograd(_backward, setup_context=_setup_context)


def _second_derivative(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError("The fused and chunked backends have no second derivative; use backend='reference'.")


registered_backward.register_autograd(_second_derivative)
