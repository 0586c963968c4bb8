"""The way around torch's registry: the same numbers, and only for calls that nobody watches."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from headcode.ops import eager, hyper_attention, registration
from headcode.ops.options import AttentionInputs, AttentionOptions


def inputs(requires_grad=True):
    torch.manual_seed(0)
    tensors = [torch.randn(2, 3, 5, 2), torch.randn(2, 3, 7, 2), torch.randn(2, 3, 7, 4), torch.randn(3, 11)]
    return [t.requires_grad_(requires_grad) for t in tensors]


@pytest.mark.parametrize("backend", ["cpu", "chunked"])
@pytest.mark.parametrize("needing", [(0, 1, 2, 3), (0,), (2, 3), ()])
def test_both_ways_give_the_same_bits(backend, needing):
    tensors = [t.requires_grad_(i in needing) for i, t in enumerate(inputs(False))]
    call = AttentionInputs(*tensors[:3], relative_bias=tensors[3])
    options = AttentionOptions(True, 0.5, "rms_head", "relu", "sum", 0.1, dropout_seed=5, query_offset=2)
    direct, through = (way.hyper_attention(call, options, backend) for way in (eager, registration))
    assert torch.equal(direct, through) and direct.stride() == through.stride()
    assert direct.requires_grad == bool(needing)
    if needing:
        wanted = [tensors[i] for i in needing]
        for first, second in zip(
            torch.autograd.grad(direct.sum(), wanted), torch.autograd.grad(through.sum(), wanted), strict=True
        ):
            assert torch.equal(first, second)


def test_plain_calls_only():
    q = torch.randn(2, 3, 5, 2)
    assert eager.is_plain(q, None, torch.nn.Parameter(q))
    with FlopCounterMode(display=False):
        assert not eager.is_plain(q)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(q)
    assert not eager.is_plain(fake)
    seen = []
    torch.func.grad(lambda t: (seen.append(eager.is_plain(t)), t.sum())[1])(q)
    assert seen == [False]


def test_fake_tensors_pass_through():
    with FakeTensorMode():
        q = torch.empty(2, 3, 5, 2)
        assert hyper_attention(q, q, q, backend="cpu").shape == (2, 3, 5, 2)


def test_second_derivatives_are_refused_in_one_sentence():
    q, k, v, _ = inputs()
    (gradient,) = torch.autograd.grad(hyper_attention(q, k, v, backend="cpu").sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative; use backend='reference'"):
        gradient.sum().backward()


def test_numbers_with_torchs_negative_bit():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3))
    grad = torch.randn(2, 3, 5, 4)
    found = []
    for backend in ("cpu", "reference"):
        out = hyper_attention(torch._neg_view(q), torch._neg_view(k), torch._neg_view(v), backend=backend)
        found.append([out, *torch.autograd.grad(out, (q, k, v), torch._neg_view(grad))])
    for given, expected in zip(*found, strict=True):
        torch.testing.assert_close(given, expected)
