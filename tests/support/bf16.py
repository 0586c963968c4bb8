"""Products of numbers rounded to bf16, written plainly."""

import pytest
import torch

from headcode.ops import cpu

needs_bf16 = pytest.mark.skipif(cpu.why_no_bf16() is not None, reason=f"bf16 products: {cpu.why_no_bf16()}")


def rounded(x):
    return x.float().bfloat16().to(x.dtype)


class _RoundedProduct(torch.autograd.Function):
    """x Wᵀ, whose factors are rounded, as are those of the products that are its gradients; nothing else is."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return rounded(x) @ rounded(weight).T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = rounded(grad)
        return grad @ rounded(weight), grad.flatten(0, -2).T @ rounded(x).flatten(0, -2)


class RoundedLinear(torch.nn.Linear):
    def forward(self, x):
        product = _RoundedProduct.apply(x, self.weight)
        return product if self.bias is None else product + self.bias


def round_products(module):
    """Have every linear layer of a model round the factors of its products."""
    for part in module.modules():
        if type(part) is torch.nn.Linear:
            part.__class__ = RoundedLinear
    return module


def rounded_product(x, weight):
    return _RoundedProduct.apply(x, weight)
