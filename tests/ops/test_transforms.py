"""What only the reference has rules for: `auto` takes it there, and says so."""

import logging

import pytest
import torch

from headcode import HyperAttention
from headcode.ops import backends, hyper_attention


def inputs(requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 5, 2), (2, 3, 7, 2), (2, 3, 7, 4), (3, 11))
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_(requires_grad) for s in shapes]


def test_second_derivatives():
    q, k, v, band = inputs()

    def op(q, k, v, band, backend="auto"):
        return hyper_attention(q, k, v, relative_bias=band, causal=True, value_net="gelu", backend=backend)

    assert torch.autograd.gradgradcheck(op, (q, k, v, band), fast_mode=True)
    found = []
    for backend in ("auto", "reference"):
        (first,) = torch.autograd.grad(op(q, k, v, band, backend).sin().sum(), q, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), (q, k, v, band)))
    for given, expected in zip(*found, strict=True):
        torch.testing.assert_close(given, expected)


def test_a_layer_can_be_differentiated_twice():
    layer, x = HyperAttention(8, 2, value_net="gelu").double(), torch.randn(2, 5, 8, dtype=torch.float64)
    x.requires_grad_()
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    first.square().sum().backward()
    assert x.grad.abs().max() > 0


def test_a_gradient_for_each_example():
    layer, x = HyperAttention(8, 2, causal=True).double(), torch.randn(3, 5, 8, dtype=torch.float64)
    weights = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(weights, x):
        return torch.func.functional_call(layer, weights, (x[None],)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    for i in range(3):
        expected = torch.func.grad(loss)(weights, x[i])
        for name, gradient in found.items():
            torch.testing.assert_close(gradient[i], expected[name])


def test_one_notice(caplog, monkeypatch):
    monkeypatch.setattr(backends, "_announced", set())
    q, k, v, _ = inputs()
    with caplog.at_level(logging.WARNING, "headcode"):
        for _ in range(2):
            torch.autograd.grad(hyper_attention(q, k, v).sum(), q, create_graph=True)
    assert [record.getMessage() for record in caplog.records] == [
        "hyper_attention uses the reference backend: the only one with a second derivative"
    ]


@pytest.mark.parametrize("backend", ["cpu", "chunked"])
def test_a_backend_that_was_asked_for_refuses(backend):
    q, k, v, _ = inputs()
    (gradient,) = torch.autograd.grad(hyper_attention(q, k, v, backend=backend).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative; use backend='reference'"):
        gradient.sum().backward()


def test_a_trace_computes_with_other_numbers():
    layer, x = HyperAttention(8, 2, causal=True).eval(), torch.randn(2, 5, 8)
    traced = torch.jit.trace(torch.nn.Sequential(layer), x)
    torch.testing.assert_close(traced(2 * x), layer(2 * x))


def test_an_export_to_onnx_has_no_op_of_ours(monkeypatch, caplog):
    """What ONNX cannot name would end in an error of the exporter; the flag is the one that torch.onnx.export sets."""
    from torch.onnx._internal.exporter import _flags

    monkeypatch.setattr(backends, "_announced", set())
    layer, x = HyperAttention(8, 2, causal=True).eval(), torch.randn(2, 5, 8)
    ours = "headcode.hyper_attention"
    assert ours in str(torch.export.export(layer, (x,)).graph)
    monkeypatch.setattr(_flags, "_is_onnx_exporting", True)
    with caplog.at_level(logging.WARNING, "headcode"):
        exported = torch.export.export(layer, (x,))
    assert ours not in str(exported.graph)
    assert "the only one with a translation to ONNX" in caplog.text
    torch.testing.assert_close(exported.module()(x), layer(x))
