"""The fused CPU backend and torch's machinery: finite differences, opcheck, torch.compile."""

import shutil

import pytest
import torch

from headcode import ModelConfig, Transformer
from headcode.ops import cpu, hyper_attention
from headcode.ops.registration import registered as forward_op
from headcode.ops.registration import registered_backward as backward_op

COMPILERS = ["aot_eager", "inductor"] if shutil.which("g++") or shutil.which("clang++") else ["aot_eager"]


@pytest.mark.parametrize("value_net", cpu.NET_CODES)
@pytest.mark.parametrize("norm", cpu.NORM_CODES)
def test_gradcheck(norm, value_net):
    torch.manual_seed(0)
    q, k, v, band = torch.randn(2, 3, 3, 2), torch.randn(2, 3, 5, 2), torch.randn(2, 3, 5, 3), torch.randn(3, 7)
    inputs = [t.double().requires_grad_() for t in (q, k, v, band)]
    mask = torch.tensor([[True, True, True, False, True], [False, True, True, True, True]])[:, None, None]

    def function(q, k, v, band):
        options = {"mask": mask, "causal": True, "dropout": 0.2, "dropout_seed": 1}
        return hyper_attention(
            q, k, v, relative_bias=band, norm=norm, value_net=value_net, backend="cpu", query_offset=3, **options
        )

    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize(("norm", "value_net"), [("rms_head", "relu"), ("softmax", "linear"), ("none", "gelu")])
def test_opcheck(norm, value_net):
    torch.manual_seed(0)
    for width in (2, 16):
        tensors = [torch.randn(2, 3, 5, width), torch.randn(2, 3, 7, width), torch.randn(2, 3, 7, width)]
        mask, band = (torch.randn(2, 1, 1, 7) > -1, torch.randn(3, 11)) if width == 2 else (None, None)
        options = (width == 2, 0.5, norm, value_net, "sum", 0.1 if width == 2 else 0.0, 12345, 2, None, "cpu")
        needing = [t.clone().requires_grad_() for t in tensors]
        needing_band = None if band is None else band.clone().requires_grad_()
        torch.library.opcheck(forward_op, (*needing, mask, None, needing_band, None, *options))
        out, saved = forward_op(*tensors, mask, None, band, None, *options)
        arguments = (torch.randn_like(out), *tensors, mask, None, band, None, *options, out, saved)
        torch.library.opcheck(backward_op, (*arguments, False, band is not None, False))


@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("method", ["hyla", "softmax"])
def test_a_compiled_model_agrees(method, compiler):
    # In float64: some gradients are exactly 0 (softmax does not feel the biases of its keys), and what float32 leaves
    # of them is rounding, which the compiler may arrange differently.
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Transformer(ModelConfig(input_dim=5, output_dim=3, max_length=16, method=method, backend="cpu")).double()
    compiled = torch.compile(model, backend=compiler)
    x = torch.randn(4, 16, 5, dtype=torch.float64)
    eager, traced = model(x), compiled(x)
    torch.testing.assert_close(traced, eager)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(eager.square().sum(), parameters)
    for actual, wanted in zip(torch.autograd.grad(traced.square().sum(), parameters), expected, strict=True):
        assert (actual - wanted).norm() <= 1e-11 * wanted.norm() + 1e-12
