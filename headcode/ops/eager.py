"""The registered op without torch's registry, for plain eager calls.

A custom op is dispatched through layers of Python, forward and again backward: more than half of the time of a small
call. What those layers are for — tracing, fake tensors, dispatch modes, functional transforms — is not needed when
ordinary tensors are computed with right away.
"""

from typing import Any

import torch
from torch import Tensor

from headcode.ops.registration import hyper_attention as registered
from headcode.ops.registration import hyper_attention_backward as registered_backward


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether a call with these tensors is an ordinary eager one: nothing traces, wraps or watches it."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all(t is None or type(t) is Tensor or type(t) is torch.nn.Parameter for t in tensors)


def hyper_attention(*arguments: Any) -> Tensor:
    """`registration.hyper_attention`, the output alone."""
    if not torch.is_grad_enabled():
        return registered._init_fn(*arguments)[0]
    return _HyperAttention.apply(*arguments)


class _HyperAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        out, saved = registered._init_fn(*arguments)
        ctx.save_for_backward(*arguments[:6], out, saved)
        ctx.options = arguments[6:]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        *tensors, out, saved = ctx.saved_tensors
        needs = ctx.needs_input_grad
        # Gradients of gradients are the registered op's to refuse.
        function = registered_backward if torch.is_grad_enabled() else registered_backward._init_fn
        grad_q, grad_k, grad_v, grad_bias, grad_band = function(
            grad, *tensors, out, saved, *ctx.options, needs[4], needs[5]
        )
        biases = (grad_bias if needs[4] else None, grad_band if needs[5] else None)
        return grad_q, grad_k, grad_v, None, *biases, *(None for _ in ctx.options)
