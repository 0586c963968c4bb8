"""The fused block is the block op by op, to rounding."""

import threading

import pytest
import torch

from headcode.nn import RelativeBias
from headcode.nn import fused as fused_module
from headcode.nn import transformer as transformer_module
from headcode.ops import METHODS
from headcode.ops.cpu import NET_CODES, NORM_CODES, block_plan
from headcode.ops.cpu import block as block_module
from tests.support.models import distance, exact, make, run

SERVED = ("softmax", "linear", "linear_rms", "hyla", "hyla_unnormed", "hyla_deep_linear", "softmax_hyla")


@pytest.mark.parametrize("feedforward", ["gelu", "swiglu"])
@pytest.mark.parametrize("method", SERVED)
def test_every_method_and_feedforward(method, feedforward, fused):
    check_block(fused, METHODS[method].norm, method=method, feedforward=feedforward)


@pytest.mark.parametrize("value_net", NET_CODES)
@pytest.mark.parametrize("norm", NORM_CODES)
def test_every_norm_and_value_net_of_the_kernels(norm, value_net, fused):
    check_block(fused, norm, norm=norm, value_net=value_net)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "sqrt"])
@pytest.mark.parametrize("method", ["softmax", "hyla", "softmax_hyla"])
def test_poolings_that_divide(method, pooling, causal, fused):
    check_block(fused, METHODS[method].norm, method=method, pooling=pooling, causal=causal)
    model, x, padding = make(method=method, pooling=pooling, causal=causal), torch.randn(3, 11, 5), torch.arange(11) > 7
    padding = padding & (torch.arange(3) == 1)[:, None]
    out = model(x, key_padding_mask=padding).detach()
    expected = exact(model)(x.double(), key_padding_mask=padding).detach()
    assert distance(out[~padding], expected[~padding]) < 1e-5 and fused[4:6] == [True, True]


def check_block(fused, used_norm, **choices):
    """Output and gradients of a fused block against float64, op by op."""
    model = make(**choices, attention_dropout=0.1)
    x = torch.randn(3, 11, 5)
    out, gradients = run(model, x, slice(-4, -1))
    assert fused == [True, True]
    expected, expected_gradients = run(exact(model), x.double(), slice(-4, -1))
    assert distance(out, expected) < 1e-5
    # A softmax does not see what is added to all keys of a query: the gradient is 0 but for rounding.
    without_gradient = [n for n in gradients if "key_proj.bias" in n] if used_norm == "softmax" else []
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


@pytest.fixture
def plans(monkeypatch):
    """The plan of each pass so far, forward or backward."""
    found = []

    def watched(sizes):
        found.append(block_plan.plan_block(sizes))
        return found[-1]

    monkeypatch.setattr(block_module, "plan_block", watched)
    return found


def gradients_of(layer, hidden, grad, seed=7):
    """Of a single block: its output, and the gradients of its input and parameters, given that of its output."""
    hidden = hidden.clone().requires_grad_()
    out = layer(hidden, dropout_seed=seed)
    return [out.detach(), *torch.autograd.grad(out, [hidden, *layer.parameters()], grad)]


def equal(given, expected):
    return all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


@pytest.mark.parametrize(
    ("batch", "length", "queries", "changes"),
    [
        (1, 1, None, {"method": "softmax_hyla", "feedforward": "swiglu"}),
        (1, 97, None, {"method": "softmax", "attention_dropout": 0.2}),
        (2, 97, slice(2, 5), {"method": "hyla", "causal": True, "attention_dropout": 0.2}),
        (1, 200, None, {"method": "softmax_hyla", "causal": True}),
        (1, 200, None, {"method": "linear", "position": "none", "feedforward": "swiglu"}),
        (3, 100, slice(-4, None), {"method": "hyla_deep_linear", "num_heads": 16, "qk_dim": 16}),
    ],
)
def test_lengths_of_several_blocks_of_keys(batch, length, queries, changes, plans):
    model, x = make(num_layers=1, max_length=length, **changes), torch.randn(batch, length, 5)
    out, gradients = run(model, x, queries)
    # A batch too small for tasks of whole entries is cut along the keys; gradients of q are then summed up in parts.
    assert (plans[-1].attention.partial_q is not None) == (length == 200)
    assert plans[-1].attention.needs_delta_kernel == (changes["method"] == "softmax_hyla")
    expected, expected_gradients = run(exact(model), x.double(), queries)
    assert distance(out, expected) < 1e-5
    for name in gradients:
        if float(expected_gradients[name].norm()) > 1e-12:
            assert distance(gradients[name], expected_gradients[name]) < 1e-4, name


@pytest.mark.parametrize(("causal", "queries"), [(True, None), (False, slice(2, 5))])
def test_softmax_that_torch_serves(causal, queries, plans):
    model = make(method="softmax", position="none", causal=causal, qk_dim=64, v_dim=64)
    x = torch.randn(3, 13, 5)
    out, gradients = run(model, x, queries)
    assert len(plans) == 4 and plans[0].attention.by_torch
    expected, expected_gradients = run(exact(model), x.double(), queries)
    assert distance(out, expected) < 1e-5
    names = [name for name in gradients if "key_proj.bias" not in name]
    assert all(distance(gradients[name], expected_gradients[name]) < 1e-4 for name in names)


def test_gradients_as_autograd_hands_them_over():
    """Expanded, with strides, or with a sign that is not in memory yet."""
    model, hidden = make(method="hyla"), torch.randn(3, 7, 48)
    values = torch.randn(3, 7, 48)
    given = [torch.ones(()).expand(3, 7, 48), torch.randn(48, 7, 3).permute(2, 1, 0), torch._neg_view(values)]
    for grad, plain in zip(given, [torch.ones(3, 7, 48), given[1].contiguous(), -values], strict=True):
        assert equal(gradients_of(model.blocks[0], hidden, grad), gradients_of(model.blocks[0], hidden, plain))
    negated = torch._neg_view(hidden)
    out = model.blocks[0](negated).detach()
    assert distance(out, model.blocks[0](-hidden).detach().double()) < 1e-5


def test_models_that_share_a_plan_keep_to_themselves(plans, threads):
    layers = [make(method="softmax_hyla", attention_dropout=0.2).blocks[i] for i in (0, 1)]
    hidden, grad = torch.randn(3, 13, 48), torch.randn(3, 13, 48)
    expected = [gradients_of(layer, hidden, grad, seed) for seed, layer in enumerate(layers)]
    inputs = [[hidden.clone().requires_grad_(), *layer.parameters()] for layer in layers]
    outs = [layer(given[0], dropout_seed=seed) for seed, (layer, given) in enumerate(zip(layers, inputs, strict=True))]
    assert len({id(plan) for plan in plans}) == 1
    for number in (3, 1):  # twice: nothing that was kept is spoilt
        threads(number)
        for out, given, (_, *gradients) in zip(outs, inputs, expected, strict=True):
            assert equal(torch.autograd.grad(out, given, grad, retain_graph=True), gradients)
    assert not torch.equal(expected[0][0], gradients_of(layers[0], hidden, grad, 1)[0])


def test_threads_that_share_a_plan_keep_to_themselves(threads):
    layers = [make(method="hyla", attention_dropout=0.2).blocks[i] for i in (0, 1)]
    hidden, grad = torch.randn(9, 13, 48), torch.randn(9, 13, 48)
    expected = [gradients_of(layer, hidden, grad, seed) for seed, layer in enumerate(layers)]
    block_plan.plan_block.cache_clear()
    start, verdicts = threading.Barrier(3), []

    def work(number):
        torch.set_num_threads(1 + number)
        start.wait()
        which = number % 2
        for _ in range(10):
            verdicts.append(equal(gradients_of(layers[which], hidden, grad, which), expected[which]))

    workers = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert verdicts == [True] * 30


def test_parts_alone_and_frozen_inputs():
    layer, hidden, grad = make(method="hyla").blocks[0], torch.randn(3, 7, 48), torch.randn(3, 7, 48)
    _, of_hidden, *of_parameters = gradients_of(layer, hidden, grad)
    expected = dict(zip([name for name, _ in layer.named_parameters()], of_parameters, strict=True))
    layer.requires_grad_(False)
    given = hidden.clone().requires_grad_()
    assert torch.equal(*torch.autograd.grad(layer(given), given, grad), of_hidden)
    for name in ("attention.relative_bias.table", "attention.value_proj.bias", "attention_norm.weight"):
        parameter = layer.get_parameter(name).requires_grad_()
        assert torch.equal(*torch.autograd.grad(layer(hidden), parameter, grad), expected[name])


def test_what_was_kept_may_come_back_elsewhere():
    """Hooks on saved tensors may put them into memory of their own, side by side."""
    layer, hidden, grad = make(method="softmax_hyla").blocks[0], torch.randn(3, 7, 48), torch.randn(3, 7, 48)
    expected = gradients_of(layer, hidden, grad)

    def pack(t):
        return torch.cat([torch.full((5,), float("nan")), t.detach().flatten()]), t.shape

    def unpack(packed):
        return packed[0][5:].view(packed[1])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert equal(gradients_of(layer, hidden, grad), expected)


def test_norms_with_a_whole_number_to_add(fused):
    model, x = make(method="linear"), torch.randn(2, 7, 5)
    readable = exact(model)
    for layer in (*model.blocks, *readable.blocks):
        layer.attention_norm.eps, layer.feedforward_norm.eps = 1, 2
    out, gradients = run(model, x)
    expected, expected_gradients = run(readable, x.double())
    assert fused[:2] == [True, True] and distance(out, expected) < 1e-5
    assert all(distance(gradients[name], expected_gradients[name]) < 1e-4 for name in gradients)


@pytest.mark.parametrize("position", ["none", "relative"])
def test_the_default_device_does_not_matter(position):
    layer, hidden, grad = make(position=position).blocks[0], torch.randn(3, 11, 48), torch.randn(3, 11, 48)
    expected = gradients_of(layer, hidden, grad)
    block_plan.plan_block.cache_clear()
    fused_module._band_buckets.cache_clear()
    with torch.device("meta"):
        assert equal(gradients_of(layer, hidden, grad), expected)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("attention.key_proj.weight", (16, 48)),
        ("attention.key_proj.bias", (16,)),
        ("attention.output_proj.weight", (48, 32)),
        ("attention_norm.weight", (16,)),
        ("feedforward.hidden_proj.weight", (16, 48)),
        ("feedforward.hidden_proj.bias", (80, 48)),
    ],
)
def test_weights_that_do_not_fit_are_refused(name, shape, fused):
    """The kernels read by the shapes that they expect: they must not be asked."""
    model = make(method="linear", num_layers=1)
    others = {f"blocks.0.{name}": torch.randn(shape, requires_grad=True)}
    with pytest.raises(RuntimeError, match="shape|size"):
        torch.func.functional_call(model, others, torch.randn(2, 7, 5))
    assert fused == [False]


@pytest.mark.parametrize("changes", [{"method": "softmax"}, {"method": "softmax_hyla", "feedforward": "swiglu"}])
def test_nothing_is_left_unwritten(changes, monkeypatch):
    """Buffers that start as NaN give the same as any others."""
    model, x = make(**changes), torch.randn(3, 13, 5)
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
    expected, _ = run(exact(model), x.double())
    assert distance(out, expected) < 1e-5 and fused[:2] == [True, True]


def test_gradients_with_a_graph_are_those_of_the_parts():
    """Backward with create_graph: right values, and gradients of their own, which the reference has."""
    model, x = make(method="linear"), torch.randn(2, 7, 5, requires_grad=True)
    (plain,) = torch.autograd.grad(model(x).square().sum(), x)
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    assert gradient.requires_grad and distance(gradient.detach(), plain.double()) < 1e-5
    (second,) = torch.autograd.grad(gradient.square().sum(), x)
    other, y = exact(model), x.detach().double().requires_grad_()
    (first,) = torch.autograd.grad(other(y).square().sum(), y, create_graph=True)
    (expected,) = torch.autograd.grad(first.square().sum(), y)
    assert distance(second, expected) < 1e-4


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
        assert torch.equal(fused_module._band_buckets(num_buckets, *sizes), relative.places(*sizes))


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
