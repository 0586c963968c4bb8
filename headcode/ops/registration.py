"""The op as torch sees it: one forward and one backward custom op, with fake kernels and autograd.

Backends that recompute in their backward pass plug in here as modules with `saved_shape`, `forward` and `backward`.
They fill buffers that are allocated here, so that real and fake results agree on shape, dtype and strides. `mask` is
boolean and `bias` floating, both 4-D with broadcast axes of size 1.
"""

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

BACKENDS = {
    "chunked": "headcode.ops.chunked",
    "cpu": "headcode.ops.cpu",
    "triton": "headcode.ops.gpu",
    "checked": "headcode.ops.gpu_check",
}
"""name -> module; imported at first use, so that a backend's own requirements are never needed before it is.
`checked` is what `auto` takes for `triton`."""


def backend_module(backend: str) -> ModuleType:
    return importlib.import_module(BACKENDS[backend])


def _length_first(t: Tensor, width: int) -> Tensor:
    """A buffer (B, H, T, width) whose memory is (B, T, H, width): joining the heads afterwards is then free."""
    batch, heads, length, _ = t.shape
    return t.new_empty(batch, length, heads, width).transpose(1, 2)


def _outputs(q: Tensor, v: Tensor, norm: str, value_net: str, backend: str) -> tuple[Tensor, Tensor]:
    from headcode.ops.registry import VALUE_NETS

    width = v.shape[3] // 2 if VALUE_NETS[value_net].gated else v.shape[3]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    shape = backend_module(backend).saved_shape(q.shape[0], q.shape[1], q.shape[2], norm)
    return _length_first(q, width), q.new_empty(shape, dtype=dtype)


@torch.library.custom_op("headcode::hyper_attention", mutates_args=())
def hyper_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    relative_bias: Tensor | None,
    causal: bool,
    scale: float,
    norm: str,
    value_net: str,
    pooling: str,
    dropout: float,
    dropout_seed: int,
    query_offset: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """The output (B, H, Tq, Dv), and what the backend keeps per query for the backward pass."""
    out, saved = _outputs(q, v, norm, value_net, backend)
    backend_module(backend).forward(
        q,
        k,
        v,
        mask,
        bias,
        relative_bias,
        out=out,
        saved=saved,
        causal=causal,
        scale=scale,
        norm=norm,
        value_net=value_net,
        pooling=pooling,
        dropout=dropout,
        dropout_seed=dropout_seed,
        query_offset=query_offset,
    )
    return out, saved


@hyper_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    relative_bias: Tensor | None,
    causal: bool,
    scale: float,
    norm: str,
    value_net: str,
    pooling: str,
    dropout: float,
    dropout_seed: int,
    query_offset: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return _outputs(q, v, norm, value_net, backend)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, relative_bias: Tensor | None, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Buffers for the gradients. A bias that is absent or needs none has an empty one: an op cannot return None."""
    biases = [
        q.new_empty(0) if t is None or not need else t.new_empty(t.shape)
        for t, need in zip((bias, relative_bias), needs, strict=True)
    ]
    return (*(_length_first(t, t.shape[3]) for t in (q, k, v)), *biases)  # type: ignore[return-value]


@torch.library.custom_op("headcode::hyper_attention_backward", mutates_args=())
def hyper_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    relative_bias: Tensor | None,
    out: Tensor,
    saved: Tensor,
    causal: bool,
    scale: float,
    norm: str,
    value_net: str,
    pooling: str,
    dropout: float,
    dropout_seed: int,
    query_offset: int,
    backend: str,
    bias_needs_grad: bool,
    relative_bias_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, bias and relative_bias."""
    gradients = _gradients(q, k, v, bias, relative_bias, [bias_needs_grad, relative_bias_needs_grad])
    backend_module(backend).backward(
        grad,
        q,
        k,
        v,
        mask,
        bias,
        relative_bias,
        out=out,
        saved=saved,
        grad_q=gradients[0],
        grad_k=gradients[1],
        grad_v=gradients[2],
        grad_bias=gradients[3] if bias is not None and bias_needs_grad else None,
        grad_relative_bias=gradients[4] if relative_bias is not None and relative_bias_needs_grad else None,
        causal=causal,
        scale=scale,
        norm=norm,
        value_net=value_net,
        pooling=pooling,
        dropout=dropout,
        dropout_seed=dropout_seed,
        query_offset=query_offset,
    )
    return gradients


@hyper_attention_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    relative_bias: Tensor | None,
    out: Tensor,
    saved: Tensor,
    causal: bool,
    scale: float,
    norm: str,
    value_net: str,
    pooling: str,
    dropout: float,
    dropout_seed: int,
    query_offset: int,
    backend: str,
    bias_needs_grad: bool,
    relative_bias_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _gradients(q, k, v, bias, relative_bias, [bias_needs_grad, relative_bias_needs_grad])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.options = inputs[6:]


def _backward(ctx: Any, grad: Tensor, grad_saved: Tensor) -> tuple[Any, ...]:
    *tensors, out, saved = ctx.saved_tensors
    needs = ctx.needs_input_grad
    # The gradients are those of q, k, v, mask, bias, relative_bias and the options, in the op's order.
    grad_q, grad_k, grad_v, grad_bias, grad_band = hyper_attention_backward(
        grad, *tensors, out, saved, *ctx.options, needs[4], needs[5]
    )
    return (
        grad_q,
        grad_k,
        grad_v,
        None,
        grad_bias if needs[4] else None,
        grad_band if needs[5] else None,
        *(None for _ in ctx.options),
    )


hyper_attention.register_autograd(_backward, setup_context=_setup_context)


def _second_derivative(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError("The fused and chunked backends have no second derivative; use backend='reference'.")


hyper_attention_backward.register_autograd(_second_derivative)
