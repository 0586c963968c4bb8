"""The fused block is the block op by op, to rounding, and leaves it to that wherever somebody looks into it."""

import copy

import pytest
import torch
from torch import nn

from headcode import capture_codes
from headcode.nn import ModelConfig, RelativeBias, Transformer, edit_codes
from headcode.nn import fused as fused_module
from headcode.nn import transformer as transformer_module
from headcode.nn.fused import run_fused
from headcode.ops import METHODS, block_plan

SERVED = ("softmax", "linear", "linear_rms", "hyla", "hyla_unnormed", "hyla_deep_linear", "softmax_hyla")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def fused(monkeypatch):
    """Whether each pass of a block so far was fused, in order."""
    passes = []

    def watched(*arguments):
        out = run_fused(*arguments)
        passes.append(out is not None)
        return out

    monkeypatch.setattr(transformer_module, "run_fused", watched)
    return passes


def make(**changes):
    settings = {"input_dim": 5, "output_dim": 3, "max_length": 13, "dim": 48, "num_heads": 4, "qk_dim": 32, "v_dim": 16}
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**(settings | {"mlp_dim": 80} | changes))).train()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms that are not 0 and 1
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def run(model, x, queries=None, seed=7):
    """The output, and gradients of everything, of a loss that reads the output unevenly."""
    x = x.clone().requires_grad_()
    out = model(x, queries=queries, dropout_seed=seed)
    weights = torch.linspace(0, 2, out.numel(), dtype=torch.float64).cos().view(out.shape).to(out.dtype)
    inputs = {"x": x, **dict(model.named_parameters())}
    gradients = torch.autograd.grad((out * weights).sum(), list(inputs.values()))
    return out.detach(), dict(zip(inputs, gradients, strict=True))


def distance(given, expected):
    return float((given.double() - expected).norm() / expected.norm())


def exact(model):
    """The same weights in float64, on the readable backend."""
    other = Transformer(model.config.replace(backend="reference")).double()
    other.load_state_dict(model.state_dict())
    return other.train(model.training)


@pytest.mark.parametrize("feedforward", ["gelu", "swiglu"])
@pytest.mark.parametrize("method", SERVED)
def test_every_method_and_feedforward(method, feedforward, fused):
    model = make(method=method, feedforward=feedforward, attention_dropout=0.1)
    x = torch.randn(3, 11, 5)
    out, gradients = run(model, x, slice(-4, -1))
    assert fused == [True, True]
    expected, expected_gradients = run(exact(model), x.double(), slice(-4, -1))
    assert distance(out, expected) < 1e-5
    # A softmax does not see what is added to all keys of a query: the gradient is 0 but for rounding.
    without_gradient = [n for n in gradients if "key_proj.bias" in n] if METHODS[method].norm == "softmax" else []
    for name, gradient in gradients.items():
        if name in without_gradient:
            assert gradient.norm() < 1e-5 * gradients[name.replace("bias", "weight")].norm()
        else:
            assert distance(gradient, expected_gradients[name]) < 1e-4, name


@pytest.mark.parametrize("position", ["relative", "relative_learned", "sinusoidal", "none"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 37])
def test_batches_positions_and_causality(batch, causal, position, fused):
    model = make(causal=causal, position=position, method="linear_rms", num_layers=1, dim=64, v_dim=64, mlp_dim=16)
    x = torch.randn(batch, 13, 5)
    for queries in (None, slice(-1, None), slice(0, 5)):
        out, gradients = run(model, x, queries)
        expected, expected_gradients = run(exact(model), x.double(), queries)
        assert distance(out, expected) < 1e-5
        assert all(distance(gradients[name], expected_gradients[name]) < 1e-4 for name in gradients)
    assert all(fused[::2]) and not any(fused[1::2])


def test_shared_layers_and_frozen_parts(fused):
    model = make(share_layers=True, num_layers=3, method="hyla_deep_linear")
    x = torch.randn(5, 7, 5)
    _, gradients = run(model, x)
    _, expected = run(exact(model), x.double())
    assert all(distance(gradients[name], expected[name]) < 1e-4 for name in gradients)
    frozen = model.blocks[0].attention.key_proj
    frozen.requires_grad_(False)
    model(x).sum().backward()
    assert frozen.weight.grad is None and model.blocks[0].attention.query_proj.weight.grad is not None
    assert fused == [True] * 3 + [False] * 3 + [True] * 3


@pytest.mark.parametrize("queries", [None, slice(-4, None)])
def test_bits_do_not_depend_on_runs_or_threads(queries, threads):
    model, x = make(method="hyla", attention_dropout=0.1), torch.randn(67, 13, 5)
    results = []
    for number in (1, 2, 2, 3):
        threads(number)
        hidden = torch.randn(67, 13, 48, generator=torch.Generator().manual_seed(3)).requires_grad_()
        out = model.blocks[0](hidden, queries=queries, dropout_seed=5)
        inputs = [hidden, *model.blocks[0].parameters()]
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), inputs)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    assert x.shape[0] * 13 > block_plan.LEAST_TOKENS * 2  # several tasks, several chunks


def test_nothing_is_left_unwritten(monkeypatch):
    """Buffers that start as NaN give the same as any others."""
    model, x = make(method="softmax"), torch.randn(3, 13, 5)
    expected = run(model, x, slice(-3, None))
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: new_empty(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(float("nan")))
    out, gradients = run(model, x, slice(-3, None))
    assert torch.equal(out, expected[0])
    assert all(torch.equal(gradients[name], expected[1][name]) for name in gradients)


def test_a_seed_is_drawn_as_op_by_op(monkeypatch):
    model, x = make(attention_dropout=0.3, method="hyla_deep_linear"), torch.randn(2, 7, 5)
    torch.manual_seed(11)
    out = model(x).detach()
    state = torch.random.get_rng_state()
    monkeypatch.setattr(transformer_module, "run_fused", lambda *arguments: None)
    torch.manual_seed(11)
    assert distance(out, model(x).detach().double()) < 1e-5
    assert torch.equal(state, torch.random.get_rng_state())


def test_evaluation_mode_has_no_dropout(fused):
    model, x = make(attention_dropout=0.5, method="linear").eval(), torch.randn(2, 7, 5)
    out, _ = run(model, x)
    assert fused == [True, True]
    with torch.no_grad():
        assert distance(out, model(x).double()) < 1e-5
    assert fused == [True, True, False, False]


def test_gradients_with_a_graph_are_those_of_the_parts():
    """Backward with create_graph: right values; the second derivative is refused as the fused op refuses it."""
    model, x = make(method="linear"), torch.randn(2, 7, 5, requires_grad=True)
    (plain,) = torch.autograd.grad(model(x).square().sum(), x)
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    assert gradient.requires_grad and distance(gradient.detach(), plain.double()) < 1e-5
    with pytest.raises(RuntimeError, match="use backend='reference'"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("feedforward", ["gelu", "swiglu"])
def test_weights_from_outside(feedforward, fused):
    """`functional_call` puts other weights in for one pass; gradients are theirs, with a graph or without."""
    model, x = make(method="linear", feedforward=feedforward), torch.randn(2, 7, 5)
    others = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    results = []
    for with_graph in (False, True):
        out = torch.func.functional_call(model, others, x, {"queries": slice(1, 4)})
        results.append(torch.autograd.grad(out.square().sum(), list(others.values()), create_graph=with_graph))
    assert fused == [True] * 4
    for plain, with_graph in zip(*results, strict=True):
        assert distance(with_graph.detach(), plain.double()) < 1e-4


def test_the_band_is_read_where_the_module_reads_it():
    for num_buckets, sizes in ((16, (16, 16, 0)), (13, (4, 9, 5)), (1, (3, 3, 0)), (36, (40, 40, 0))):
        relative = RelativeBias(2, num_buckets)
        assert torch.equal(fused_module._places(num_buckets, *sizes), relative.places(*sizes))


def test_saved_tensors_that_changed_are_noticed():
    model, x = make(), torch.randn(2, 7, 5)
    out = model(x)
    with torch.no_grad():
        model.blocks[0].attention.value_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_recomputation_of_activations():
    from torch.utils.checkpoint import checkpoint

    model, hidden = make(method="hyla"), torch.randn(3, 7, 48, requires_grad=True)
    layer = model.blocks[0]
    inputs = [hidden, *layer.parameters()]
    plain = torch.autograd.grad(layer(hidden).square().sum(), inputs)
    again = torch.autograd.grad(checkpoint(layer, hidden, use_reentrant=False).square().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def hooked(model):
    model.blocks[0].feedforward.hidden_proj.register_forward_hook(lambda *arguments: None)
    model.blocks[1].attention.register_full_backward_hook(lambda *arguments: None)


def patched(model):
    for layer in model.blocks:
        layer.feedforward_norm.forward = lambda x: x


def replaced(model):
    class OtherLinear(nn.Linear):
        pass

    for layer in model.blocks:
        layer.attention.key_proj.__class__ = OtherLinear


def parametrised(model):
    for layer in model.blocks:
        torch.nn.utils.parametrize.register_parametrization(layer.attention.query_proj, "weight", nn.Identity())


def without_bias(model):
    for layer in model.blocks:
        layer.attention.output_proj.bias = None


@pytest.mark.parametrize("change", [hooked, patched, replaced, parametrised, without_bias])
def test_parts_that_are_watched_or_changed_are_used(change, fused):
    model = make(method="linear")
    change(model)
    model(torch.randn(2, 7, 5)).sum().backward()
    assert fused == [False, False]


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": "reference"},
        {"backend": "chunked"},
        {"position": "rotary"},
        {"qk_norm": True},
        {"pooling": "mean"},
        {"value_net": "swiglu"},
        {"norm": "softmax_head"},
        {"mlp_dim": 72},
        {"dim": 40},
        {"method": "linear", "causal": True, "recurrent": True, "position": "none"},
    ],
)
def test_what_the_kernels_do_not_know(changes, fused):
    make(**changes)(torch.randn(2, 7, 5)).sum().backward()
    assert fused == [False, False]


def test_codes_captured_and_edited(fused):
    model, x = make(method="hyla"), torch.randn(2, 7, 5)
    with capture_codes(model, detach=False) as codes:
        model(x)
    assert codes[1].shape == (2, 4, 7, 7)
    with edit_codes(model, lambda layer, codes: 0 * codes):
        model(x)
    assert fused == [False] * 4
    model(x)
    assert fused[4:] == [True, True]


def test_other_numbers_and_modes(fused):
    model, x = make(method="linear"), torch.randn(2, 7, 5)
    with torch.no_grad():
        model(x)
    exact(model)(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
    model.blocks[0](torch.randn(2, 48, 7, requires_grad=True).transpose(1, 2))
    hidden, ask = torch.randn(2, 7, 48), transformer_module.run_fused
    torch.func.grad(lambda h: h.sum() if ask(model.blocks[0], h, None, None) is None else h)(hidden)
    with torch.autograd.forward_ad.dual_level():
        ask(model.blocks[0], torch.autograd.forward_ad.make_dual(hidden, hidden), None, None)
    assert len(fused) == 9 and not any(fused)
    frozen = copy.deepcopy(model).requires_grad_(False)
    fused.clear()
    frozen(x)
    model(x, key_padding_mask=torch.zeros(2, 7, dtype=torch.bool))
    assert fused == [False, False]  # with a mask it is not even asked


def test_global_hooks(fused):
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *arguments: None)
    try:
        make()(torch.randn(2, 7, 5))
    finally:
        handle.remove()
    assert fused == [False, False]


def test_bad_queries_are_refused_in_the_same_words():
    layer = make().blocks[0]
    with pytest.raises(ValueError, match="queries must name at least one of 7 positions"):
        layer(torch.randn(2, 7, 48, requires_grad=True), queries=slice(5, 3))
    with pytest.raises(ValueError, match="dropout_seed must be from 0"):
        layer(torch.randn(2, 7, 48, requires_grad=True), dropout_seed=-1)
    with pytest.raises(RuntimeError, match="expected input with shape"):
        layer(torch.randn(2, 7, 47, requires_grad=True))


def test_compiled_models_trace_the_parts():
    model, x = make(method="linear", num_layers=1), torch.randn(2, 7, 5)
    expected = model(x).detach()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert distance(compiled(x).detach(), expected.double()) < 1e-5
