"""Pooling that divides by the number of keys, and windows: by hand, and alike in every backend."""

import pytest
import torch

from headcode.ops import attention_codes, explain_backend, hyper_attention

B, H, D = 2, 3, 2


def tensors(queries, keys):
    generator = torch.Generator().manual_seed(queries + keys)
    shapes = ((B, H, queries, D), (B, H, keys, D), (B, H, keys, D))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def test_mean_and_sqrt_divide_by_the_keys_that_a_query_sees():
    q, k, v = tensors(5, 7)
    padding = torch.tensor([[True] * 7, [True, False, True, True, True, True, False]])
    options = {"mask": padding[:, None, None], "causal": True, "backend": "reference"}
    total = hyper_attention(q, k, v, **options)
    seen = [[3, 4, 5, 6, 7], [2, 3, 4, 5, 5]]  # query i stands at position i + 2
    count = torch.tensor(seen, dtype=torch.float64)[:, None, :, None]
    torch.testing.assert_close(hyper_attention(q, k, v, pooling="mean", **options), total / count)
    torch.testing.assert_close(hyper_attention(q, k, v, pooling="sqrt", **options), total / count.sqrt())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 3, 50])
def test_a_window_is_a_mask_of_near_keys(window, causal):
    q, k, v = tensors(5, 7)
    apart = torch.arange(5)[:, None] + 2 - torch.arange(7)
    near = (apart.abs() < window) & (apart >= 0 if causal else True)
    for norm in ("rms_head", "softmax"):
        expected = hyper_attention(q, k, v, mask=near, norm=norm, backend="reference")
        given = hyper_attention(q, k, v, window=window, causal=causal, norm=norm, backend="reference")
        torch.testing.assert_close(given, expected)
        codes = attention_codes(q, k, window=window, causal=causal, norm=norm)
        torch.testing.assert_close(codes, attention_codes(q, k, mask=near, norm=norm))
        assert (codes[:, :, ~near] == 0).all()


@pytest.mark.parametrize("backend", ["cpu", "chunked"])
@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrt"])
@pytest.mark.parametrize("norm", ["rms_head", "softmax"])
@pytest.mark.parametrize(("causal", "window"), [(True, 5), (False, 40), (True, 130), (True, None)])
def test_backends_agree_on_long_sequences(backend, pooling, norm, causal, window):
    """Several blocks of keys, of which some lie outside of every query's window."""
    options = {"norm": norm, "pooling": pooling, "causal": causal, "window": window}
    padding = torch.rand(B, 1, 1, 307, generator=torch.Generator().manual_seed(1)) > 0.2
    results = []
    for name in ("reference", backend):
        inputs = [t.requires_grad_() for t in tensors(211, 307)]
        out = hyper_attention(*inputs, mask=padding, backend=name, **options)
        results.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
    for given, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-9, atol=1e-9)


def test_gradients_that_come_in_are_left_as_they_are():
    q, k, v = (t.requires_grad_() for t in tensors(5, 5))
    grad = torch.randn(B, H, 5, D, dtype=torch.float64)
    before = grad.clone()
    hyper_attention(q, k, v, pooling="mean", backend="cpu").backward(grad)
    assert torch.equal(grad, before)


def test_the_fused_kernels_serve_both():
    q, k, v = tensors(5, 7)
    for options in ({"pooling": "mean"}, {"pooling": "sqrt"}, {"window": 3}, {"window": 3, "causal": True}):
        assert explain_backend(q, k, v, **options).name == "cpu"


@pytest.mark.parametrize(
    ("window", "error", "words"),
    [
        (0, ValueError, "window must be at least 1, a query's own position, or None, got 0"),
        (2.0, TypeError, "window must be an integer, got 2.0"),
        (True, TypeError, "window must be an integer, got True"),
    ],
)
def test_windows_that_are_none(window, error, words):
    with pytest.raises(error, match=words):
        hyper_attention(*tensors(5, 7), window=window)
