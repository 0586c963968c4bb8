"""edit_codes: the identity changes nothing, an edit acts where it should, and the layer is left as it was."""

import pytest
import torch

from headcode import METHODS, HyperAttention, ModelConfig, Transformer, capture_codes
from headcode.nn import edit_codes


def model(**options):
    torch.manual_seed(0)
    sizes = {"input_dim": 5, "output_dim": 3, "max_length": 7, "dim": 12, "num_heads": 3, "qk_dim": 6, "v_dim": 9}
    return Transformer(ModelConfig(**{**sizes, "mlp_dim": 8, "num_layers": 3, **options})).double().eval()


X = torch.randn(2, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"pooling": "mean"}, {"pooling": "max", "causal": True}])
def test_identity_changes_nothing(method, options):
    transformer = model(method=method, **options)
    expected = transformer(X, queries=slice(-2, None))
    seen = {}
    with edit_codes(transformer, lambda layer, codes: seen.setdefault(layer, codes)):
        actual = transformer(X, queries=slice(-2, None))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert {layer: tuple(codes.shape) for layer, codes in seen.items()} == {
        0: (2, 3, 7, 7),
        1: (2, 3, 7, 7),
        2: (2, 3, 2, 7),
    }


def test_zero_codes_leave_the_output_bias_alone():
    layer = HyperAttention(12, 3, method="hyla").double()
    torch.nn.init.normal_(layer.output_proj.bias)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    with edit_codes(layer, lambda number, codes: codes * 0):
        out = layer(x)
    torch.testing.assert_close(out, layer.output_proj.bias.expand_as(out))
    assert not torch.allclose(layer(x), out)


def test_only_chosen_layers_and_shared_ones():
    transformer = model(share_layers=True)
    seen = []
    with edit_codes(transformer, lambda layer, codes: (seen.append(layer), codes)[1], layers=[0, -1]):
        transformer(X)
        transformer(X)
    assert seen == [0, 2, 0, 2]


def test_codes_of_another_input_carry_over():
    """With the donor's codes everywhere, only the values are the recipient's own."""
    layer = HyperAttention(12, 3, method="softmax").double()
    recipient, donor = torch.randn(2, 1, 5, 12, dtype=torch.float64)
    with capture_codes(layer) as codes:
        layer(donor)
    with edit_codes(layer, lambda number, own: codes[0]):
        out = layer(recipient)
    values = layer.value_proj(recipient).unflatten(2, (3, -1))
    expected = layer.output_proj(torch.einsum("bhqk,bkhd->bqhd", codes[0], values).flatten(2))
    torch.testing.assert_close(out, expected)


def test_float_mask_and_gradients():
    layer = HyperAttention(12, 3, method="hyla", pooling="mean").double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    mask = torch.zeros(5, 5, dtype=torch.float64).masked_fill(torch.rand(5, 5) < 0.3, float("-inf"))
    expected = layer(x, mask=mask)
    with edit_codes(layer, lambda number, codes: codes):
        actual = layer(x, mask=mask)
    torch.testing.assert_close(actual, expected)
    actual.sum().backward()
    assert layer.query_proj.weight.grad.abs().sum() > 0


def test_mistakes_are_sentences():
    transformer = model()
    with pytest.raises(ValueError, match="layers must be numbers from 0 to 2"), edit_codes(transformer, None, layers=3):
        pass
    shapes = r"must return codes of shape \(2, 3, 7, 7\), got \(2, 3, 7\)"
    with edit_codes(transformer, lambda layer, codes: codes[..., 0]), pytest.raises(ValueError, match=shapes):
        transformer(X)
    twice = edit_codes(transformer, lambda layer, codes: codes, layers=0)
    with edit_codes(transformer, lambda layer, codes: codes), pytest.raises(ValueError, match="one edit at a time"):
        twice.__enter__()
    with pytest.raises(ValueError, match="no HyperAttention layer"), edit_codes(torch.nn.Linear(2, 2), lambda *a: a[1]):
        pass
    causal = HyperAttention(12, 3, method="linear", causal=True, recurrent=True).double()
    with edit_codes(causal, lambda number, codes: codes), pytest.raises(ValueError, match="recurrent=False"):
        causal(torch.randn(1, 4, 12, dtype=torch.float64))
    transformer(X)
