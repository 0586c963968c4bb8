"""HyperAttention's default pooling, shared heads of keys and values, windows, ALiBi, returned codes, contexts kept."""

import pytest
import torch
from torch import nn

from headcode import HyperAttention, capture_codes
from headcode.nn import ContextCache, FastWeightState, KeyValueCache, value_network
from headcode.nn.edit import edit_codes
from tests.nn.test_attention import layer, tokens


@pytest.mark.parametrize(("method", "pooling"), [("softmax", "sum"), ("hyla", "mean"), ("linear", "mean")])
def test_the_default_pooling_keeps_the_scale(method, pooling):
    assert HyperAttention(12, 3, method=method).pooling == pooling
    assert HyperAttention(12, 3, method=method, pooling="sum").pooling == "sum"


@pytest.mark.parametrize("pooling", ["mean", "sqrt"])
def test_outputs_do_not_grow_with_the_length(pooling):
    torch.manual_seed(0)
    attention = HyperAttention(64, 8, pooling=pooling)
    with torch.no_grad():
        sizes = [attention(torch.randn(4, length, 64)).std().item() for length in (8, 512)]
    assert sizes[1] < 1.1 * sizes[0]


@pytest.mark.parametrize("pooling", ["mean", "sqrt"])
def test_the_recurrent_form_divides_too(pooling):
    parallel = layer("linear", causal=True, pooling=pooling)
    recurrent = layer("linear", causal=True, pooling=pooling, recurrent=True)
    x, padding = tokens(11), torch.zeros(2, 11, dtype=torch.bool)
    padding[1, 4:7] = True
    whole = parallel(x, key_padding_mask=padding)
    torch.testing.assert_close(recurrent(x, key_padding_mask=padding), whole)
    state = FastWeightState()
    with torch.no_grad():
        pieces = [parallel(x[:, a:b], cache=state, key_padding_mask=padding[:, a:b]) for a, b in [(0, 5), (5, 11)]]
    torch.testing.assert_close(torch.cat(pieces, 1), whole)


class TestSharedKeysAndValues:
    def test_is_the_layer_with_repeated_weights(self):
        shared = HyperAttention(12, 6, num_kv_heads=2, value_net="relu").double()
        full = HyperAttention(12, 6, value_net="relu").double()
        full.load_state_dict(shared.state_dict() | self.repeated(shared))
        x = tokens()
        torch.testing.assert_close(shared(x), full(x))
        with capture_codes(shared) as codes:
            shared(x)
        assert codes[0].shape == (2, 6, 7, 7)

    def repeated(self, shared):
        weights = {}
        for name in ("key_proj", "value_proj"):
            for kind in ("weight", "bias"):
                numbers = getattr(getattr(shared, name), kind).unflatten(0, (2, -1))
                weights[f"{name}.{kind}"] = numbers.repeat_interleave(3, 0).flatten(0, 1)
        return weights

    def test_the_cache_holds_the_shared_heads_alone(self):
        attention, x, cache = HyperAttention(12, 6, num_kv_heads=2, causal=True).double(), tokens(9), KeyValueCache()
        with torch.no_grad():
            pieces = [attention(x[:, a:b], cache=cache) for a, b in [(0, 4), (4, 9)]]
            torch.testing.assert_close(torch.cat(pieces, 1), attention(x))
        assert cache.keys.shape[1] == cache.values.shape[1] == 2

    def test_gradients_flow_through_the_cache(self):
        attention, x = HyperAttention(12, 6, num_kv_heads=2, causal=True).double(), tokens(9).requires_grad_()
        cache, sources = KeyValueCache(), [x, *attention.parameters()]
        pieces = torch.cat([attention(x[:, a:b], cache=cache) for a, b in [(0, 4), (4, 9)]], 1)
        expected = torch.autograd.grad(attention(x).sin().sum(), sources)
        for given, wanted in zip(torch.autograd.grad(pieces.sin().sum(), sources), expected, strict=True):
            torch.testing.assert_close(given, wanted)

    def test_generated_networks_are_the_layer(self):
        attention, x = HyperAttention(12, 6, num_kv_heads=3, pooling="sum").double(), tokens()
        with torch.no_grad():
            out, codes = attention(x, return_codes=True)
            rebuilt = value_network(attention, codes)(x[:, None]).sum(2) + attention.output_proj.bias
        torch.testing.assert_close(out, rebuilt)

    def test_refuses_a_number_that_does_not_divide(self):
        with pytest.raises(ValueError, match="num_heads must be divisible by num_kv_heads, got num_heads=6"):
            HyperAttention(12, 6, num_kv_heads=4)


def test_a_window_hides_far_keys_from_output_codes_and_decoding():
    attention, x = layer("hyla", causal=True, window=3), tokens(9)
    plain = layer("hyla", causal=True)
    apart = torch.arange(9)[:, None] - torch.arange(9)
    out, codes = attention(x, return_codes=True)
    torch.testing.assert_close(out, plain(x, mask=apart < 3))
    assert (codes[:, :, apart >= 3] == 0).all()
    with capture_codes(attention, queries=[4, 8]) as captured:
        attention(x)
    torch.testing.assert_close(captured[0], codes[:, :, [4, 8]])
    cache = KeyValueCache()
    with torch.no_grad():
        pieces = [attention(x[:, a:b], cache=cache) for a, b in [(0, 5), (5, 9)]]
    torch.testing.assert_close(torch.cat(pieces, 1), out)


@pytest.mark.parametrize("causal", [False, True])
def test_alibi_is_a_bias_that_grows_with_the_distance(causal):
    attention, x = layer("softmax", position="alibi", causal=causal), tokens(9)
    slopes = torch.tensor([2 ** (-8 / 3), 2 ** (-16 / 3), 2**-8.0], dtype=torch.float64)
    distance = (torch.arange(9)[:, None] - torch.arange(9)).abs()
    bias = -slopes[:, None, None] * distance
    torch.testing.assert_close(attention(x), layer("softmax", causal=causal)(x, bias=bias), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(attention(x, queries=slice(2, 5)), attention(x)[:, 2:5])


def test_codes_that_are_returned_are_those_that_are_captured():
    attention, x, context = layer("hyla"), tokens(5), tokens(7, seed=2)
    with capture_codes(attention, detach=False) as captured:
        out, codes = attention(x, context, return_codes=True)
    torch.testing.assert_close(codes, captured[0])
    torch.testing.assert_close(out, attention(x, context))
    codes.square().sum().backward()
    assert attention.query_proj.weight.grad.abs().max() > 0
    with pytest.raises(ValueError, match="return them with recurrent=False"):
        layer("linear", causal=True, recurrent=True)(x, return_codes=True)


class TestContextCache:
    def test_keys_and_values_are_computed_once(self):
        attention, context = layer("hyla", qk_norm=True), tokens(7, seed=2)
        calls = []
        for projection in (attention.key_proj, attention.value_proj):
            projection.register_forward_hook(lambda *_: calls.append(1))
        cache, padding = ContextCache(), torch.zeros(2, 7, dtype=torch.bool)
        padding[1, 5:] = True
        for number in range(3):
            x = tokens(4, seed=number)
            given = context if number == 0 else None
            out = attention(x, given, cache=cache, key_padding_mask=padding)
            assert len(calls) == 2
            torch.testing.assert_close(out, layer("hyla", qk_norm=True)(x, context, key_padding_mask=padding))
        assert cache.length == 7

    def test_beams_are_reordered(self):
        attention, context, cache = layer("hyla"), tokens(7, seed=2), ContextCache()
        attention(tokens(1), context, cache=cache)
        cache.reorder(torch.tensor([1, 1, 0]))
        x = tokens(1, batch=3, seed=4)
        torch.testing.assert_close(attention(x, cache=cache), attention(x, context[[1, 1, 0]]))

    @pytest.mark.parametrize(
        ("filled", "options", "words"),
        [
            (False, {}, "An empty ContextCache needs key"),
            (True, {"key": tokens(7)}, "holds a context already: leave key out, or start a new cache"),
            (True, {"query": tokens(4, batch=3)}, "The cache holds a batch of 2, got 3; start a new cache"),
            (True, {"queries": slice(1)}, "queries is for self-attention"),
            (True, {"key_padding_mask": torch.zeros(2, 6).bool()}, r"\(batch, keys\) = \(2, 7\)"),
        ],
    )
    def test_refuses_and_says_why(self, filled, options, words):
        attention, cache = layer("hyla"), ContextCache()
        if filled:
            attention(tokens(4), tokens(7), cache=cache)
        with pytest.raises(ValueError, match=words):
            attention(**{"query": tokens(4), "cache": cache, **options})


@pytest.mark.parametrize("cache", [ContextCache(), KeyValueCache()])
def test_a_cache_of_another_number_of_heads_is_refused(cache):
    context = [tokens(7)] if isinstance(cache, ContextCache) else []
    layer("hyla", causal=True)(tokens(4), *context, cache=cache)
    with pytest.raises(ValueError, match="The cache holds keys of 3 heads, this layer has 6: each layer needs a cache"):
        HyperAttention(12, 6, causal=True).double()(tokens(4), cache=cache)


def test_values_of_another_width_than_keys():
    attention = HyperAttention(12, 3, context_dim=10, value_dim=8).double()
    x, keys, values = tokens(5), tokens(7, dim=10), tokens(7, dim=8)
    assert attention(x, keys, values).shape == (2, 5, 12)
    with pytest.raises(ValueError, match="value_dim 8, context_dim 10.*give value"):
        attention(x, keys)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_sequences_of_different_lengths(layout):
    attention = layer("hyla", causal=True)
    parts = [tokens(length, batch=1)[0] for length in (3, 7, 5)]
    nested = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    out = attention(nested)
    assert out.is_nested and out.layout == layout
    for given, part in zip(out.unbind(), parts, strict=True):
        torch.testing.assert_close(given, attention(part[None])[0])
    (nested + out).values().sum().backward() if layout == torch.jagged else out.to_padded_tensor(0.0).sum().backward()
    assert attention.value_proj.weight.grad.abs().max() > 0
    with pytest.raises(ValueError, match="Nested tensors go without mask"):
        attention(nested, mask=torch.ones(7, 7, dtype=torch.bool))


def test_the_layers_are_ordinary_modules():
    attention = HyperAttention(12, 3, position="alibi", window=4, num_kv_heads=1)
    assert [name for name, _ in attention.named_parameters()] == [
        f"{name}_proj.{kind}" for name in ("query", "key", "value", "output") for kind in ("weight", "bias")
    ]
    assert isinstance(attention.key_proj, nn.Linear) and attention.key_proj.out_features == 4


class TestThreeGeneratedLayers:
    """The middle layer of `hyla_deeper` under the options that are about keys, values and their sum."""

    def deeper(self, **options):
        torch.manual_seed(5)
        attention = HyperAttention(12, 6, method="hyla_deeper", **options).double()
        torch.nn.init.normal_(attention.middle_bias, std=0.3)
        return attention

    @pytest.mark.parametrize("pooling", ["sum", "mean", "sqrt", "max"])
    @pytest.mark.parametrize("backend", ["reference", "chunked"])
    def test_is_pooled_over_the_keys_that_are_seen(self, pooling, backend):
        attention = self.deeper(pooling=pooling, num_kv_heads=2, causal=True, window=4, backend=backend)
        x, padding = tokens(9), torch.zeros(2, 9, dtype=torch.bool)
        padding[1, 2:4] = True
        out, codes = attention(x, key_padding_mask=padding, return_codes=True)
        apart = torch.arange(9)[:, None] - torch.arange(9)
        seen = ((apart >= 0) & (apart < 4) & ~padding[:, None])[..., None]  # (B, queries, keys, 1)
        network = value_network(attention, codes)
        assert [weight.shape[-2:] for weight in network.weights] == [(2, 12), (2, 2), (12, 2)]
        if pooling == "max":  # over the keys, of each head's channels: before the output projection joins them
            weights, biases = zip(*list(zip(network.weights, network.biases, strict=True))[:2], strict=True)
            hidden = x[:, None, :, :, None]
            for weight, bias in zip(weights, biases, strict=True):
                hidden = (weight @ hidden + bias[..., None]).relu()
            heads = codes.movedim(1, -1)[..., None] * hidden.squeeze(-1)[..., None, :]
            pooled = heads.flatten(-2).masked_fill(~seen, -torch.inf).amax(2)
            expected = attention.output_proj(pooled.masked_fill(pooled == -torch.inf, 0.0))
        else:
            count = seen.sum(2).clamp(min=1).double()
            divisor = {"sum": 1.0, "mean": count, "sqrt": count.sqrt()}[pooling]
            expected = (network(x[:, None]) * seen).sum(2) / divisor + attention.output_proj.bias
        torch.testing.assert_close(out, expected)

    def test_gradients_of_both_backends_agree(self):
        found = []
        for backend in ("reference", "chunked"):
            attention = self.deeper(pooling="sqrt", num_kv_heads=3, causal=True, window=3, backend=backend)
            attention(tokens(9)).sin().sum().backward()
            found.append([parameter.grad for parameter in attention.parameters()])
        assert len(found[0]) == 10 and all(grad.abs().max() > 0 for grad in (found[0][0], found[0][1]))
        for given, expected in zip(*found, strict=True):
            torch.testing.assert_close(given, expected, rtol=1e-9, atol=1e-12)

    def test_caches_hold_the_shared_heads_and_edits_see_all(self):
        attention, x, cache = self.deeper(num_kv_heads=2, causal=True), tokens(9), KeyValueCache()
        with torch.no_grad():
            pieces = [attention(x[:, a:b], cache=cache) for a, b in [(0, 4), (4, 9)]]
            whole = attention(x)
            with edit_codes(attention, lambda _, codes: codes):
                edited = attention(x)
        torch.testing.assert_close(torch.cat(pieces, 1), whole)
        torch.testing.assert_close(edited, whole)
        assert cache.values.shape[1] == 2


def test_relu_on_shared_values_is_the_sum_of_its_networks():
    attention, x = HyperAttention(12, 6, method="linear_rms_relu_value", num_kv_heads=2).double(), tokens()
    out, codes = attention(x, return_codes=True)
    contributions = value_network(attention, codes)(x[:, None])
    torch.testing.assert_close(out, contributions.mean(2) + attention.output_proj.bias)


class TestPositionsOfTokens:
    def test_turn_shared_keys_and_choose_no_other_window(self):
        attention, x = layer("hyla", position="rotary", qk_dim=12, num_kv_heads=1, causal=True, window=3), tokens(7)
        counted = torch.arange(7)[None]
        whole = attention(x)
        torch.testing.assert_close(attention(x, positions=counted), whole)
        torch.testing.assert_close(attention(x, positions=counted + 5), whole)
        torch.testing.assert_close(attention(x, positions=counted, queries=slice(2, 6)), whole[:, 2:6])
        assert (attention(x, positions=2 * counted) - whole).abs().max() > 1e-3
        cache = KeyValueCache()
        with torch.no_grad():
            pieces = [attention(x[:, a:b], cache=cache, positions=counted[:, a:b]) for a, b in [(0, 4), (4, 7)]]
        torch.testing.assert_close(torch.cat(pieces, 1), whole)

    def test_where_they_would_be_ignored_is_said(self):
        counted, rotary = torch.arange(7)[None], layer("hyla", position="rotary")
        for attention, given in ((layer("hyla", position="alibi"), {}), (rotary, {"key": tokens(5)})):
            with pytest.raises(ValueError, match="positions is for self-attention of a layer with position='rotary'"):
                attention(tokens(), positions=counted, **given)
        nested = torch.nested.nested_tensor([tokens(7)[0]], layout=torch.jagged)
        with pytest.raises(ValueError, match="Nested tensors go without positions"):
            rotary(nested, positions=counted)
        with pytest.raises(ValueError, match="key is a nested tensor, and query is none"):
            layer("hyla")(tokens(), nested)
        for given, error, words in (
            (counted[0], ValueError, r"\(batch, length\) = \(2, 7\) or \(1, 7\), got \(7,\)"),
            (counted[:, 1:], ValueError, r"got \(1, 6\)"),
            ([0, 1], TypeError, "positions must be a torch.Tensor, got list"),
        ):
            with pytest.raises(error, match=words):
                rotary(tokens(), positions=given)
