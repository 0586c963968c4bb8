"""Gradients of every norm × value net × pooling, against finite differences and against each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headcode.ops import NORMS, POOLINGS, VALUE_NETS, chunked, hyper_attention


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("value_net", VALUE_NETS)
@pytest.mark.parametrize("norm", NORMS)
def test_gradcheck(norm, value_net, pooling, backend):
    torch.manual_seed(0)
    q, k = torch.randn(1, 3, 2, 2), torch.randn(1, 3, 3, 2)
    v, band, bias = torch.randn(1, 3, 3, 2), torch.randn(3, 4), torch.randn(1, 3, 1, 3)
    tensors = [q, k, v, band, bias, *([torch.randn(3, 2, 3)] if VALUE_NETS[value_net].middle else [])]
    inputs = [t.double().requires_grad_() for t in tensors]
    mask = torch.tensor([[True, True, True], [True, False, True]])

    def function(q, k, v, band, bias, middle=None):
        return hyper_attention(
            q,
            k,
            v,
            relative_bias=band,
            bias=bias,
            middle=middle,
            mask=mask,
            norm=norm,
            value_net=value_net,
            pooling=pooling,
            dropout=0.2,
            dropout_seed=1,
            backend=backend,
        )

    assert torch.autograd.gradcheck(function, inputs)


SIZES = st.sampled_from([1, 2, 3, 5, 7, 11])


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(SIZES, SIZES, SIZES, SIZES, SIZES, st.sampled_from([2, 4, 6])),
    norm=st.sampled_from(list(NORMS)),
    value_net=st.sampled_from(list(VALUE_NETS)),
    pooling=st.sampled_from(POOLINGS),
    causal=st.booleans(),
    mask_kind=st.sampled_from(["none", "padding", "dense", "additive"]),
    dropout=st.sampled_from([0.0, 0.3]),
    chunk=st.sampled_from([1, 50, 700]),
    seed=st.integers(0, 2**32),
)
def test_chunked_is_the_reference(sizes, norm, value_net, pooling, causal, mask_kind, dropout, chunk, seed):
    batch, heads, queries, keys, qk_width, v_width = sizes
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shapes = [
        (batch, heads, length, width) for length, width in ((queries, qk_width), (keys, qk_width), (keys, v_width))
    ]
    shapes += [(heads, queries + keys - 1), (batch, heads, queries, 1)]
    shapes += [(heads, v_width, v_width + 1)] if VALUE_NETS[value_net].middle else []
    inputs = [draw(*shape).requires_grad_() for shape in shapes]
    mask = {
        "none": None,
        "padding": draw(batch, 1, 1, keys) > -0.5,
        "dense": draw(queries, keys) > -0.5,
        "additive": draw(batch, 1, queries, keys).masked_fill(draw(queries, keys) > 0.5, float("-inf")),
    }[mask_kind]
    results = []
    before, chunked.CHUNK_ELEMENTS = chunked.CHUNK_ELEMENTS, chunk
    try:
        for backend in ("reference", "chunked"):
            q, k, v, band, bias, *middle = inputs
            out = hyper_attention(
                q,
                k,
                v,
                relative_bias=band,
                bias=bias,
                middle=middle[0] if middle else None,
                mask=mask,
                causal=causal,
                norm=norm,
                value_net=value_net,
                pooling=pooling,
                dropout=dropout,
                dropout_seed=seed,
                backend=backend,
            )
            results.append((out, *torch.autograd.grad(out.sin().sum(), inputs)))
    finally:
        chunked.CHUNK_ELEMENTS = before
    for reference, other in zip(*results, strict=True):
        torch.testing.assert_close(other, reference, rtol=1e-9, atol=1e-9)


def test_a_floating_mask_is_differentiable():
    q = k = v = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    mask = torch.randn(3, 3, dtype=torch.float64).masked_fill(torch.eye(3).bool(), float("-inf")).requires_grad_()
    grads = []
    for backend in ("reference", "chunked"):
        out = hyper_attention(q, k, v, mask=mask, backend=backend)
        grads.append(torch.autograd.grad(out.sin().sum(), mask)[0])
    torch.testing.assert_close(*grads)
    assert (grads[0].diagonal() == 0).all() and (grads[0] != 0).any()
