"""The hypernetwork view: generated networks, applied to their tokens and summed, are the layer."""

import pytest
import torch
from torch import nn

from headcode import HyperAttention, capture_codes
from headcode.nn import value_network
from headcode.ops import NORMS, VALUE_NETS


def make(norm, value_net, cross, bias=True):
    torch.manual_seed(0)
    context_dim = 5 if cross else 8
    options = {"norm": norm, "value_net": value_net, "pooling": "sum", "context_dim": context_dim, "bias": bias}
    layer = HyperAttention(8, 3, qk_dim=6, v_dim=12, **options)
    for parameter in layer.parameters():
        if parameter.dim() == 1 or parameter is layer.middle_bias:
            nn.init.normal_(parameter)
    return layer.double()


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("value_net", VALUE_NETS)
@pytest.mark.parametrize("norm", NORMS)
def test_sum_of_generated_networks_is_the_layer(norm, value_net, cross, bias):
    layer = make(norm, value_net, cross, bias)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    context = torch.randn(2, 7, 5, dtype=torch.float64) if cross else x
    mask = torch.rand(2, 1, 5, context.shape[1]) > 0.3
    with capture_codes(layer) as codes:
        output = layer(x, context if cross else None, mask=mask)
    networks = value_network(layer, codes[0])
    assert len(networks.weights) == {"linear": 1, "relu_relu": 3}.get(value_net, 2)
    rebuilt = networks(context[:, None]).sum(2)
    if bias:
        rebuilt = rebuilt + layer.output_proj.bias
    torch.testing.assert_close(rebuilt, output, rtol=0, atol=1e-9)


def test_chosen_pairs_alone():
    layer = make("rms_head", "relu", cross=False)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    with capture_codes(layer) as every:
        layer(x)
    with capture_codes(layer, queries=[3, 1], keys=-1) as chosen:
        layer(x)
    torch.testing.assert_close(chosen[0], every[0][:, :, [3, 1]][..., [4]])
    networks = value_network(layer, chosen[0])
    assert networks.weights[0].shape == (2, 2, 1, 4, 8) and networks.weights[1].shape == (2, 2, 1, 8, 4)


def test_hand_computed_linear_network():
    layer = HyperAttention(2, 2, method="linear", v_dim=2, pooling="sum").double()
    with torch.no_grad():
        layer.value_proj.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))  # head 0 reads row 0, head 1 row 1
        layer.value_proj.bias.copy_(torch.tensor([0.5, -1.0]))
        layer.output_proj.weight.copy_(torch.tensor([[1.0, 10.0], [2.0, 20.0]]))
    networks = value_network(layer, torch.tensor([2.0, -1.0], dtype=torch.float64).reshape(1, 2, 1, 1))
    # 2·[1;2][1 2] - 1·[10;20][3 4]
    expected = torch.tensor([[2.0 - 30, 4 - 40], [4 - 60, 8 - 80]], dtype=torch.float64)
    assert torch.equal(networks.weights[0][0, 0, 0], expected)
    assert torch.equal(networks.biases[0][0, 0, 0], torch.tensor([2 * 0.5 + 10, 2 * 1.0 + 20], dtype=torch.float64))


def test_codes_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="codes must have shape"):
        value_network(make("none", "linear", False), torch.zeros(2, 4, 5, 5))
