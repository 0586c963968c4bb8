"""The transformer: sizes, initialisation, position, queries, decoding, arithmetic, storage."""

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from headcode import METHODS, ModelConfig, Transformer
from headcode.interop import to_reference
from headcode.nn import RelativeBias, forward_flops
from headcode.nn.position import relative_buckets, sinusoidal_positions
from tests.support.models import check_same_gradients

LOGIC = {"input_dim": 5, "output_dim": 1, "max_length": 16, "num_layers": 2, "num_heads": 8, "qk_dim": 16, "v_dim": 16}
SRAVEN = {
    "input_dim": 8,
    "output_dim": 8,
    "max_length": 36,
    "num_layers": 4,
    "num_heads": 16,
    "qk_dim": 64,
    "v_dim": 64,
}
SMALL = {"dim": 12, "num_layers": 3, "num_heads": 3, "qk_dim": 6, "v_dim": 9, "mlp_dim": 10, "max_length": 7}


def small(**options):
    torch.manual_seed(0)
    size = {} if "vocab_size" in options else {"input_dim": 5, "output_dim": 3}
    return Transformer(ModelConfig(**{**SMALL, **size, **options})).double()


X = torch.randn(2, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("method", [name for name in METHODS if name != "hyla_deeper"])
def test_parameter_counts_of_the_paper(method):
    for sizes, count in ((LOGIC, 151_009), (SRAVEN, 402_824)):
        model = Transformer(ModelConfig(method=method, dim=128, mlp_dim=256, **sizes))
        assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_initial_statistics():
    torch.manual_seed(0)
    model = Transformer(ModelConfig(dim=128, mlp_dim=256, **SRAVEN))
    # Over many draws the sample variance of n values is within 5 standard errors of the truth.
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif name.endswith("norm.weight"):
            assert (parameter == 1).all(), name
        elif name.endswith("relative_bias.table"):
            assert_variance(parameter, 1 / 36, kurtosis=3.0)
        else:
            fan_in = parameter.shape[1]
            sigma = math.sqrt(1 / fan_in) / 0.87962566103423978
            assert_variance(parameter, 1 / fan_in, kurtosis=2.4)
            assert parameter.abs().max() <= 2 * sigma + 1e-7
            assert parameter.abs().max() > 1.9 * sigma
    tables = torch.cat([block.attention.relative_bias.table.flatten() for block in model.layers()])
    assert tables.abs().max() > 2.5 / 6  # untruncated: 2,304 normal draws reach beyond 2.5σ
    embedding = Transformer(ModelConfig(vocab_size=1000, dim=128, max_length=8)).embedding.weight
    assert_variance(embedding, 1 / 128, kurtosis=3.0)
    assert embedding.abs().max() > 3 / math.sqrt(128)


def assert_variance(values, expected, kurtosis):
    error = expected * math.sqrt((kurtosis - 1) / values.numel())
    assert abs(values.var().item() - expected) < 5 * error
    assert abs(values.mean().item()) < 5 * math.sqrt(expected / values.numel())


def relative_bucket(distance, num_buckets):
    """The design's formula, number by number."""
    distance, exact = max(distance, 0), num_buckets // 2
    if exact == 0 or distance < exact:
        return min(distance, num_buckets - 1)
    ratio = math.log(distance / exact + torch.finfo(torch.float32).eps) / math.log(num_buckets / exact)
    return min(exact + int(ratio * (num_buckets - exact)), num_buckets - 1)


class TestPosition:
    def test_buckets_by_the_formula(self):
        # N = 16: exact below 8, then 8 + int(log2(n/8)·8).
        expected = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 15, 15]
        assert relative_buckets(torch.arange(18), 16).tolist() == expected
        assert relative_buckets(torch.arange(9), 7).tolist() == [0, 1, 2, 3, 4, 5, 6, 6, 6]
        assert relative_buckets(torch.tensor([-2, 0, 5]), 1).tolist() == [0, 0, 0]
        assert relative_buckets(torch.tensor([17, 18, 19, 25, 35]), 36).tolist() == [17, 18, 19, 26, 35]

    def test_the_table_is_the_formula(self):
        for buckets in range(1, 200):
            table = RelativeBias(1, buckets).buckets.tolist()
            assert table == [relative_bucket(n, buckets) for n in range(buckets + 1)]

    @pytest.mark.parametrize("sizes", [(5, 7, 2), (1, 7, 6), (7, 7, 0), (3, 3, 50), (4, 2, -2)])
    def test_band(self, sizes):
        queries, keys, offset = sizes
        position = RelativeBias(3, 7).double()
        band = position(queries, keys, offset)
        assert band.shape == (3, queries + keys - 1)
        for i in range(queries):
            for j in range(keys):
                expected = position.table[:, relative_bucket(offset + i - j, 7)]
                assert torch.equal(band[:, j - i + queries - 1], expected)

    def test_sinusoids(self):
        table = sinusoidal_positions(5, 6, first_position=2)
        assert table.shape == (5, 6)
        torch.testing.assert_close(table[0, 0], torch.tensor(math.sin(2.0)))
        torch.testing.assert_close(table[1, 3 + 2], torch.tensor(math.cos(3.0 / 10_000)))

    @pytest.mark.parametrize("position", ["relative", "rotary", "sinusoidal", "learned", "relative_learned", "none"])
    def test_order_matters_unless_none(self, position):
        model = small(position=position)
        last = slice(-1, None)
        shuffled = torch.cat((X[:, [3, 1, 0, 2, 5, 4]], X[:, 6:]), 1)
        same = torch.allclose(model(X, queries=last), model(shuffled, queries=last))
        assert same == (position == "none")


@pytest.mark.parametrize("period", [3, 4, 100])
def test_learned_positions_that_repeat(period):
    once, again = small(position="learned"), small(position="learned", position_period=period)
    rows = min(period, once.config.max_length)
    assert again.positions.shape == (rows, once.config.dim)
    again.load_state_dict({**once.state_dict(), "positions": once.positions[:rows]})
    with torch.no_grad():
        once.positions.copy_(once.positions[torch.arange(len(once.positions)) % rows])
    torch.testing.assert_close(again(X), once(X))
    (expected,) = torch.autograd.grad(once(X).sin().sum(), once.positions)
    (actual,) = torch.autograd.grad(again(X).sin().sum(), again.positions)
    summed = torch.zeros_like(actual).index_add(0, torch.arange(len(expected)) % rows, expected)
    torch.testing.assert_close(actual, summed)


@pytest.mark.parametrize("options", [{}, {"share_layers": True}, {"position": "learned"}])
def test_auxiliary_heads_read_before_the_last_layers_and_change_nothing_else(options):
    def made(**more):
        return Transformer(ModelConfig(**{**SMALL, "input_dim": 5, "output_dim": 3, **options, **more})).double()

    plain, model = made(num_layers=3), made(num_layers=3, auxiliary_dims=(4, 6))
    heads = {f"hint_projs.{n}.{part}" for n in (0, 1) for part in ("weight", "bias")}
    assert set(model.state_dict()) - set(plain.state_dict()) == heads
    plain.load_state_dict({name: model.state_dict()[name] for name in plain.state_dict()})
    queries = slice(-2, None)
    outputs, extra = model(X, queries=queries, auxiliary=True)
    assert [found.shape for found in extra] == [(*X.shape[:2], 4), (*X.shape[:2], 6)]
    assert torch.equal(outputs, model(X, queries=queries))
    torch.testing.assert_close(outputs, plain(X, queries=queries))
    hidden = model.embed(X, 0)
    for block, found, head in zip(model.layers()[:-1], reversed(extra), reversed(model.hint_projs), strict=True):
        hidden = block(hidden)
        scale = (hidden.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        expected = (hidden - hidden.mean(-1, keepdim=True)) / scale @ head.weight.T + head.bias
        torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="has no heads for auxiliary targets"):
        plain(X, auxiliary=True)
    with pytest.raises(ValueError, match="The authors' code has no heads for auxiliary targets"):
        to_reference(made(auxiliary_dims=(4,), position="relative"))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"share_layers": True}, {"position": "learned"}])
@pytest.mark.parametrize("queries", [slice(-4, None), slice(2, 3)])
def test_queries_equals_slicing_gradients_included(method, options, queries):
    model = small(method=method, attention_dropout=0.2, **options)
    parameters = list(model.parameters())
    whole = model(X, dropout_seed=3)[:, queries]
    part = model(X, queries=queries, dropout_seed=3)
    check_same_gradients(part, whole, parameters)


def test_layers_drop_different_pairs():
    model = small(attention_dropout=0.5)
    seeds = []
    for block in model.layers():
        block.attention.register_forward_pre_hook(
            lambda module, args, kwargs: seeds.append(kwargs["dropout_seed"]), with_kwargs=True
        )
    model(X, dropout_seed=2**63 - 1)
    assert len(set(seeds)) == 3 and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("position", ["relative", "rotary", "sinusoidal", "learned", "relative_learned"])
@pytest.mark.parametrize("share_layers", [False, True])
def test_cached_decoding_equals_the_causal_pass(method, position, share_layers):
    model = small(
        vocab_size=11, method=method, position=position, causal=True, feedforward="swiglu", share_layers=share_layers
    )
    tokens = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(2))
    whole, cache = model(tokens), model.new_cache()
    with torch.no_grad():
        pieces = [model(tokens[:, a:b], cache=cache) for a, b in [(0, 3), (3, 4), (4, 7)]]
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    assert cache.length == 7 and whole.shape == (2, 7, 11)


@pytest.mark.parametrize("recurrent", [False, True])
def test_recurrent_decoding(recurrent):
    model = small(vocab_size=11, method="linear", position="rotary", causal=True, recurrent=recurrent)
    tokens = torch.randint(11, (2, 9))
    cache = model.new_cache(recurrent=True)
    with torch.no_grad():
        pieces = [model(tokens[:, i : i + 1], cache=cache) for i in range(9)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(tokens))


@pytest.mark.parametrize(("method", "position"), [("hyla", "relative"), ("linear", "rotary")])
def test_a_failed_pass_leaves_no_tokens_in_the_cache(method, position):
    model = small(method=method, position=position, causal=True)
    cache = model.new_cache(recurrent=method == "linear")
    with torch.no_grad():
        first = model(X[:, :3], cache=cache)
        hook = model.layers()[1].feedforward.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(X[:, 3:], cache=cache)
        hook.remove()
        rest = model(X[:, 3:], cache=cache)
    torch.testing.assert_close(torch.cat((first, rest), 1), model(X))
    with pytest.raises(ValueError, match="cache must come from this model's new_cache"):
        small(causal=True, num_layers=2)(X, cache=cache)


def test_a_recurrent_model_with_a_cache_of_keys():
    model = small(method="linear", position="none", causal=True, recurrent=True)
    cache = model.new_cache(recurrent=False)
    with torch.no_grad():
        pieces = [model(X[:, :3], cache=cache), model(X[:, 3:], cache=cache)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(X))


def test_made_on_the_meta_device_and_loaded():
    model = small()
    with torch.device("meta"):
        empty = Transformer(model.config).double()
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert torch.equal(empty.eval()(X), model.eval()(X))


def test_reset_parameters_resets_everything():
    model = small(qk_norm=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    model.reset_parameters()
    assert not any((parameter == 7.0).any() for parameter in model.parameters())


def test_caches_are_refused_where_they_make_no_sense():
    with pytest.raises(ValueError, match="needs a causal model"):
        small().new_cache()
    with pytest.raises(ValueError, match="T5 band adds a bias"):
        small(method="linear", causal=True).new_cache(recurrent=True)


def test_token_logits_are_read_with_the_embedding():
    model = small(vocab_size=11, num_layers=1)
    hidden = {}
    model.final_norm.register_forward_hook(lambda module, args, output: hidden.update(out=output))
    logits = model(torch.randint(11, (2, 7)))
    torch.testing.assert_close(logits, hidden["out"] @ model.embedding.weight.T / math.sqrt(12))


def test_one_block_by_hand():
    model = small(num_layers=1)
    block = model.blocks[0]
    norm = nn.LayerNorm(12, eps=1e-6, dtype=torch.float64)
    hidden = model.embedding(X)
    hidden = hidden + block.attention(norm(hidden))
    inner = norm(hidden) @ block.feedforward.hidden_proj.weight.T
    gelu = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
    hidden = hidden + gelu @ block.feedforward.output_proj.weight.T
    torch.testing.assert_close(model(X), model.output_proj(norm(hidden)))


class TestFlops:
    def test_hand_count(self):
        # dim 4, 1 layer, 2 heads, qk 6, v 8, mlp 5, length 3, input 2, output 7, method hyla.
        config = ModelConfig(
            input_dim=2, output_dim=7, max_length=3, dim=4, num_layers=1, num_heads=2, qk_dim=6, v_dim=8, mlp_dim=5
        )
        embedding = 3 * 2 * 4
        projections = 3 * 4 * (6 + 6 + 8)
        scores, values = 9 * 6, 2 * 9 * 8
        rest = 3 * (8 * 4 + 4 * 5 + 5 * 4 + 4 * 7)
        assert forward_flops(config, 3) == 2 * (embedding + projections + scores + values + rest)
        assert forward_flops(config.replace(method="softmax"), 3) == forward_flops(config, 3) - 2 * 9 * 8
        assert forward_flops(config.replace(causal=True), 3) == forward_flops(config, 3) - 2 * 3 * (6 + 16)
        one = 3 * 4 * 14 + 4 * 6 + 3 * 6 + 2 * 3 * 8 + (8 * 4 + 4 * 5 + 5 * 4 + 4 * 7)
        assert forward_flops(config, 3, slice(-1, None)) == 2 * (embedding + one)

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("queries", [None, slice(-2, None)])
    @pytest.mark.parametrize("options", [{}, {"feedforward": "swiglu"}, {"value_net": "swiglu"}])
    def test_torch_counts_the_same(self, method, queries, options):
        model = small(method=method, backend="reference", **options)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(X, queries=queries)
        assert counter.get_total_flops() == 2 * forward_flops(model.config, 7, queries)

    @pytest.mark.parametrize("length", [7, 64, 200])
    def test_recurrent_form(self, length):
        model = small(method="linear", position="none", causal=True, recurrent=True)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.randn(1, length, 5, dtype=torch.float64))
        assert counter.get_total_flops() == forward_flops(model.config, length)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vocab_size": None, "input_dim": None}, "needs input_dim (continuous inputs) or vocab_size"),
        ({"vocab_size": 7}, "one of the two"),
        ({"output_dim": None}, "needs output_dim"),
        ({"attention_dropout": float("nan")}, "attention_dropout must be a finite number, got nan"),
        ({"attention_dropout": 1.0}, "attention_dropout must be at least 0 and below 1"),
        ({"num_heads": 4}, "qk_dim must be divisible by num_heads, got qk_dim=6 and num_heads=4"),
        ({"dim": 0}, "dim must be at least 1, got 0"),
        ({"dim": "12"}, "dim must be a whole number, got '12'."),
        ({"causal": 1}, "causal must be True or False, got 1."),
        ({"method": "x"}, "method must be one of softmax, linear"),
        ({"position": "x"}, "position must be one of relative, rotary, sinusoidal, learned, relative_learned, none"),
        ({"position": "rotary", "position_period": 3}, "position_period=3 is for learned positions"),
        ({"position": "learned", "position_period": 0}, "position_period must be at least 1, got 0"),
        ({"auxiliary_dims": (3, 0)}, "auxiliary_dims must be 1 or more each, got (3, 0)"),
        ({"auxiliary_dims": (3, 4), "num_layers": 2}, "need num_layers of 3 or more and cross_layers=0, got 2 and 0"),
        ({"auxiliary_dims": (2,), "cross_layers": 1}, "and cross_layers=0, got 3 and 1"),
        ({"feedforward": "x"}, "feedforward must be one of gelu, swiglu"),
        ({"backend": "x"}, "backend must be one of auto"),
        ({"recurrent": True}, "recurrent=True is not possible"),
    ],
)
def test_bad_configs(options, words):
    with pytest.raises(ValueError) as caught:
        ModelConfig(**{**SMALL, "input_dim": 5, "output_dim": 3, **options})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (X[:, :, :4], ValueError, r"shape \(batch, length, 5\), got \(2, 7, 4\)"),
        (X.float(), TypeError, "model's dtype torch.float64, got torch.float32"),
        ([1.0], TypeError, "must be a torch.Tensor, got list"),
    ],
)
def test_bad_inputs(x, error, words):
    with pytest.raises(error, match=words):
        small()(x)


def test_bad_tokens_and_lengths():
    with pytest.raises(ValueError, match="integer tokens of shape"):
        small(vocab_size=11)(torch.zeros(2, 7))
    with pytest.raises(ValueError, match="Tokens must lie in 0..10, got 0..11"):
        small(vocab_size=11)(torch.tensor([[0, 11]]))
    with pytest.raises(ValueError, match="Learned positions reach 7 tokens, got 8"):
        small(position="learned")(torch.zeros(2, 8, 5, dtype=torch.float64))
    with pytest.raises(TypeError, match="made from a ModelConfig, got dict"):
        Transformer({})


@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
def test_a_whole_training_step_compiles_to_one_graph(backend):
    torch._dynamo.reset()
    model = small(attention_dropout=0.2, backend=backend).float()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for seed in (1, 2, 3):
        x = torch.randn(2, 7, 5)
        eager = model(x, queries=slice(-2, None), dropout_seed=seed)
        traced = compiled(x, queries=slice(-2, None), dropout_seed=seed)
        torch.testing.assert_close(traced, eager)
        expected = torch.autograd.grad(eager.sin().sum(), list(model.parameters()))
        actual = torch.autograd.grad(traced.sin().sum(), list(model.parameters()))
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other)
