"""HyperAttention: parity with torch's own layer, padding, queries, caches, recurrence, qk-norm, rotary."""

import pytest
import torch
from torch import nn

from headcode import METHODS, HyperAttention
from headcode.nn import FastWeightState, KeyValueCache
from headcode.nn.position import rotate
from tests.support.models import check_same_gradients


def layer(method="hyla", **options):
    torch.manual_seed(0)
    made = HyperAttention(12, 3, method=method, **{"qk_dim": 6, "v_dim": 15, **options}).double()
    for parameter in made.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    return made


def tokens(length=7, dim=12, batch=2, seed=1):
    return torch.randn(batch, length, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_softmax_is_torch_multihead_attention():
    ours = HyperAttention(12, 3, method="softmax").double()
    theirs = nn.MultiheadAttention(12, 3, batch_first=True).double()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([p.weight for p in (ours.query_proj, ours.key_proj, ours.value_proj)]))
        theirs.in_proj_bias.copy_(torch.cat([p.bias for p in (ours.query_proj, ours.key_proj, ours.value_proj)]))
        theirs.out_proj.load_state_dict(ours.output_proj.state_dict())
    x, context = tokens(5), tokens(7, seed=2)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    expected, _ = theirs(x, context, context, key_padding_mask=padding, need_weights=False)
    torch.testing.assert_close(ours(x, context, key_padding_mask=padding), expected)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected, _ = theirs(x, x, x, attn_mask=causal, need_weights=False)
    torch.testing.assert_close(ours(x, causal=True), expected)
    torch.testing.assert_close(ours(x, mask=~causal), expected)


@pytest.mark.parametrize("method", METHODS)
class TestEveryMethod:
    def test_padding_equals_truncation(self, method):
        attention = layer(method, position="relative", num_buckets=7)
        x = tokens()
        padding = torch.zeros(2, 7, dtype=torch.bool)
        padding[:, 5:] = True
        torch.testing.assert_close(attention(x, key_padding_mask=padding)[:, :5], attention(x[:, :5]))

    @pytest.mark.parametrize("position", ["none", "relative", "rotary"])
    def test_cached_decoding_equals_the_causal_pass(self, method, position):
        attention = layer(method, position=position, num_buckets=5, causal=True)
        x = tokens(11)
        whole = attention(x)
        cache = KeyValueCache()
        with torch.no_grad():
            pieces = [attention(x[:, a:b], cache=cache) for a, b in [(0, 4), (4, 5), (5, 6), (6, 11)]]
        assert cache.length == 11
        torch.testing.assert_close(torch.cat(pieces, 1), whole)

    @pytest.mark.parametrize("queries", [slice(-1, None), slice(2, 5), slice(None, 1), slice(0, 7)])
    @pytest.mark.parametrize("causal", [False, True])
    def test_queries_equals_slicing_gradients_included(self, method, queries, causal):
        attention = layer(method, position="relative", num_buckets=7, causal=causal, dropout=0.3)
        x = tokens().requires_grad_()
        parameters = [x, *attention.parameters()]
        whole = attention(x, dropout_seed=4)[:, queries]
        part = attention(x, queries=queries, dropout_seed=4)
        check_same_gradients(part, whole, parameters)

    def test_dropout_only_in_training(self, method):
        attention = layer(method, dropout=0.5)
        x = tokens()
        assert not torch.equal(attention(x, dropout_seed=1), attention(x, dropout_seed=2))
        assert torch.equal(attention(x, dropout_seed=1), attention(x, dropout_seed=1))
        attention.eval()
        assert torch.equal(attention(x, dropout_seed=1), attention(x, dropout_seed=2))


def test_cross_attention_with_its_own_widths_and_separate_values():
    attention = layer(context_dim=5)
    x, keys, values = tokens(3), tokens(4, 5, seed=2), tokens(4, 5, seed=3)
    out = attention(x, keys, values)
    assert out.shape == (2, 3, 12)
    torch.testing.assert_close(attention(x, keys, keys), attention(x, keys))
    assert not torch.allclose(out, attention(x, keys))
    with pytest.raises(ValueError, match="for cross-attention"):
        attention(x)


def test_qk_norm_makes_scores_blind_to_scale():
    attention = layer(qk_norm=True, bias=False)
    x = tokens()
    with torch.no_grad():
        # Far above the norm's epsilon, where only the direction counts.
        attention.query_proj.weight *= 1e3
        attention.key_proj.weight *= 1e3
        before = attention(x)
        attention.query_proj.weight *= 7
        attention.key_proj.weight *= 3
    torch.testing.assert_close(attention(x), before, rtol=1e-5, atol=1e-5)
    assert sum(p.numel() for p in attention.parameters()) - sum(p.numel() for p in layer(bias=False).parameters()) == 4


def test_rotary_depends_on_distance_alone():
    q, k = torch.randn(1, 2, 1, 6, dtype=torch.float64), torch.randn(1, 2, 1, 6, dtype=torch.float64)
    near = (rotate(q, 9) * rotate(k, 4)).sum(-1)
    far = (rotate(q, 1009) * rotate(k, 1004)).sum(-1)
    torch.testing.assert_close(near, far)
    assert not torch.allclose(near, (rotate(q, 9) * rotate(k, 5)).sum(-1))
    torch.testing.assert_close(rotate(q, 3).norm(dim=-1), q.norm(dim=-1))


class TestRecurrentForm:
    """Linear attention as a fast-weight programmer."""

    @pytest.mark.parametrize("position", ["none", "rotary"])
    def test_equals_the_parallel_form_gradients_included(self, position):
        parallel = layer("linear", position=position, causal=True)
        recurrent = layer("linear", position=position, causal=True, recurrent=True)
        recurrent.load_state_dict(parallel.state_dict())
        x = tokens(131).requires_grad_()
        padding = torch.zeros(2, 131, dtype=torch.bool)
        padding[1, 100:] = True
        for options in ({}, {"key_padding_mask": padding}, {"queries": slice(70, 90)}):
            a, b = parallel(x, **options), recurrent(x, **options)
            torch.testing.assert_close(a, b)
            expected = torch.autograd.grad(a.sin().sum(), [x, *parallel.parameters()])
            actual = torch.autograd.grad(b.sin().sum(), [x, *recurrent.parameters()])
            for one, other in zip(actual, expected, strict=True):
                torch.testing.assert_close(one, other)

    def test_step_by_step_with_constant_memory(self):
        attention = layer("linear", position="rotary", causal=True)
        x = tokens(9)
        whole, state = attention(x), FastWeightState()
        with torch.no_grad():
            pieces = [attention(x[:, a:b], cache=state) for a, b in [(0, 4), (4, 5), (5, 9)]]
        torch.testing.assert_close(torch.cat(pieces, 1), whole)
        assert state.state.shape == (2, 3, 2, 5) and state.length == 9

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"method": "hyla", "causal": True}, "only the method 'linear'"),
            ({"method": "linear_rms", "causal": True}, "only the method 'linear'"),
            ({"method": "linear", "causal": False}, "set causal=True"),
            ({"method": "linear", "causal": True, "position": "relative", "num_buckets": 4}, "T5 band adds a bias"),
            ({"method": "linear", "causal": True, "dropout": 0.1}, "set dropout=0"),
        ],
    )
    def test_refuses_and_says_why(self, options, words):
        with pytest.raises(ValueError, match=words):
            HyperAttention(12, 3, recurrent=True, **options)

    def test_with_a_cache_of_keys_it_is_the_parallel_form(self):
        attention = layer("linear", causal=True, recurrent=True)
        x, cache = tokens(9), KeyValueCache()
        with torch.no_grad():
            pieces = [attention(x[:, :4], cache=cache), attention(x[:, 4:], cache=cache)]
        torch.testing.assert_close(torch.cat(pieces, 1), attention(x))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_does_not_drift(self, dtype):
        from headcode.ops import hyper_attention, linear_attention_recurrent

        q, k, v = (torch.randn(1, 2, 2048, 4).to(dtype) for _ in range(3))
        exact = hyper_attention(*(t.double() for t in (q, k, v)), causal=True, norm="none", value_net="linear")
        out, state = linear_attention_recurrent(q, k, v)
        assert out.dtype == dtype and state.dtype == torch.float32
        torch.testing.assert_close(
            out.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps
        )

    def test_refuses_at_call(self):
        with pytest.raises(ValueError, match="queries of cross-attention are not steps"):
            layer("linear", causal=True, recurrent=True)(tokens(5), tokens(7))
        attention = layer("linear", causal=True, recurrent=True)
        with pytest.raises(ValueError, match="use key_padding_mask"):
            attention(tokens(), mask=torch.ones(7, 7, dtype=torch.bool))
        with pytest.raises(ValueError, match="only the method 'linear'"):
            layer("hyla", causal=True)(tokens(), cache=FastWeightState())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_heads": 5}, ValueError, "qk_dim must be divisible by num_heads, got qk_dim=12 and num_heads=5"),
        ({"v_dim": 7}, ValueError, "v_dim must be divisible by num_heads, got v_dim=7 and num_heads=3"),
        ({"num_heads": 0}, ValueError, "num_heads must be at least 1, got 0"),
        ({"dim": 1.5}, TypeError, "dim must be an integer, got 1.5"),
        ({"method": "magic"}, ValueError, "method must be one of softmax, linear"),
        ({"norm": "magic"}, ValueError, "norm must be one of softmax, none"),
        ({"value_net": "magic"}, ValueError, "value_net must be one of linear"),
        ({"pooling": "magic"}, ValueError, "pooling must be one of sum, mean, sqrt, max"),
        ({"position": "magic"}, ValueError, "position must be one of none, relative, alibi, rotary"),
        ({"position": "relative"}, ValueError, "position='relative' needs num_buckets"),
        ({"position": "rotary", "qk_dim": 9}, ValueError, "needs an even head width"),
        ({"dropout": float("nan")}, ValueError, "dropout must be at least 0 and below 1, got nan"),
        ({"dropout": 1}, ValueError, "dropout must be at least 0 and below 1, got 1"),
    ],
)
def test_bad_construction(options, error, words):
    arguments = {"dim": 12, "num_heads": 3, **options}
    with pytest.raises(error, match=words.replace("(", r"\(")):
        HyperAttention(arguments.pop("dim"), arguments.pop("num_heads"), **arguments)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((torch.zeros(2, 7, 11),), {}, ValueError, r"query must have shape \(batch, length, 12\), got \(2, 7, 11\)"),
        ((torch.zeros(7, 12),), {}, ValueError, "query must have shape"),
        (("x",), {}, TypeError, "query must be a torch.Tensor, got str"),
        ((tokens(), tokens(batch=3)), {}, ValueError, "key must have query's batch of 2, got 3"),
        ((tokens(), None, tokens()), {}, ValueError, "value was given without key"),
        ((tokens(), tokens(), tokens(6)), {}, ValueError, "value must have key's batch and length"),
        ((tokens(),), {"key_padding_mask": torch.zeros(2, 6).bool()}, ValueError, r"\(batch, keys\) = \(2, 7\)"),
        ((tokens(),), {"key_padding_mask": torch.zeros(2, 7)}, TypeError, "True where a key is to be ignored"),
        ((tokens(),), {"queries": 3}, ValueError, "queries must be a slice"),
        ((tokens(),), {"queries": slice(0, 7, 2)}, ValueError, "queries must be a slice with step 1"),
        ((tokens(),), {"queries": slice(9, None)}, ValueError, "at least one of 7 positions"),
        ((tokens(), tokens()), {"queries": slice(1)}, ValueError, "queries is for self-attention"),
        ((tokens(), tokens()), {"cache": KeyValueCache()}, ValueError, "Such a cache is for self-attention"),
    ],
)
def test_bad_calls(arguments, options, error, words):
    with pytest.raises(error, match=words):
        layer()(*arguments, **options)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda a: a(tokens().float()),
            TypeError,
            "query must have the layer's dtype torch.float64, got torch.float32",
        ),
        (lambda a: a(tokens(), tokens().long()), TypeError, "key must have the layer's dtype"),
        (lambda a: a(tokens(), mask=torch.ones(7, 7).int()), TypeError, "mask must be boolean"),
        (
            lambda a: a(tokens(), mask=[1], key_padding_mask=torch.zeros(2, 7).bool()),
            TypeError,
            "mask must be a torch.Tensor",
        ),
        (
            lambda a: a(tokens(), mask=torch.ones(5, 7).bool(), key_padding_mask=torch.zeros(2, 7).bool()),
            ValueError,
            "mask must be broadcastable",
        ),
        (lambda a: a(tokens(), bias=torch.ones(7, 7).int()), TypeError, "bias must be float32"),
        (
            lambda a: a(tokens(), cache={}),
            TypeError,
            "cache must be a KeyValueCache, a FastWeightState or a ContextCache, got dict",
        ),
        (lambda a: a(tokens(), queries=slice("a")), ValueError, "queries must be a slice of integers"),
        (lambda a: HyperAttention(12, 3, backend="zzz"), ValueError, "backend must be one of auto"),
        (lambda a: HyperAttention(12, 3, causal="yes"), TypeError, "causal must be True or False"),
        (lambda a: HyperAttention(12, 3, dropout="x"), TypeError, "dropout must be a number, got 'x'"),
        (
            lambda a: HyperAttention(12, 3, position="relative", num_buckets=0),
            ValueError,
            "num_buckets must be at least 1",
        ),
        (
            lambda a: HyperAttention(12, 3, position="relative", num_buckets=2.5),
            TypeError,
            "num_buckets must be an integer",
        ),
    ],
)
def test_more_bad_calls(call, error, words):
    with pytest.raises(error, match=words):
        call(layer())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_mask_bias_and_padding_together(kind, causal):
    """Against the op with everything in one dense bias, and codes captured from the same call."""
    from headcode import attention_codes, capture_codes, hyper_attention

    attention = layer("hyla", pooling="sum")
    x = tokens()
    generator = torch.Generator().manual_seed(5)
    keep = torch.rand(2, 1, 7, 7, generator=generator) > 0.3
    padding = torch.rand(2, 7, generator=generator) > 0.7
    bias = torch.randn(3, 7, 7, generator=generator, dtype=torch.float64)
    shift = torch.randn(2, 1, 7, 7, generator=generator, dtype=torch.float64) * (kind == "float")
    mask = keep if kind == "bool" else shift.masked_fill(~keep, -torch.inf)
    with capture_codes(attention) as codes:
        out = attention(x, mask=mask, bias=bias, key_padding_mask=padding, causal=causal)
    q, k, v = (
        projection(x).unflatten(2, (3, -1)).transpose(1, 2)
        for projection in (attention.query_proj, attention.key_proj, attention.value_proj)
    )
    visible = keep & ~padding[:, None, None]
    if causal:
        visible = visible & torch.ones(7, 7).tril().bool()
    expected = hyper_attention(q, k, v, mask=visible, bias=bias + shift, backend="reference")
    torch.testing.assert_close(out, attention.output_proj(expected.transpose(1, 2).flatten(2)))
    torch.testing.assert_close(codes[0], attention_codes(q, k, mask=visible, bias=bias + shift))


@pytest.mark.parametrize("shape", [(), (7,), (1, 7), (7, 1), (2, 1, 1, 7)])
def test_masks_and_biases_of_few_axes_can_be_captured(shape):
    from headcode import capture_codes

    attention, x = layer("softmax"), tokens()
    mask, bias = torch.rand(shape) > 0.2, torch.randn(shape, dtype=torch.float64)
    with capture_codes(attention, queries=[1, 3], keys=[0, 2]) as some:
        attention(x, mask=mask, bias=bias)
    with capture_codes(attention) as every:
        attention(x, mask=mask, bias=bias)
    torch.testing.assert_close(some[0], every[0][:, :, [1, 3]][..., [0, 2]])


@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
def test_autocast_rounds_once(backend):
    from headcode import attention_codes, hyper_attention

    q, k, v = (torch.randn(2, 3, 16, 4).bfloat16() for _ in range(3))
    exact = hyper_attention(*(t.double() for t in (q, k, v)), backend="reference")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = hyper_attention(q, k, v, backend=backend)
        codes = attention_codes(q, k)
        layer = HyperAttention(8, 4, backend=backend)
        x = torch.randn(2, 5, 8)
        assert layer(x, mask=torch.zeros(5, 5), bias=torch.zeros(5, 5)).dtype == torch.bfloat16
    assert out.dtype == torch.bfloat16 and codes.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=1e-2)
    assert ((out.double() - exact).norm() / exact.norm()) < 2.5e-3


def test_a_failed_call_leaves_no_tokens_in_the_cache():
    attention, cache, x = layer(causal=True), KeyValueCache(), tokens()
    with torch.no_grad():
        first = attention(x[:, :3], cache=cache)
        with pytest.raises(ValueError, match="mask must be broadcastable"):
            attention(x[:, 3:], cache=cache, mask=torch.ones(9, 9).bool())
        rest = attention(x[:, 3:], cache=cache)
    torch.testing.assert_close(torch.cat((first, rest), 1), attention(x))


def test_a_cache_keeps_its_batch():
    attention, cache = layer(causal=True), KeyValueCache()
    with torch.no_grad():
        attention(tokens(), cache=cache)
        with pytest.raises(ValueError, match="holds a batch of 2, got 3"):
            attention(tokens(batch=3), cache=cache)


def test_gradients_through_a_cache_are_those_of_the_whole_sequence():
    attention, x = layer("hyla", causal=True).double(), tokens().double()
    attention(x).square().sum().backward()
    wanted = [parameter.grad.clone() for parameter in attention.parameters()]
    attention.zero_grad()
    cache = KeyValueCache()
    pieces = torch.cat([attention(piece, cache=cache) for piece in x.split(3, dim=1)], dim=1)
    pieces.square().sum().backward()
    for parameter, expected in zip(attention.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-9)
