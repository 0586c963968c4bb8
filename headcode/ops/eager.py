"""The registered op without torch's registry, for plain eager calls.

A custom op is dispatched through layers of Python, forward and again backward: more than half of the time of a small
call. What those layers are for — tracing, fake tensors, dispatch modes, functional transforms — is not needed when
ordinary tensors are computed with right away.
"""

from typing import Any

import torch
from torch import Tensor

from headcode.ops import registration
from headcode.ops.options import AttentionInputs, AttentionOptions
from headcode.private_api import dispatch_modes_active


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether a call with these tensors is an ordinary eager one: nothing traces, wraps or watches it."""
    if torch.compiler.is_compiling() or dispatch_modes_active():
        return False
    return all(t is None or type(t) is Tensor or type(t) is torch.nn.Parameter for t in tensors)


def hyper_attention(inputs: AttentionInputs, options: AttentionOptions, backend: str) -> Tensor:
    """The output (B, H, Tq, Dv)."""
    if not torch.is_grad_enabled():
        return registration.compute(inputs, options, backend)[0]
    return _HyperAttention.apply(*inputs, options, backend)


class _HyperAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *inputs, options, backend = arguments
        out, saved = registration.compute(AttentionInputs(*inputs), options, backend)
        ctx.save_for_backward(*inputs, out, saved)
        ctx.options, ctx.backend = options, backend
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        *inputs, out, saved = ctx.saved_tensors
        call = AttentionInputs(*inputs), ctx.options, ctx.backend
        _, _, _, _, *needs, _, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # gradients of gradients are the registered op's to refuse
            gradients: Any = registration.registered_backward(grad, *registration.flatten(*call), out, saved, *needs)
        else:
            gradients = registration.compute_gradients(grad, *call, out, saved, *needs)
        return *registration.in_order(gradients, needs), None, None
