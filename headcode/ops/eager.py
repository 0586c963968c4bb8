"""The registered op without torch's registry, for plain eager calls.

A custom op is dispatched through layers of Python, forward and again backward: more than half of the time of a small
call. What those layers are for — tracing, fake tensors, dispatch modes, functional transforms — is not needed when
ordinary tensors are computed with right away.
"""

from typing import Any

import torch
from torch import Tensor

from headcode.ops import reference, registration
from headcode.ops.backends import announce_reference
from headcode.ops.options import AttentionInputs, AttentionOptions
from headcode.private_api import dispatch_modes_active


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether a call with these tensors is an ordinary eager one: nothing traces, wraps or watches it."""
    if torch.compiler.is_compiling() or dispatch_modes_active():
        return False
    return all(t is None or type(t) is Tensor or type(t) is torch.nn.Parameter for t in tensors)


def hyper_attention(
    inputs: AttentionInputs, options: AttentionOptions, backend: str, *, twice_by_reference: bool = False
) -> Tensor:
    """The output (B, H, Tq, Dv). Gradients that are to be differentiated themselves are the reference's if that may
    stand in; else the backend's, whose second derivative is refused."""
    if not torch.is_grad_enabled():
        return registration.compute(inputs, options, backend)[0]
    return _HyperAttention.apply(*inputs, options, backend, twice_by_reference)


class _HyperAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *inputs, options, backend, ctx.twice_by_reference = arguments
        out, saved = registration.compute(AttentionInputs(*inputs), options, backend)
        ctx.save_for_backward(*inputs, out, saved)
        ctx.options, ctx.backend = options, backend
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        *inputs, out, saved = ctx.saved_tensors
        call = AttentionInputs(*inputs), ctx.options, ctx.backend
        _, _, _, _, *needs, _, _, _ = ctx.needs_input_grad
        gradients: Any
        if torch.is_grad_enabled() and ctx.twice_by_reference:
            return *_gradients_by_reference(grad, inputs, ctx), None, None, None
        if torch.is_grad_enabled():  # gradients of gradients are the registered op's to refuse
            gradients = registration.registered_backward(grad, *registration.flatten(*call), out, saved, *needs)
        else:
            gradients = registration.compute_gradients(grad, *call, out, saved, *needs)
        return *registration.in_order(gradients, needs), None, None, None


def _gradients_by_reference(grad: Tensor, inputs: list[Any], ctx: Any) -> list[Tensor | None]:
    """Of each input that needs one, differentiable themselves."""
    announce_reference("second derivative")
    needs = ctx.needs_input_grad[: len(inputs)]
    out = reference.hyper_attention(AttentionInputs(*inputs), ctx.options)
    wanted = [t for t, need in zip(inputs, needs, strict=True) if need]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(found) if need else None for need in needs]
