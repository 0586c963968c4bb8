"""What a fused block serves besides plain training: no gradients, rotary positions, padding, wide layers."""

import copy

import pytest
import torch

from headcode import capture_codes
from headcode.nn import fused as fused_module
from headcode.nn import why_op_by_op
from headcode.nn.position import rotate
from headcode.ops.cpu import block_plan
from tests.support.models import distance, exact, make, run

NAN = float("nan")


def without_gradients(model, x, **options):
    with torch.no_grad():
        return model(x, dropout_seed=7, **options)


def padding_of(batch, length):
    """The first sequence whole, the others with ever more padding, on either side."""
    lengths = length - torch.arange(batch) % length
    padding = torch.arange(length) >= lengths[:, None]
    padding[1::2] = padding[1::2].flip(1)
    return padding


def check(model, x, **options):
    """Output and gradients against float64, op by op; and the output without gradients, bit by bit."""
    inputs = [x.requires_grad_(), *model.parameters()]
    readable = exact(model)
    wide = x.detach().double().requires_grad_()
    out, expected = model(x, dropout_seed=7, **options), readable(wide, dropout_seed=7, **options)
    assert distance(out.detach(), expected.detach()) < 1e-5
    weights = torch.linspace(0, 2, out.numel(), dtype=torch.float64).cos().view(out.shape)
    gradients = torch.autograd.grad((out * weights.float()).sum(), inputs)
    wanted = torch.autograd.grad((expected * weights).sum(), [wide, *readable.parameters()])
    names = ["x", *(name for name, _ in model.named_parameters())]
    norms = dict(zip(names, (float(gradient.norm()) for gradient in wanted), strict=True))
    for name, gradient, right in zip(names, gradients, wanted, strict=True):
        if norms[name] < 1e-9 * max(norms.values()):  # a softmax does not see what is added to all keys
            assert float(gradient.norm()) < 1e-5 * max(norms.values()), name
        else:
            assert distance(gradient, right) < 1e-4, name
    assert torch.equal(without_gradients(model, x, **options), out)


@pytest.mark.parametrize("queries", [None, slice(-4, -1)])
@pytest.mark.parametrize("feedforward", ["gelu", "swiglu"])
@pytest.mark.parametrize("method", ["hyla", "softmax", "softmax_hyla", "linear"])
def test_no_gradients_give_the_same_bits(method, feedforward, queries, fused):
    model, x = make(method=method, feedforward=feedforward, attention_dropout=0.1), torch.randn(37, 11, 5)
    expected, _ = run(model, x, queries)
    assert torch.equal(without_gradients(model, x, queries=queries), expected)
    with torch.inference_mode():
        assert torch.equal(model(x, queries=queries, dropout_seed=7), expected)
    frozen = copy.deepcopy(model).requires_grad_(False)
    assert torch.equal(frozen(x, queries=queries, dropout_seed=7), expected)
    assert torch.equal(run(model, x, queries)[0], expected)  # what inference left behind serves training
    assert fused == [True] * 10


def test_nothing_is_kept_without_gradients(monkeypatch):
    plans, plan_block = [], block_plan.plan_block
    monkeypatch.setattr("headcode.ops.cpu.block.plan_block", lambda sizes: plans.append(plan_block(sizes)) or plans[-1])
    model, x = make(num_layers=1), torch.randn(40, 13, 5)
    model(x)
    without_gradients(model, x)
    trained, evaluated = plans
    assert evaluated.kept.size < trained.kept.size - 40 * 13 * (80 + 48)  # hidden layer, middle, half of the panels
    assert not evaluated.backward.launches and trained.backward.launches


@pytest.mark.parametrize(("dim", "heads", "qk_dim"), [(48, 4, 32), (64, 2, 48), (32, 2, 32), (32, 1, 80), (32, 16, 32)])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary_positions(causal, dim, heads, qk_dim, fused):
    model = make(position="rotary", causal=causal, dim=dim, num_heads=heads, qk_dim=qk_dim, v_dim=32, method="linear")
    for queries in (None, slice(3, 8)):
        check(model, torch.randn(7, 11, 5), queries=queries)
    assert all(fused[:2])


@pytest.mark.parametrize("method", ["softmax", "hyla", "softmax_hyla"])
def test_rotary_positions_of_other_methods(method, fused):
    check(make(position="rotary", causal=True, method=method, attention_dropout=0.1), torch.randn(5, 13, 5))
    assert fused[0] is True


def test_the_rotary_table_is_what_rotate_turns_by():
    table = fused_module._rotary_table(13, 6)
    turned = rotate(torch.eye(6)[:3].expand(13, 3, 6)[None].transpose(1, 2), 0)[0]  # (3, 13, 6)
    for i in range(3):
        assert torch.equal(turned[i, :, i], table[:, i]) and torch.equal(turned[i, :, 3 + i], table[:, 3 + i])


@pytest.mark.parametrize("position", ["relative", "rotary"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", ["softmax", "linear", "hyla", "softmax_hyla"])
def test_padding(method, causal, position, fused):
    model = make(method=method, causal=causal, position=position, attention_dropout=0.1)
    padding = padding_of(5, 13)
    check(model, torch.randn(5, 13, 5), key_padding_mask=padding)
    check(model, torch.randn(5, 13, 5), key_padding_mask=padding, queries=slice(2, 5))
    assert fused[0] is True


def test_padding_with_strides_and_of_everything():
    model, x = make(method="hyla"), torch.randn(3, 7, 5)
    padding = torch.zeros(7, 3, dtype=torch.bool)
    padding[2:, 1], padding[:, 2] = True, True
    check(model, x, key_padding_mask=padding.T)
    alone = without_gradients(model, x[:1])
    assert torch.equal(without_gradients(model, x, key_padding_mask=padding.T)[:1], alone)


@pytest.mark.parametrize("content", [NAN, float("inf")])
@pytest.mark.parametrize("method", ["softmax", "linear", "hyla"])
def test_padding_contributes_nothing_whatever_it_holds(method, content, fused):
    model, x = make(method=method, num_layers=1), torch.randn(3, 13, 5)
    padding = torch.arange(13).expand(3, 13) >= torch.tensor([13, 9, 9])[:, None]
    clean = without_gradients(model, x, key_padding_mask=padding)
    dirty = x.masked_fill(padding[:, :, None], content)
    out = without_gradients(model, dirty, key_padding_mask=padding)
    torch.testing.assert_close(out[~padding], clean[~padding])
    assert out[padding].isnan().all() and fused == [True, False]
    read = without_gradients(model, dirty, key_padding_mask=padding, queries=slice(2, 7))
    torch.testing.assert_close(read, clean[:, 2:7])
    assert fused[2:] == [True]


def test_bad_padding_is_refused_in_the_same_words():
    layer, hidden = make().blocks[0], torch.randn(2, 7, 48)
    with pytest.raises(ValueError, match=r"key_padding_mask must have shape .* \(2, 7\)"):
        layer(hidden, key_padding_mask=torch.zeros(2, 6, dtype=torch.bool))
    with pytest.raises(TypeError, match="must be a boolean tensor"):
        layer(hidden, key_padding_mask=torch.zeros(2, 7))


def test_gradients_with_a_graph_see_the_padding():
    model, x, padding = make(method="linear"), torch.randn(2, 7, 5, requires_grad=True), padding_of(2, 7)
    (plain,) = torch.autograd.grad(model(x, key_padding_mask=padding).square().sum(), x)
    (graph,) = torch.autograd.grad(model(x, key_padding_mask=padding).square().sum(), x, create_graph=True)
    assert distance(graph.detach(), plain.double()) < 1e-5


@pytest.mark.parametrize("feedforward", ["gelu", "swiglu"])
def test_wide_layers(feedforward, fused, threads):
    """Wider than 512, and with so many weights that they are summed up by fewer tasks."""
    sizes = {"dim": 528, "qk_dim": 528, "v_dim": 48, "num_heads": 3, "mlp_dim": 2064}
    model = make(feedforward=feedforward, position="rotary", causal=True, method="linear", num_layers=1, **sizes)
    check(model, torch.randn(1, 701, 5))
    hidden, layer, results = torch.randn(1, 701, 528).requires_grad_(), model.blocks[0], []
    for number in (1, 3):
        threads(number)
        out = layer(hidden)
        results.append([out, *torch.autograd.grad(out.square().sum(), [hidden, *layer.parameters()])])
    assert all(map(torch.equal, *results)) and fused[0] is True


def test_few_tokens_are_not_worth_preparing_many_weights(fused, monkeypatch):
    monkeypatch.setattr(fused_module, "MANY_WEIGHTS", 10_000)
    layer = make(num_layers=1, max_length=64).blocks[0]
    for length in (51, 52):
        hidden = torch.randn(5, length, 48)
        layer(hidden, dropout_seed=7)
        with torch.no_grad():
            layer(hidden, dropout_seed=7)
            few = why_op_by_op(layer, hidden)
        assert (few is None) == (length == 52)
    assert fused == [True, False, True, True]


@pytest.mark.parametrize("changes", [{"method": "softmax", "feedforward": "swiglu"}, {"position": "rotary"}])
def test_nothing_is_left_unwritten(changes, monkeypatch):
    """Buffers that start as NaN give the same as any others."""
    model, x, padding = make(**changes), torch.randn(3, 13, 5), padding_of(3, 13)
    given = model(x, key_padding_mask=padding, queries=slice(-3, None))
    expected = torch.autograd.grad(given.square().sum(), list(model.parameters()))
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: new_empty(*a, **k).fill_(NAN))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(NAN))
    out = model(x, key_padding_mask=padding, queries=slice(-3, None))
    gradients = torch.autograd.grad(out.square().sum(), list(model.parameters()))
    assert torch.equal(out, given) and all(map(torch.equal, gradients, expected))
    assert torch.equal(without_gradients(model, x, key_padding_mask=padding, queries=slice(-3, None)), given)


def test_whoever_looks_inside_gets_the_parts_without_gradients_too(fused):
    model, x, padding = make(position="rotary"), torch.randn(2, 7, 5), padding_of(2, 7)
    with torch.no_grad(), capture_codes(model) as codes:
        model(x, key_padding_mask=padding)
    assert codes[1].shape == (2, 4, 7, 7) and fused == [False, False]
    with torch.no_grad():
        assert why_op_by_op(model.blocks[0], torch.randn(2, 7, 48)) is None
        with torch.autocast("cpu", torch.float16):
            assert "autocast" in why_op_by_op(model.blocks[0], torch.randn(2, 7, 48))
        model.blocks[0].attention.key_proj.register_forward_hook(lambda *arguments: None)
        assert why_op_by_op(model.blocks[0], torch.randn(2, 7, 48)) == "attention.key_proj has hooks"
