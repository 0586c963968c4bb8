"""torch.compile: layers in one graph, with the same outputs and gradients, whatever else is asked of them."""

import pytest
import torch

from headcode import METHODS, HyperAttention, ModelConfig, Transformer, capture_codes
from headcode.nn import KeyValueCache

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def compiled(module, **options):
    return torch.compile(module, backend="aot_eager", fullgraph=True, **options)


def assert_same_gradients(module, one, other):
    parameters = list(module.parameters())
    wanted = torch.autograd.grad(one.sin().sum(), parameters)
    for actual, expected in zip(torch.autograd.grad(other.sin().sum(), parameters), wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_cross_attention_with_padding(method):
    layer = HyperAttention(12, 3, method=method).double()
    x, context = torch.randn(2, 7, 12).double(), torch.randn(2, 5, 12).double()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    one = layer(x, context, key_padding_mask=padding)
    other = compiled(layer)(x, context, key_padding_mask=padding)
    torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-13)
    assert_same_gradients(layer, one, other)


def test_lengths_that_change_and_dropout():
    layer = HyperAttention(12, 3, causal=True, dropout=0.3).double().train()
    traced = compiled(layer, dynamic=True)
    for length in (5, 7, 11):
        x = torch.randn(2, length, 12).double()
        one, other = layer(x, dropout_seed=length), traced(x, dropout_seed=length)
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-13)
        assert_same_gradients(layer, one, other)
    assert not torch.equal(traced(x), traced(x)), "without a seed, every call drops others"


@pytest.mark.parametrize("first", ["traced", "captured"])
def test_codes_are_captured(first):
    """Also from a model that was traced before anyone asked for codes."""
    model = Transformer(ModelConfig(input_dim=5, output_dim=3, max_length=16)).double()
    traced, x = compiled(model), torch.randn(2, 16, 5).double()
    if first == "traced":
        traced(x)
    with capture_codes(model) as wanted:
        model(x)
    with capture_codes(model) as found:
        traced(x)
    assert set(found) == set(wanted) == {0, 1}
    for layer in wanted:
        torch.testing.assert_close(found[layer], wanted[layer], rtol=1e-12, atol=1e-13)


def test_decoding_with_a_cache():
    layer = HyperAttention(12, 3, causal=True).double().eval()
    traced, x, cache = compiled(layer), torch.randn(2, 7, 12).double(), KeyValueCache()
    with torch.no_grad():
        pieces = [traced(x[:, [step]], cache=cache) for step in range(7)]
        torch.testing.assert_close(torch.cat(pieces, 1), layer(x), rtol=1e-11, atol=1e-12)


def test_a_compiled_layer_under_autocast_gives_the_eager_values():
    layer, x = HyperAttention(12, 3), torch.randn(2, 7, 12)
    with torch.autocast("cpu", torch.bfloat16):
        one, other = layer(x), compiled(layer)(x)
    assert other.dtype == torch.bfloat16 and torch.equal(one, other)
