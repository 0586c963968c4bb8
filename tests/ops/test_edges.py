"""What every backend answers at the edges: hidden numbers that are not finite, nothing to see, transforms.

`test_gpu_values.py` runs this file a second time, for the Triton backend under Triton's interpreter.
"""

import math

import pytest
import torch

from headcode import HyperAttention, ModelConfig, Transformer
from headcode.ops import (
    NORMS,
    POOLINGS,
    VALUE_NETS,
    attention_codes,
    explain_backend,
    hyper_attention,
    linear_attention_recurrent,
)
from headcode.ops.triton.backend import INTERPRETED

BACKENDS = ["triton"] if INTERPRETED else ["reference", "chunked", "cpu"]
B, H, TQ, TK, D = 2, 3, 5, 7, 2
SEEN = 5  # the keys from here on are hidden from every query
KINDS = [
    ("none", "linear"),
    ("rms_head", "relu"),
    ("softmax", "linear"),
    ("softmax", "silu"),
    ("rms_head", "relu_value"),
]
KINDS += [] if INTERPRETED else [("rms_head", "relu_relu")]
# How keys are hidden, and which backends can do it.
HIDE = {"padding": BACKENDS, "causal": BACKENDS, "both": BACKENDS}
HIDE |= {
    "boolean": [b for b in BACKENDS if b != "cpu"],
    "floating": [b for b in BACKENDS if b in ("reference", "chunked")],
}
CASES = [(hide, backend) for hide, backends in HIDE.items() for backend in backends]
NAN, INF = math.nan, math.inf
# Of a hidden key and its value; the interpreter is slow.
CONTENTS = [(NAN, INF), (-INF, NAN), (0.5, NAN), (NAN, 0.5), (INF, INF)][: 2 if INTERPRETED else None]


def hidden_by(hide):
    """Options that hide the keys from SEEN on from every query."""
    seen = torch.arange(TK) < SEEN
    pairs = seen & (torch.rand(TQ, TK, generator=torch.Generator().manual_seed(3)) > 0.3)
    return {
        "padding": {"mask": seen.view(1, 1, 1, TK)},
        "causal": {"causal": True, "query_offset": SEEN - TQ},
        "both": {"causal": True, "mask": seen.expand(B, 1, 1, TK)},
        "boolean": {"mask": pairs},
        "floating": {"mask": torch.zeros(TQ, TK).masked_fill(~pairs, -INF)},
    }[hide]


def options_of(norm, value_net, backend, width=D):
    """Of a call; a test of a backend that does not have the value net ends here."""
    if not VALUE_NETS[value_net].middle:
        return {"norm": norm, "value_net": value_net, "backend": backend}
    if backend == "cpu":
        pytest.skip("the CPU kernels have no value net with a middle layer")
    middle = torch.randn(H, width, width + 1, generator=torch.Generator().manual_seed(5))
    return {"norm": norm, "value_net": value_net, "backend": backend, "middle": middle}


def numbers(width=D):
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, H, TQ, width), (B, H, TK, width), (B, H, TK, width), (H, TQ + TK - 1), (B, H, TQ, width)]
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def run(q, k, v, band, grad, **options):
    """Output, and the gradients of q, k, v and the band."""
    inputs = [t.detach().clone().requires_grad_() for t in (q, k, v, band) if t is not None]
    out = hyper_attention(*inputs[:3], relative_bias=None if band is None else inputs[3], **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def same(actual, wanted):
    for given, expected in zip(actual, wanted, strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("norm", "value_net"), KINDS)
@pytest.mark.parametrize(("hide", "backend"), CASES)
def test_what_a_hidden_key_holds_reaches_nothing(hide, backend, norm, value_net):
    q, k, v, band, grad = numbers()
    options = options_of(norm, value_net, backend) | hidden_by(hide)
    clean = run(q, k, v, band, grad, **options)
    assert all((gradient[:, :, SEEN:] == 0).all() for gradient in clean[2:4])
    for key, value in CONTENTS:
        k[:, :, SEEN:], v[:, :, SEEN:] = key, value
        dirty = run(q, k, v, band, grad, **options)
        same(dirty, clean)
        assert all((gradient[:, :, SEEN:] == 0).all() for gradient in dirty[2:4])


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b in ("reference", "chunked")])
def test_hidden_bias_and_every_pooling_and_norm(backend, pooling):
    q, k, v, _, grad = numbers()
    for norm in NORMS:
        options = {"norm": norm, "value_net": "tanh", "backend": backend, "pooling": pooling, **hidden_by("boolean")}
        bias = torch.randn(1, H, TQ, TK, generator=torch.Generator().manual_seed(4))
        found = []
        for content in (0.5, NAN, INF):
            filled = bias.masked_fill(~options["mask"], content).requires_grad_()
            k[:, :, SEEN:], v[:, :, SEEN:] = content, content
            inputs = [t.clone().requires_grad_() for t in (q, k, v)]
            out = hyper_attention(*inputs, bias=filled, **options)
            found.append([out.detach(), *torch.autograd.grad(out, [*inputs, filled], grad)])
        same(found[1], found[0])
        same(found[2], found[0])
        assert (found[1][4].masked_fill(options["mask"], 0.0) == 0).all()


@pytest.mark.parametrize(("norm", "value_net"), KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_that_sees_no_key_is_zero_whatever_it_holds(backend, norm, value_net):
    """It gets no gradient either, and passes none on: neither its own numbers nor the gradient of its output count."""
    q, k, v, band, grad = numbers()
    blind_entry = torch.tensor([True, False]).view(B, 1, 1, 1).expand(B, 1, 1, TK)
    blind_rows = {"causal": True, "query_offset": -2}  # the first two stand before the first key
    for options, blind in (({"mask": blind_entry}, (slice(1, 2),)), (blind_rows, (slice(None), slice(None), slice(2)))):
        options = options_of(norm, value_net, backend) | options
        clean = run(q, k, v, band, grad, **options)
        for content in (NAN,) if INTERPRETED else (NAN, INF):
            dirty_q, dirty_grad = q.clone(), grad.clone()
            dirty_q[blind], dirty_grad[blind] = content, content
            dirty = run(dirty_q, k, v, band, dirty_grad, **options)
            same(dirty, clean)
            assert (dirty[0][blind] == 0).all() and (dirty[1][blind] == 0).all()


@pytest.mark.parametrize("width", [D, 17])
@pytest.mark.parametrize(("norm", "value_net"), KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_later_key_reaches_no_earlier_query_and_is_not_hidden_from_its_own(backend, norm, value_net, width):
    q, k, v, some_band, _ = numbers(width)
    for band in (some_band, None):  # without a band, torch's own attention may serve
        options = options_of(norm, value_net, backend, width) | {"relative_bias": band, "causal": True}
        clean = hyper_attention(q, k, v, **options)
        for key, value in CONTENTS:
            dirty_k, dirty_v = k.clone(), v.clone()
            dirty_k[:, :, -1], dirty_v[:, :, -1, 0] = key, value
            dirty = hyper_attention(q, dirty_k, dirty_v, **options)
            torch.testing.assert_close(dirty[:, :, :-1], clean[:, :, :-1], rtol=1e-5, atol=1e-5)
            assert dirty[:, :, -1, 0].isnan().all() or NAN not in (key, value)


def test_codes_of_hidden_pairs_are_zero_and_pass_no_gradient():
    q, k, *_ = numbers()
    for norm in NORMS:
        for hide in HIDE:
            found = []
            for content in (0.5, NAN, INF):
                k[:, :, SEEN:] = content
                inputs = [q.clone().requires_grad_(), k.clone().requires_grad_()]
                codes = attention_codes(*inputs, norm=norm, **hidden_by(hide))
                assert (codes[..., SEEN:] == 0).all()
                found.append([codes.detach(), *torch.autograd.grad(codes.square().sum(), inputs)])
            same(found[1], found[0])
            same(found[2], found[0])


@pytest.mark.parametrize("sizes", [(0, TQ, TK), (B, 0, TK), (B, TQ, 0), (0, 0, 0)])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_do(backend, pooling, sizes):
    batch, queries, keys = sizes
    for value_net in ("linear", "relu"):
        for causal in (False, True):
            q, k, v = (torch.randn(batch, H, n, D, requires_grad=True) for n in (queries, keys, keys))
            options = {"value_net": value_net, "causal": causal, "pooling": pooling}
            if explain_backend(q, k, v, **options).name != "cpu" and backend == "cpu":
                continue
            if pooling == "max" and backend == "triton":
                continue
            out = hyper_attention(q, k, v, **options, backend=backend)
            assert out.shape == (batch, H, queries, D) and (out == 0).all()
            for t, gradient in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
                assert gradient.shape == t.shape and (gradient == 0).all()


TRANSFORMS = {
    "grad": lambda f, q: torch.func.grad(lambda q: f(q).sin().sum())(q),
    "vjp": lambda f, q: torch.func.vjp(f, q)[1](torch.ones(B, H, TQ, D))[0],
    "jacrev": lambda f, q: torch.func.jacrev(f)(q),
    "jacfwd": lambda f, q: torch.func.jacfwd(f)(q),
    "hessian": lambda f, q: torch.func.hessian(lambda q: f(q).sin().sum())(q),
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (torch.ones_like(q),))[1],
    "vmap": lambda f, q: torch.func.vmap(f)(torch.stack((q, 2 * q))),
    "functionalize": lambda f, q: torch.func.functionalize(f)(q),
    "per-sample grad": lambda f, q: torch.func.vmap(torch.func.grad(lambda q: f(q).sum()))(torch.stack((q, 2 * q))),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_functional_transforms_are_the_references(name):
    q, k, v, band, _ = numbers()
    options = {"relative_bias": band, "causal": True, "dropout": 0.2, "dropout_seed": 3}
    found, chosen = [], []
    for backend in ("auto", "reference"):

        def function(q, backend=backend):
            chosen.append(explain_backend(q, k, v, backend=backend, **options))
            return hyper_attention(q, k, v, backend=backend, **options)

        found.append(TRANSFORMS[name](function, q))
    assert torch.equal(*found) and found[0].abs().max() > 0
    assert {choice.name for choice in chosen} == {"reference"}
    assert "the only one with a" in chosen[0].reason and "it has no" in chosen[0].rejected["chunked"]
    for backend in set(BACKENDS) - {"reference"}:
        with pytest.raises(ValueError, match=f"^backend '{backend}' has no .*; use backend='reference'.$"):
            TRANSFORMS[name](lambda q, backend=backend: hyper_attention(q, k, v, backend=backend, **options), q)


@pytest.mark.parametrize("name", ["grad", "vmap"])
def test_functional_transforms_inside_torch_compile(name):
    q, k, v, *_ = numbers()
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: TRANSFORMS[name](lambda q: hyper_attention(q, k, v), q), backend="aot_eager")
    torch.testing.assert_close(compiled(q), TRANSFORMS[name](lambda q: hyper_attention(q, k, v), q))


def test_a_vmap_that_must_draw_a_dropout_seed_says_what_to_do():
    q, k, v, *_ = numbers()
    with pytest.raises(ValueError, match="dropout_seed must be given where none can be drawn, as under vmap"):
        torch.func.vmap(lambda q: hyper_attention(q, k, v, dropout=0.1))(torch.stack((q, q)))
    assert torch.func.grad(lambda q: hyper_attention(q, k, v, dropout=0.1).sum())(q).abs().max() > 0


def test_a_models_gradients_under_torch_func():
    torch.manual_seed(0)
    config = ModelConfig(input_dim=3, output_dim=2, max_length=5, dim=16, num_layers=1, num_heads=2, causal=True)
    model = Transformer(config).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    parameters = dict(model.named_parameters())
    found = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().sum())(parameters)
    model(x).square().sum().backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(found[name], parameter.grad)


def test_padding_of_the_recurrent_form_may_hold_anything():
    torch.manual_seed(0)
    layer = HyperAttention(8, 2, method="linear", causal=True, recurrent=True)
    plain = HyperAttention(8, 2, method="linear", causal=True)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 6, 8)
    padding = torch.arange(6).expand(2, 6) >= 4
    clean = layer(x, key_padding_mask=padding)[:, :4]
    for content in (NAN, INF):
        dirty = x.masked_fill(padding[:, :, None], content)
        for form in (layer, plain):
            torch.testing.assert_close(form(dirty, key_padding_mask=padding)[:, :4], clean)
            torch.testing.assert_close(form(dirty)[:, :4], form(x)[:, :4])


def test_a_later_token_reaches_no_earlier_one_in_the_recurrent_form():
    q, k, v = (torch.randn(1, 2, 6, 3) for _ in range(3))
    clean, _ = linear_attention_recurrent(q, k, v, chunk=4)
    for i in range(6):
        dirty_v = v.clone()
        dirty_v[:, :, i] = NAN
        dirty, _ = linear_attention_recurrent(q, k, dirty_v, chunk=4)
        torch.testing.assert_close(dirty[:, :, :i], clean[:, :, :i])
        assert dirty[:, :, i:].isnan().all()


@pytest.mark.parametrize("method", ["hyla", "softmax", "linear"])
def test_a_later_token_reaches_no_earlier_one_in_a_fused_block(method):
    torch.manual_seed(0)
    config = ModelConfig(input_dim=3, output_dim=2, max_length=6, dim=32, num_heads=2, causal=True, method=method)
    model = Transformer(config)
    x = torch.randn(2, 6, 3)
    clean = model(x)
    for content in (NAN, INF):
        dirty = x.clone()
        dirty[:, 4] = content
        out = model(dirty)
        torch.testing.assert_close(out[:, :4], clean[:, :4])
        assert out[:, 4:].isnan().all()
