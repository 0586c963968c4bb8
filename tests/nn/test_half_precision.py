"""Half precision on the CPU: the op computes in float32 and rounds once; a layer adds the rounding of its products."""

import pytest
import torch

from headcode import METHODS, HyperAttention, ModelConfig, Transformer, hyper_attention
from headcode.ops import VALUE_NETS

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def distance(actual, exact):
    """Relative RMS error."""
    return float((actual.detach().double() - exact.detach()).norm() / exact.detach().norm())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("backend", ["auto", "reference", "chunked"])
@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_the_op_are_the_rounded_truth(method, backend, dtype):
    """Against float64 on the very same numbers: an error of half a unit in the last place, and float32's beneath it."""
    norm, value_net, _ = METHODS[method]
    inputs = [torch.randn(2, 3, 17, 5).to(dtype).requires_grad_() for _ in range(3)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    upstream = torch.randn(2, 3, 17, 5).to(dtype)
    middle = torch.randn(3, 5, 6).to(dtype) if VALUE_NETS[value_net].middle else None
    options = {"causal": True, "norm": norm, "value_net": value_net}
    out = hyper_attention(*inputs, **options, middle=middle, backend=backend)
    middle = None if middle is None else middle.double()
    wanted = hyper_attention(*exact, **options, middle=middle, backend="reference")
    out.backward(upstream)
    wanted.backward(upstream.double())
    bound = torch.finfo(dtype).eps / 2 + 1e-4
    assert out.dtype == dtype and distance(out, wanted) < bound
    for actual, expected in zip(inputs, exact, strict=True):
        assert actual.grad.dtype == dtype and distance(actual.grad, expected.grad) < bound


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("way", ["weights", "autocast"])
@pytest.mark.parametrize("method", METHODS)
def test_a_layer_in_half_precision_is_within_two_roundings_of_exact(method, way, dtype):
    layer = HyperAttention(24, 3, method=method, causal=True)
    x = torch.randn(5, 17, 24).to(dtype)
    if way == "weights":
        layer = layer.to(dtype)
        out = layer(x)
    else:
        with torch.autocast("cpu", dtype):
            out = layer(x.float())
    exact = HyperAttention(24, 3, method=method, causal=True, backend="reference").double()
    exact.load_state_dict(layer.state_dict())
    assert out.dtype == dtype and distance(out, exact(x.double())) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", HALVES)
def test_a_model_under_autocast_has_gradients_in_float32(dtype):
    """Softmax attention, whose gradients are smooth; where a ReLU or a norm across heads turns, rounding shows more."""
    sizes = {"input_dim": 5, "output_dim": 3, "max_length": 16, "dim": 24, "num_heads": 3, "qk_dim": 12, "v_dim": 12}
    model = Transformer(ModelConfig(method="softmax", mlp_dim=32, **sizes))
    exact = Transformer(ModelConfig(method="softmax", mlp_dim=32, backend="reference", **sizes)).double()
    exact.load_state_dict(model.state_dict())
    x = torch.randn(4, 16, 5)
    with torch.autocast("cpu", dtype):
        out = model(x)
    wanted = exact(x.double())
    out.double().square().sum().backward()
    wanted.square().sum().backward()
    eps = torch.finfo(dtype).eps
    assert distance(out, wanted) < 4 * eps
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    expected = torch.cat([p.grad.flatten() for p in exact.parameters()])
    assert gradients.dtype == torch.float32 and distance(gradients, expected) < 8 * eps


@pytest.mark.parametrize("dtype", HALVES)
def test_the_fused_kernels_say_what_they_compute_in(dtype):
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=f"float32 and float64, not {name}; use backend='auto'"):
        HyperAttention(24, 3, backend="cpu").to(dtype)(torch.randn(2, 7, 24).to(dtype))
