"""A projection that is more than its weight is called, on every path: adapters, hooks, offloaded weights."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from headcode import HyperAttention, capture_codes
from headcode.nn import edit_codes, generate, value_network, why_op_by_op
from headcode.ops import hyper_attention
from tests.support.adapters import (
    CHANGES,
    LowRank,
    adapted,
    hooked,
    linears,
    merged,
    patched,
    quantised,
    replace,
    spread,
)
from tests.support.models import distance, make

METHODS = ("softmax", "linear", "hyla")
TOKENS = {"vocab_size": 23, "input_dim": None, "output_dim": None, "causal": True}


def attended(layer, x):
    """A layer of self-attention, by calls of its projections."""
    q, k, v = (
        p(x).unflatten(2, (layer.num_heads, -1)).transpose(1, 2) for p in layer.children() if p is not layer.output_proj
    )
    out = hyper_attention(
        q,
        k,
        v,
        norm=layer.norm,
        value_net=layer.value_net,
        causal=layer.causal,
        pooling=layer.pooling,
        backend="reference",
    )
    return layer.output_proj(out.transpose(1, 2).flatten(2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("part", ["query_proj", "key_proj", "value_proj", "output_proj"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_uses_each_changed_projection(change, part, method):
    torch.manual_seed(0)
    layer, x = HyperAttention(12, 3, method=method).eval(), torch.randn(2, 7, 12)
    plain = layer(x)
    setattr(layer, part, change(getattr(layer, part)).eval())
    out = layer(x)
    assert distance(out.detach(), attended(layer, x).detach().double()) < 1e-6
    assert distance(out.detach(), plain.detach().double()) > 1e-3
    if change is quantised:
        return  # by the range of the tokens that it is given
    torch.testing.assert_close(layer(x, queries=slice(-2, None)), out[:, -2:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer(x, x), out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("feedforward", ["gelu", "swiglu"])
@pytest.mark.parametrize("grad", [True, False])
def test_each_hook_fires_once(grad, feedforward, fused):
    """Forward and, through the fused block's place, backward; also with few queries and with padding."""
    model = make(method="hyla", feedforward=feedforward)
    seen = []
    for name, part in linears(model).items():
        part.register_forward_hook(lambda *_, name=name: seen.append(name))
    options = [{}, {"queries": slice(-1, None)}, {"key_padding_mask": torch.zeros(2, 7, dtype=torch.bool)}]
    for changes in options:
        with torch.set_grad_enabled(grad):
            model(torch.randn(2, 7, 5), **changes)
        assert sorted(seen) == sorted(linears(model))
        seen.clear()
    assert not any(fused)


def test_each_backward_hook_fires_once():
    model = make(method="hyla")
    seen = []
    for name, part in linears(model).items():
        part.register_full_backward_hook(lambda *_, name=name: seen.append(name))
    model(torch.randn(2, 7, 5, requires_grad=True)).sum().backward()
    assert sorted(seen) == sorted(linears(model))


def test_hooks_of_all_modules_fire():
    model, seen = make(method="hyla"), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        model(torch.randn(2, 7, 5))
    finally:
        handle.remove()
    assert [seen.count(part) for part in linears(model).values()] == [1] * len(linears(model))


@pytest.mark.parametrize("method", METHODS)
def test_training_reaches_the_adapters(method, fused):
    """Output and gradients of adapters on all projections, of the plain block with the same weights."""
    model = adapted(make(method=method))
    x, together = torch.randn(2, 7, 5), merged(model)
    torch.testing.assert_close(model(x), together(x), rtol=1e-5, atol=1e-5)
    assert fused == [False, False, True, True]
    model(x).square().sum().backward()
    together(x).square().sum().backward()
    for name, part in model.named_modules():
        if isinstance(part, LowRank):
            whole = together.get_submodule(name).weight.grad
            assert distance(part.up.grad, (whole @ part.down.T).double()) < 1e-4
            assert distance(part.down.grad, (part.up.T @ whole).double()) < 1e-4
            assert part.up.grad.norm() > 0


@pytest.mark.parametrize("method", METHODS)
def test_decoding_with_adapters(method):
    model = adapted(make(method=method, position="rotary", **TOKENS)).eval()
    together, tokens = merged(model), torch.randint(23, (2, 7))
    with torch.no_grad():
        whole = together(tokens)
        torch.testing.assert_close(model(tokens), whole, rtol=1e-5, atol=1e-5)
        for recurrent in (False, True) if method == "linear" else (False,):
            cache = model.new_cache(recurrent=recurrent)
            steps = [model(tokens[:, i : i + 1], cache=cache) for i in range(7)]
            torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-5, atol=1e-5)
    expected = list(generate(together, [1, 2, 3], 8, temperature=0))
    assert list(generate(model, [1, 2, 3], 8, temperature=0)) == expected
    assert list(generate(model, [1, 2, 3], 8, temperature=0, cache=False)) == expected


def test_an_adapted_embedding_is_read_and_predicted_with():
    """Its transpose makes the logits; a hook, which sees the tokens of the text, does not see the whole table."""
    model = make(method="hyla", **TOKENS)
    tokens, seen = torch.randint(23, (2, 7)), []
    model.embedding.register_forward_hook(lambda module, arguments, output: seen.append(output.shape))
    model(tokens)
    assert seen == [(2, 7, 48)]
    changed = adapted(make(method="hyla", **TOKENS))
    torch.testing.assert_close(changed(tokens), merged(changed)(tokens), rtol=1e-5, atol=1e-5)
    changed(tokens).square().sum().backward()
    assert changed.embedding.up.grad.norm() > 0


@pytest.mark.parametrize("method", METHODS)
def test_codes_of_adapted_queries_and_keys(method):
    model = adapted(make(method=method))
    x, together = torch.randn(2, 7, 5), merged(model)
    with capture_codes(model) as codes, capture_codes(together) as expected:
        model(x), together(x)
    for layer in range(2):
        torch.testing.assert_close(codes[layer], expected[layer], rtol=1e-5, atol=1e-5)
    with edit_codes(model, lambda layer, codes: codes / 2), edit_codes(together, lambda layer, codes: codes / 2):
        torch.testing.assert_close(model(x), together(x), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("change", [change for change in CHANGES if change is not quantised])
def test_generated_networks_of_changed_projections(change, method):
    """The networks, applied and summed, are the layer, whatever its value and output projections are."""
    torch.manual_seed(0)
    layer = HyperAttention(12, 3, method=method, pooling="sum").double().eval()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    for part in ("value_proj", "output_proj"):
        setattr(layer, part, change(getattr(layer, part)).double().eval())
    with torch.no_grad(), capture_codes(layer) as codes:
        output = layer(x)
        once = layer.output_proj(torch.zeros(12, dtype=torch.float64))
    networks = value_network(layer, codes[0])
    torch.testing.assert_close(networks(x[:, None]).sum(2) + once, output, rtol=0, atol=1e-9)


def test_networks_are_generated_without_the_adapters_dropout():
    layer = HyperAttention(12, 3, method="hyla").train()
    layer.value_proj = nn.Sequential(layer.value_proj, nn.Dropout(0.5))
    codes = torch.randn(2, 3, 5, 7)
    given = value_network(layer, codes)
    assert layer.value_proj[1].training
    layer.value_proj = layer.value_proj[0]
    expected = value_network(layer, codes)
    torch.testing.assert_close(given.weights, expected.weights)
    torch.testing.assert_close(given.biases[0], expected.biases[0])


def test_gradients_of_networks_reach_the_adapter():
    layer = HyperAttention(12, 3, method="hyla")
    layer.value_proj = LowRank(layer.value_proj)
    value_network(layer, torch.randn(2, 3, 5, 7)).weights[0].square().sum().backward()
    assert layer.value_proj.up.grad.norm() > 0


class Clipped(nn.Linear):
    def forward(self, x):
        return super().forward(x).clamp(-2, 2)


def test_matrices_in_half_precision():
    """Rounding is not taken for a bent function, nor a bent function for rounding."""
    layer, codes = HyperAttention(64, 4, method="hyla").bfloat16(), torch.randn(1, 4, 2, 2)
    expected = value_network(layer, codes).weights[0]
    layer.value_proj = nn.Sequential(layer.value_proj)
    torch.testing.assert_close(value_network(layer, codes).weights[0], expected, rtol=0.02, atol=0.02)
    layer.value_proj.append(nn.GELU())
    with pytest.raises(ValueError, match="not a linear map plus a bias"):
        value_network(layer, codes)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("change", [quantised, lambda linear: nn.Sequential(linear, nn.GELU()), None])
@pytest.mark.parametrize("part", ["value_proj", "output_proj"])
def test_a_projection_without_a_matrix_is_refused(part, change):
    layer = HyperAttention(12, 3, method="hyla")
    setattr(layer, part, Clipped(12, 12) if change is None else change(getattr(layer, part)))
    kind = type(getattr(layer, part)).__name__
    with pytest.raises(ValueError, match=f"{part} is a .*{kind}, which is not a linear map plus a bias"):
        value_network(layer, torch.randn(2, 3, 5, 7))


def by_hand(model, x):
    """A model without positions, by calls of its parts."""
    hidden = model.embedding(x)
    for block in model.blocks:
        hidden = hidden + attended(block.attention, block.attention_norm(hidden))
        hidden = hidden + block.feedforward(block.feedforward_norm(hidden))
    hidden = model.final_norm(hidden)
    if model.output_proj is not None:
        return model.output_proj(hidden)
    return hidden @ model.embedding(torch.arange(23)).T / 48**0.5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("sizes", [{}, TOKENS], ids=["numbers", "tokens"])
@pytest.mark.parametrize("method", METHODS)
def test_a_model_in_int8(method, sizes):
    model = make(method=method, position="none", backend="reference", **sizes).eval()
    kinds = {nn.Linear: torch.ao.quantization.default_dynamic_qconfig}
    kinds[nn.Embedding] = torch.ao.quantization.float_qparams_weight_only_qconfig
    small = torch.ao.quantization.quantize_dynamic(model, kinds)
    assert not linears(small) and "quantized" in type(small.blocks[1].attention.query_proj).__module__
    x = torch.randint(23, (2, 7)) if sizes else torch.randn(2, 7, 5)
    with torch.no_grad():
        torch.testing.assert_close(small(x), by_hand(small, x), rtol=1e-5, atol=1e-5)
        assert distance(small(x), model(x).double()) > 1e-4
    if sizes:
        assert len(list(generate(small, [1, 2, 3], 8, temperature=0))) == 8


def offload(kind, model, folder):
    import accelerate

    if kind == "cpu":
        return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    return accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))


@pytest.mark.parametrize("position", ["relative", "relative_learned", "rotary"])
@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_offloaded_weights(kind, position, tmp_path):
    pytest.importorskip("accelerate")
    for sizes in ({}, TOKENS):
        model = make(method="hyla", position=position, **sizes).eval()
        away = offload(kind, copy.deepcopy(model), tmp_path / str(bool(sizes)))
        assert all(parameter.is_meta for parameter in away.parameters())
        x = torch.randint(23, (2, 7)) if sizes else torch.randn(2, 7, 5)
        with torch.no_grad():
            torch.testing.assert_close(away(x), model(x), rtol=1e-5, atol=1e-5)
            with capture_codes(away) as codes, capture_codes(model) as expected:
                away(x), model(x)
        torch.testing.assert_close(codes[1], expected[1], rtol=1e-5, atol=1e-5)
        given, wanted = (value_network(m.blocks[0].attention, codes[0]) for m in (away, model))
        torch.testing.assert_close(given.weights, wanted.weights, rtol=1e-5, atol=1e-5)
        if sizes:
            choices = {"temperature": 0, "max_tokens": 8}
            assert list(generate(away, [1, 2], **choices)) == list(generate(model, [1, 2], **choices))


@pytest.mark.parametrize("call", [torch.func.functional_call, nn.utils.stateless.functional_call])
def test_swapped_parameters_are_used(call):
    model, other = make(method="hyla"), make(method="hyla")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    x = torch.randn(2, 7, 5)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(
                call(model, dict(other.named_parameters()), (x,)), other(x), rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("change", [hooked, LowRank])
def test_compiled_models_call_the_projections(change):
    torch._dynamo.reset()  # its guards do not look at hooks, and another test's plain model would serve
    model, x = replace(make(method="hyla", num_layers=1), change), torch.randn(2, 7, 5)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


def test_traced_models_keep_the_joined_product():
    model, x = make(method="hyla", num_layers=1).eval(), torch.randn(2, 7, 5)
    nodes = [str(node.target) for node in torch.export.export(model, (x,)).graph.nodes]
    assert nodes.count("aten.linear.default") == 6  # embedding, joined, output, two of the feed-forward, answers


class Noted(torch.Tensor):
    """A weight of another kind of tensor, such as quantised ones have, that only knows how it is multiplied."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if function is torch.cat:
            raise NotImplementedError("these weights cannot be joined")
        return super().__torch_function__(function, types, arguments, options or {})


def test_weights_of_another_kind_of_tensor():
    model, x = make(method="hyla"), torch.randn(2, 7, 5)
    expected = model(x)
    for part in linears(model).values():
        part.weight = nn.Parameter(part.weight.detach().as_subclass(Noted))
    torch.testing.assert_close(model(x).as_subclass(torch.Tensor), expected, rtol=1e-5, atol=1e-5)


def test_one_bias_taken_away():
    layer, x = HyperAttention(12, 3, method="hyla"), torch.randn(2, 7, 12)
    layer.key_proj.bias = None
    torch.testing.assert_close(layer(x), attended(layer, x), rtol=1e-5, atol=1e-5)


def test_plain_projections_are_one_product():
    """The fast way stays open: one product for queries, keys and values where nothing was changed."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return function(*arguments, **(options or {}))

    layer, x = HyperAttention(12, 3, method="hyla"), torch.randn(2, 7, 12)
    counts = []
    for change in (lambda linear: linear, hooked):
        layer.query_proj = change(layer.query_proj)
        with Products() as products, torch.no_grad():
            layer(x)
        counts.append(products.count)
    assert counts == [2, 4]


def test_why_a_block_goes_op_by_op():
    x = torch.randn(2, 7, 48)
    reasons = {
        "attention.key_proj has hooks": lambda b: hooked(b.attention.key_proj),
        "attention.value_proj has another forward": lambda b: patched(b.attention.value_proj),
        "attention.query_proj is a torch.nn.utils.parametrize.ParametrizedLinear": lambda b: spread(
            b.attention.query_proj
        ),
        f"feedforward.hidden_proj is a {LowRank.__module__}.LowRank": lambda b: setattr(
            b.feedforward, "hidden_proj", LowRank(b.feedforward.hidden_proj)
        ),
        "feedforward_norm has hooks": lambda b: hooked(b.feedforward_norm),
        "attention has hooks": lambda b: hooked(b.attention),
    }
    for reason, change in reasons.items():
        block = make(method="hyla").blocks[1]
        assert why_op_by_op(block, x) is None
        change(block)
        assert why_op_by_op(block, x) == reason
    with torch.no_grad():
        assert why_op_by_op(make().blocks[0], x) is None
    assert "float32" in why_op_by_op(make().double().blocks[0], x.double())
    assert "multiples of 16" in why_op_by_op(make(mlp_dim=72).blocks[0], x)
    assert "pooling 'max'" in why_op_by_op(make(pooling="max").blocks[0], x)


def test_a_parametrised_relative_bias_is_used():
    """Not only projections: a relative bias of another kind is called too."""
    model, x = make(method="hyla"), torch.randn(2, 7, 5)
    plain = model(x)
    for block in model.blocks:
        parametrize.register_parametrization(block.attention.relative_bias, "table", nn.Tanh())
    assert distance(model(x), plain.double()) > 1e-3
