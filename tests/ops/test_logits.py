"""The fused end of a language model is LayerNorm and a product, to rounding."""

import math

import pytest
import torch
import torch.nn.functional as F

from headcode.nn import ModelConfig, Transformer
from headcode.nn import transformer as transformer_module
from headcode.nn.fused import run_fused_logits
from headcode.ops.cpu import why_no_bf16
from headcode.ops.cpu.logits import LogitsCall, token_logits
from tests.support.models import distance

SHAPES = [((3, 37), 48, 16), ((2, 300), 144, 48), ((5,), 16, 32), ((1, 61), 2064, 1040), ((97,), 1136, 80)]
NAMES = ("tokens", "weight", "bias", "table")
CALL = LogitsCall(1e-6, 0.5, "float32")


def inputs_of(shape, vocabulary, dim):
    torch.manual_seed(0)
    sizes = ((*shape, dim), (dim,), (dim,), (vocabulary, dim))
    return [torch.randn(size).requires_grad_() for size in sizes]


def plain(x, weight, bias, table, factor):
    return F.layer_norm(x, weight.shape, weight, bias, 1e-6) @ table.T * factor


@pytest.mark.parametrize(("shape", "vocabulary", "dim"), SHAPES)
def test_logits_and_gradients(shape, vocabulary, dim):
    given = inputs_of(shape, vocabulary, dim)
    wide = [t.detach().double().requires_grad_() for t in given]
    out, expected = token_logits(*given, LogitsCall(1e-6, 0.3, "float32")), plain(*wide, 0.3)
    assert distance(out.detach(), expected.detach()) < 1e-5
    grad = torch.randn_like(out)
    gradients, wanted = torch.autograd.grad(out, given, grad), torch.autograd.grad(expected, wide, grad.double())
    for name, gradient, right in zip(NAMES, gradients, wanted, strict=True):
        assert distance(gradient, right) < 1e-4, name
    with torch.no_grad():
        assert torch.equal(token_logits(*given, LogitsCall(1e-6, 0.3, "float32")), out)


@pytest.mark.parametrize("which", range(4))
def test_gradients_of_one_input_alone(which):
    given = inputs_of((3, 37), 48, 16)
    expected = torch.autograd.grad(token_logits(*given, CALL).square().sum(), given)
    alone = [t.detach().requires_grad_(i == which) for i, t in enumerate(given)]
    token_logits(*alone, CALL).square().sum().backward()
    assert torch.equal(alone[which].grad, expected[which])
    assert all(t.grad is None for i, t in enumerate(alone) if i != which)


def test_bits_do_not_depend_on_threads():
    before, given, results = torch.get_num_threads(), inputs_of((5, 131), 784, 48), []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            out = token_logits(*given, CALL)
            results.append([out, *torch.autograd.grad(out.square().sum(), given)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_nothing_is_left_unwritten(monkeypatch):
    given = inputs_of((3, 37), 144, 16)
    expected = token_logits(*given, CALL)
    gradients = torch.autograd.grad(expected.square().sum(), given)
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: new_empty(*a, **k).fill_(math.nan))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(math.nan))
    out = token_logits(*given, CALL)
    assert torch.equal(out, expected)
    assert all(map(torch.equal, torch.autograd.grad(out.square().sum(), given), gradients))


def test_second_derivatives_and_gradients_as_autograd_hands_them_over():
    given = inputs_of((3, 7), 32, 16)
    (once,) = torch.autograd.grad(token_logits(*given, CALL).square().sum(), given[0], create_graph=True)
    (wanted,) = torch.autograd.grad(plain(*given, 0.5).square().sum(), given[0], create_graph=True)
    twice, right = (torch.autograd.grad(g.sin().sum(), given[3])[0] for g in (once, wanted))
    assert distance(once.detach(), wanted.detach().double()) < 1e-4 and distance(twice, right.double()) < 1e-4
    values = torch.randn(3, 7, 32)
    expected = torch.autograd.grad(token_logits(*given, CALL), given, -values)
    for grad in (torch._neg_view(values), -values.permute(2, 1, 0).contiguous().permute(2, 1, 0)):
        found = torch.autograd.grad(token_logits(*given, CALL), given, grad)
        assert all(map(torch.equal, found, expected))


def language_model(**changes):
    torch.manual_seed(0)
    settings = {"vocab_size": 48, "dim": 32, "num_heads": 2, "mlp_dim": 32, "max_length": 40, "causal": True}
    return Transformer(ModelConfig(**(settings | changes)))


@pytest.fixture
def served(monkeypatch):
    found = []

    def watched(*arguments):
        out = run_fused_logits(*arguments)
        found.append(out is not None)
        return out

    monkeypatch.setattr(transformer_module, "run_fused_logits", watched)
    return found


def test_a_language_model_ends_with_it(served):
    model, tokens = language_model(), torch.randint(0, 48, (3, 37))
    out = model(tokens)
    expected = Transformer(model.config.replace(backend="reference")).double()
    expected.load_state_dict(model.state_dict())
    assert distance(out.detach(), expected(tokens).detach()) < 1e-5 and served == [True, False]


def watch(model):
    model.final_norm.register_forward_hook(lambda *arguments: None)


def patch(model):
    model.final_norm.forward = lambda x: 2 * x


def without_bias(model):
    model.final_norm.bias = None


def wrapped_embedding(model):
    model.embedding = torch.nn.Sequential(model.embedding)


@pytest.mark.parametrize("change", [watch, patch, without_bias, lambda m: m.double(), lambda m: m.bfloat16()])
def test_whoever_looks_inside_gets_the_parts(change, served):
    model = language_model()
    change(model)
    model(torch.randint(0, 48, (3, 37)))
    assert served == [False]


@pytest.mark.parametrize(("changes", "shape"), [({"vocab_size": 47}, (3, 37)), ({"dim": 24}, (3, 37)), ({}, (1, 7))])
def test_sizes_that_it_does_not_serve(changes, shape, served):
    language_model(**changes)(torch.randint(0, 47, shape))
    assert served == [False]


def test_another_embedding_is_called(served):
    model, tokens = language_model(), torch.randint(0, 48, (3, 37))
    expected = model(tokens)
    wrapped_embedding(model)
    out = model(tokens)
    torch.testing.assert_close(out, expected)
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens)
    assert served == [True, True, why_no_bf16() is None]
