"""Fused blocks whose products are of bf16 numbers, under CPU autocast."""

import math

import pytest
import torch
import torch.nn.functional as F

from headcode.nn import ModelConfig, Transformer, why_op_by_op
from headcode.nn import fused as fused_module
from headcode.ops import METHODS
from headcode.ops.cpu.logits import LogitsCall, token_logits
from tests.support.bf16 import needs_bf16, round_products, rounded_product
from tests.support.models import distance, exact, make

NAN = float("nan")


def in_bf16():
    return torch.autocast("cpu", torch.bfloat16)


def run_block(block, x, grad, **options):
    """Output and, by name, gradients of everything."""
    inputs = {"x": x.clone().requires_grad_(), **dict(block.named_parameters())}
    out = block(inputs["x"], dropout_seed=7, **options)
    gradients = torch.autograd.grad(out, list(inputs.values()), grad.to(out.dtype))
    return out.detach(), dict(zip(inputs, gradients, strict=True))


def check_block(length=11, queries=None, **changes):
    """A block against float64 with rounded factors, as float32 would be; and against its own float32."""
    settings = {"num_layers": 1, "attention_dropout": 0.1, "max_length": length} | changes
    block, readable = make(**settings).blocks[0], round_products(exact(make(**settings))).blocks[0]
    dim = block.attention.dim
    x = torch.randn(3, length, dim)
    grad = torch.randn(3, length if queries is None else queries.stop - queries.start, dim)
    plain, plain_gradients = run_block(block, x, grad, queries=queries)
    with in_bf16():
        assert why_op_by_op(block, x) is None
        out, gradients = run_block(block, x, grad, queries=queries)
        with torch.no_grad():
            assert torch.equal(block(x, dropout_seed=7, queries=queries), out)
    expected, expected_gradients = run_block(readable, x.double(), grad.double(), queries=queries)
    # What is almost a tie may be rounded the other way: one number in thousands is then off by a bit of bf16.
    assert distance(out, expected) < 2e-4 and out.dtype == torch.float32
    assert 1e-4 < distance(out, plain.double()) < 2e-2
    for name, gradient in gradients.items():
        if "key_proj.bias" in name and block.attention.norm == "softmax":
            continue  # 0 but for rounding
        assert gradient.dtype == torch.float32
        assert distance(gradient, expected_gradients[name]) < 2e-3, name
        # As far from the plain one as rounding takes it, and no farther: few wide heads, or a ReLU, may take it far.
        exact_plain = plain_gradients[name].double()
        assert distance(gradient, exact_plain) < 1.01 * distance(expected_gradients[name], exact_plain) + 2e-3, name


@needs_bf16
@pytest.mark.parametrize("feedforward", ["gelu", "swiglu"])
@pytest.mark.parametrize("method", ["softmax", "linear", "hyla", "softmax_hyla"])
def test_methods_and_feedforwards(method, feedforward):
    assert method in METHODS
    check_block(method=method, feedforward=feedforward)


@needs_bf16
@pytest.mark.parametrize(
    ("length", "queries", "changes"),
    [
        (1, None, {}),
        (13, slice(9, 12), {"causal": True}),
        (97, slice(0, 5), {"position": "rotary"}),
        (7, None, {"dim": 16, "mlp_dim": 1040, "qk_dim": 16}),
        (5, None, {"dim": 1040, "mlp_dim": 48, "num_heads": 2}),
    ],
)
def test_lengths_and_widths(length, queries, changes):
    check_block(length, queries, **changes)


@needs_bf16
def test_a_block_of_the_papers_size_is_no_farther_from_float32_than_op_by_op(fused):
    sizes = {"dim": 128, "num_heads": 16, "qk_dim": 64, "v_dim": 64, "mlp_dim": 256, "max_length": 36}
    block, x, grad = make(method="hyla", **sizes).blocks[0], torch.randn(3, 36, 128), torch.randn(3, 36, 128)
    plain, plain_gradients = run_block(block, x, grad)
    with in_bf16():
        out, gradients = run_block(block, x, grad)
        block.attention.key_proj.register_forward_hook(lambda *arguments: None)
        parts, parts_gradients = run_block(block, x, grad)
    assert fused == [True, True, False]
    found = (gradients, parts_gradients, plain_gradients)
    ours, parts_all, right = (torch.cat([g.flatten() for g in each.values()]).double() for each in found)
    assert distance(out, plain.double()) < min(1e-2, 1.1 * distance(parts, plain.double()))
    assert distance(ours, right) < min(5e-2, 1.1 * distance(parts_all, right))


@needs_bf16
def test_padding():
    model, x = make(method="hyla"), torch.randn(2, 7, 48)
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    readable = round_products(exact(model))
    with in_bf16(), torch.no_grad():
        out = model.blocks[0](x, key_padding_mask=padding, dropout_seed=7)
    expected = readable.blocks[0](x.double(), key_padding_mask=padding, dropout_seed=7).detach()
    assert distance(out, expected) < 2e-4


@needs_bf16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_are_those_of_the_parts(dtype, fused):
    model, grad = make(method="hyla"), torch.randn(2, 7, 48)
    x = torch.randn(2, 7, 48).to(dtype)
    with in_bf16():
        out, gradients = run_block(model.blocks[0], x, grad)
        handle = model.blocks[0].attention.key_proj.register_forward_hook(lambda *arguments: None)
        parts, parts_gradients = run_block(model.blocks[0], x, grad)
        handle.remove()
    assert fused == [True, False]
    assert out.dtype == parts.dtype == dtype
    assert {n: g.dtype for n, g in gradients.items()} == {n: g.dtype for n, g in parts_gradients.items()}
    # Autocast rounds every output as well, and the sums in attention.
    assert distance(out.float(), parts.double()) < 2e-2


@needs_bf16
def test_a_model_begins_and_goes_on_in_float32(fused):
    """Its residual stream at least; what it gives is rounded, as autocast does it."""
    model, x, seen = make(method="hyla"), torch.rand(3, 11, 5), []
    model.final_norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with in_bf16():
        embedded, rounded_input = model.embed(x, 0), model.embed(x.bfloat16(), 0)
        out = model(x, dropout_seed=7)
    assert torch.equal(embedded, model.embed(x, 0)) and rounded_input.dtype == torch.float32
    assert seen[0].dtype == torch.float32 and out.dtype == torch.bfloat16 and fused == [True, True]
    expected = exact(model)(x.double(), dropout_seed=7).detach()
    assert distance(out.detach().float(), expected) < 2e-2


@needs_bf16
@pytest.mark.parametrize("queries", [None, slice(9, 13)])
def test_bits_do_not_depend_on_runs_or_threads(queries, threads):
    block = make(method="hyla", attention_dropout=0.1).blocks[0]
    x, results = torch.randn(67, 13, 48), []
    grad = torch.randn(67, 13 if queries is None else 4, 48)
    for number in (1, 2, 2, 3):
        threads(number)
        with in_bf16():
            out, gradients = run_block(block, x, grad, queries=queries)
        results.append([out, *gradients.values()])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@needs_bf16
@pytest.mark.parametrize("changes", [{"method": "softmax"}, {"method": "softmax_hyla", "feedforward": "swiglu"}])
def test_nothing_is_left_unwritten(changes, monkeypatch):
    """Buffers that start as NaN give the same as any others."""
    block, x, grad = make(**changes).blocks[0], torch.randn(3, 13, 48), torch.randn(3, 3, 48)
    results, new_empty, empty_like = [], torch.Tensor.new_empty, torch.empty_like
    for _ in range(2):
        with in_bf16():
            out, gradients = run_block(block, x, grad, queries=slice(10, 13))
        results.append([out, *gradients.values()])
        monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: new_empty(*a, **k).fill_(NAN))
        monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(NAN))
    assert all(map(torch.equal, *results))


@needs_bf16
def test_gradients_with_a_graph_round_too():
    block, x = make(method="linear").blocks[0], torch.randn(2, 7, 48, requires_grad=True)
    with in_bf16():
        out = block(x)
    (plain,) = torch.autograd.grad(out.square().sum(), x, retain_graph=True)
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    assert gradient.requires_grad and 1e-4 < distance(gradient.detach(), plain.double()) < 3e-2


@needs_bf16
@pytest.mark.parametrize(("shape", "vocabulary", "dim"), [((3, 37), 48, 16), ((1, 61), 2064, 1040), ((97,), 1136, 80)])
def test_logits_and_their_gradients(shape, vocabulary, dim):
    sizes = ((*shape, dim), (dim,), (dim,), (vocabulary, dim))
    given = [torch.randn(size).requires_grad_() for size in sizes]
    wide = [t.detach().double().requires_grad_() for t in given]
    out = token_logits(*given, LogitsCall(1e-6, 0.3, "bf16"))
    # The factor is in the LayerNorm, before the rounding.
    normed = F.layer_norm(wide[0], (dim,), None, None, 1e-6) * (0.3 * wide[1]) + 0.3 * wide[2]
    expected = rounded_product(normed, wide[3])
    assert distance(out.detach(), expected.detach()) < 2e-4
    grad = torch.randn_like(out)
    found, wanted = torch.autograd.grad(out, given, grad), torch.autograd.grad(expected, wide, grad.double())
    assert all(distance(*pair) < 1e-3 for pair in zip(found, wanted, strict=True))


@needs_bf16
def test_logits_of_a_model_have_the_dtype_of_the_parts(monkeypatch):
    sizes = {"dim": 48, "num_heads": 4, "qk_dim": 16, "v_dim": 16, "mlp_dim": 32, "max_length": 37, "causal": True}
    model, tokens = Transformer(ModelConfig(vocab_size=112, **sizes)), torch.randint(0, 112, (3, 37))
    with in_bf16():
        out = model(tokens)
        monkeypatch.setattr("headcode.nn.transformer.run_fused_logits", lambda *arguments: None)
        parts = model(tokens)
    assert out.dtype == parts.dtype == torch.bfloat16
    assert distance(out.detach().float(), parts.detach().double()) < 2e-2 and math.isfinite(float(out.detach().sum()))


def test_a_processor_without_the_instructions_goes_op_by_op(fused, monkeypatch):
    monkeypatch.setattr(fused_module.cpu, "why_no_bf16", lambda: "the processor has no avx512_bf16")
    model, x = make(method="hyla"), torch.randn(2, 7, 5)
    with in_bf16():
        assert why_op_by_op(model.blocks[0], torch.randn(2, 7, 48)) == (
            "under autocast, the processor has no avx512_bf16"
        )
        model(x)
    assert fused == [False, False]
    model(x)
    assert fused[2:] == [True, True]


def test_autocast_to_another_dtype_goes_op_by_op():
    with torch.autocast("cpu", torch.float16):
        reason = why_op_by_op(make().blocks[0], torch.randn(2, 7, 48))
    assert reason == "autocast is to another dtype than bfloat16"
