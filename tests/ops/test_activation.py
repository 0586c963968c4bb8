"""The fast GELU: torch's to rounding, value and slope, with the same answer for any number of threads."""

import pytest
import torch
import torch.nn.functional as F

from headcode.ops import activation
from headcode.ops.activation import PIECE, gelu


def exact(x, grad):
    x = x.double().requires_grad_()
    y = F.gelu(x, approximate="tanh")
    (slope,) = torch.autograd.grad(y, x, grad.double())
    return y.detach(), slope


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(8,), (3, 8), (PIECE + 8,), (2, 5, PIECE // 4)])
def test_values_and_gradients(shape, monkeypatch):
    torch.manual_seed(0)
    x, grad = 3 * torch.randn(shape), torch.randn(shape)
    expected, slope = exact(x, grad)
    x.requires_grad_()
    y = gelu(x)
    assert type(y.grad_fn).__name__ == "_GeluBackward"
    y.backward(grad)
    assert (y.detach().double() - expected).norm() / expected.norm() < 1e-6
    assert (x.grad.double() - slope).norm() / slope.norm() < 1e-6


def test_far_from_zero():
    x = torch.tensor([-1e30, -100.0, -12.0, -0.0, 0.0, 12.0, 100.0, 1e10], requires_grad=True)
    y = gelu(x)
    y.sum().backward()
    torch.testing.assert_close(y, torch.tensor([0, 0, 0, 0, 0, 12, 100, 1e10]), rtol=0, atol=2e-8)
    torch.testing.assert_close(x.grad, torch.tensor([0, 0, 0, 0.5, 0.5, 1, 1, 1]), rtol=0, atol=1e-6)
    bad = torch.full((8,), float("nan"), requires_grad=True)
    assert gelu(bad).isnan().all()


def test_any_number_of_threads(threads):
    torch.manual_seed(0)
    x = torch.randn(5 * PIECE + 16, requires_grad=True)
    outputs = []
    for number in (1, 2, 3):
        threads(number)
        outputs.append(gelu(x).detach())
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(16),
        torch.randn(15, requires_grad=True),
        torch.randn(16, dtype=torch.float64, requires_grad=True),
        torch.randn(16, 16, requires_grad=True).t(),
    ],
    ids=["inference", "ragged", "float64", "strided"],
)
def test_torchs_own_wherever_ours_does_not_apply(x):
    assert torch.equal(gelu(x), F.gelu(x, approximate="tanh"))


def test_second_derivatives():
    x = torch.randn(16, requires_grad=True)
    seconds = []
    for backend in ("auto", "reference"):
        (slope,) = torch.autograd.grad(gelu(x, backend).square().sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(slope.sum(), x)[0])
    torch.testing.assert_close(seconds[0], seconds[1], rtol=1e-4, atol=1e-5)


def test_without_numba(monkeypatch):
    monkeypatch.setattr(activation, "_kernels_enabled", lambda: False)
    x = torch.randn(16, requires_grad=True)
    assert torch.equal(gelu(x), F.gelu(x, approximate="tanh"))


def test_under_transforms_and_compilation():
    x = torch.randn(4, 8)
    slopes = torch.func.vmap(torch.func.grad(lambda row: gelu(row).sum()))(x)
    _, expected = exact(x, torch.ones_like(x))
    torch.testing.assert_close(slopes.double(), expected, rtol=1e-4, atol=1e-5)
