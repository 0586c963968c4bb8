"""The encoder-decoder: what sees what, padding, teacher forcing against greedy decoding, caches, files."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headcode.nn import (
    EncoderDecoder,
    EncoderDecoderConfig,
    ModelConfig,
    Transformer,
    capture_codes,
    greedy_decode,
    load_model,
    make_model,
    model_config,
    save_model,
)

SIZES = {"vocab_size": 11, "output_dim": 11, "max_length": 12, "source_length": 5, "dim": 12, "num_heads": 3}
SIZES |= {"qk_dim": 6, "v_dim": 9, "mlp_dim": 10, "num_layers": 2, "decoder_layers": 3}
METHODS = ("softmax", "linear", "hyla")
START, END = 1, 2


def make(**options):
    torch.manual_seed(0)
    return EncoderDecoder(EncoderDecoderConfig(**{**SIZES, **options})).double().eval()


def tokens(batch=3, seed=0):
    return torch.randint(3, 11, (batch, 12), generator=torch.Generator().manual_seed(seed))


X = tokens()


def changed(position):
    x = X.clone()
    x[:, position] = 3 + (x[:, position] - 2) % 8
    return x


@pytest.mark.parametrize("method", METHODS)
def test_a_target_token_sees_the_source_and_its_own_past(method):
    model = make(method=method)
    before = model(X)
    assert before.shape == (3, 7, 11)
    for position in range(5):
        assert ((model(changed(position)) - before).abs().amax(-1) > 0).all()
    for position in range(5, 12):
        after = model(changed(position))
        assert torch.equal(after[:, : position - 5], before[:, : position - 5])
        assert ((after - before)[:, position - 5 :].abs().amax(-1) > 0).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [1, 2, 4])
def test_outputs_do_not_depend_on_the_padding_of_the_source(method, length):
    """A padded source is read as the short one is, by a model whose source has no room for more."""
    model, short = make(method=method, position="rotary", qk_dim=12), X[:, :length]
    padded = torch.cat((short, X.new_zeros(3, 5 - length)), 1)
    wanted = model.decode(X[:, 5:], *model.encode(short))
    torch.testing.assert_close(model.decode(X[:, 5:], *model.encode(padded)), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(torch.cat((padded, X[:, 5:]), 1)), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_learned_from_padding(method):
    model = make(method=method)
    x = X.clone()
    x[:, 3:5] = 0
    model(x).sin().sum().backward()
    assert torch.equal(model.encoder.embedding.weight.grad[0], torch.zeros(12, dtype=torch.float64))
    assert (model.encoder.embedding.weight.grad[3:].abs().amax(1) > 0).any()


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), end=st.integers(1, 7))
def test_the_target_behind_a_position_does_not_change_it(method, seed, end):
    """Shorter targets need no mask: what follows them is never read."""
    model, x = make(method=method), tokens(seed=seed)
    torch.testing.assert_close(model(x[:, : 5 + end]), model(x)[:, :end], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("position", ["relative", "rotary", "sinusoidal", "learned", "relative_learned", "none"])
@pytest.mark.parametrize("method", METHODS)
def test_decoding_with_caches_gives_the_logits_of_teacher_forcing(method, position):
    model = make(method=method, position=position, qk_dim=12)
    x = X.clone()
    x[1, 2:5] = 0
    wanted, cache = model(x), model.new_cache()
    encoded, padding = model.encode(x[:, :5])
    for part in (slice(5, 6), slice(6, 9), slice(9, 12)):
        logits = model.decode(x[:, part], encoded, padding, cache=cache)
        expected = wanted[:, part.start - 5 : part.stop - 5]
        torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


def test_the_source_is_projected_once():
    model = make()
    calls = []
    for block in model.decoder.blocks:
        block.cross_attention.key_proj.register_forward_hook(lambda *call: calls.append("key"))
        block.cross_attention.value_proj.register_forward_hook(lambda *call: calls.append("value"))
    cache, (encoded, padding) = model.new_cache(), model.encode(X[:, :5])
    with torch.no_grad():
        model.decode(X[:, 5:6], encoded, padding, cache=cache)
        projected = [(layer.context.keys, layer.context.values) for layer in cache.layers]
        model.decode(X[:, 6:7], encoded, padding, cache=cache)
    for layer, (keys, values) in zip(cache.layers, projected, strict=True):
        assert layer.context.keys is keys and layer.context.values is values
        assert keys.shape == (3, 3, 5, 2) and values.shape == (3, 3, 5, 3)
    assert len(calls) in (0, 6)  # the two projections of a layer are one product, unless a hook takes them apart
    assert cache.length == 2


@pytest.mark.parametrize("method", METHODS)
def test_greedy_decoding_is_right_exactly_where_teacher_forcing_is(method):
    """Of targets that greedy decoding wrote itself, some with one token changed, for a model with random weights."""
    model, source = make(method=method), tokens(batch=29)[:, :5]
    written = greedy_decode(model, source, start_token=START, end_token=END)
    assert torch.equal(written, greedy_decode(model, source, start_token=START, end_token=END, cache=False))
    target, asked = written.clone(), written != 0
    target[::3, 0] = 3 + (target[::3, 0] - 2) % 8
    x = torch.cat((source, torch.full((29, 1), START), target[:, :-1]), 1)
    forced = ((model(x).argmax(-1) == target) | ~asked).all(1)
    assert torch.equal(forced, (written == target).all(1))
    assert forced.tolist() == [row % 3 != 0 for row in range(29)]


def test_greedy_decoding_stops_at_the_end_and_pads():
    model = make()
    with torch.no_grad():
        model.decoder.output_proj.weight.zero_()
        model.decoder.output_proj.bias.copy_(torch.arange(11.0) * 0 + (torch.arange(11) == END))
    found = greedy_decode(model, X[:, :5], start_token=START, end_token=END)
    assert found.tolist() == [[END]] * 3
    with torch.no_grad():
        model.decoder.output_proj.bias.copy_((torch.arange(11) == 7).double())
    assert greedy_decode(model, X[:, :5], start_token=START, end_token=END, max_tokens=4).tolist() == [[7] * 4] * 3
    assert greedy_decode(model, X[:, :5], start_token=START, end_token=END).shape == (3, 7)
    with pytest.raises(ValueError, match="max_tokens must lie in 1..7"):
        greedy_decode(model, X[:, :5], start_token=START, end_token=END, max_tokens=8)


@pytest.mark.parametrize(
    "options",
    [{}, {"position": "relative_learned"}, {"share_layers": True}, {"qk_norm": True}, {"output_dim": None},
     {"feedforward": "swiglu"}, {"num_experts": 3}, {"method": "hyla_deeper"}],
)  # fmt: skip
def test_the_parameters_are_counted_from_the_config(options):
    model = make(**options)
    assert sum(p.numel() for p in model.parameters()) == model.config.num_parameters
    assert model(X).shape == (3, 7, 11)


def test_all_methods_have_the_same_parameters():
    assert len({make(method=method).config.num_parameters for method in METHODS}) == 1


def test_codes_are_numbered_encoder_then_decoder_then_cross_attention():
    model = make()
    assert model.config.attention_layers == 2 + 3 + 3
    with capture_codes(model) as codes:
        model(X)
    shapes = [(5, 5)] * 2 + [(7, 7)] * 3 + [(7, 5)] * 3
    assert [tuple(codes[layer].shape[2:]) for layer in range(8)] == shapes
    for layer, shape in enumerate(shapes):
        queries, keys = model.config.code_positions(layer)
        assert (len(range(12)[queries]), len(range(12)[keys])) == shape
    with capture_codes(model, layers=-1, queries=[5, 11], keys=[0, 4]) as some:
        model(X)
    torch.testing.assert_close(some[7], codes[7][:, :, [0, 6]][..., [0, 4]])


def test_codes_of_padding_are_zero():
    x = X.clone()
    x[:, 3:5] = 0
    model = make()
    with capture_codes(model, layers=[0, 5]) as codes:
        model(x)
    assert not codes[0][..., 3:].any() and not codes[5][..., 3:].any() and codes[5][..., :3].all()


@pytest.mark.parametrize("kind", ["encoder_decoder", "transformer"])
def test_a_model_folder_gives_back_its_kind(tmp_path, kind):
    config = make().config if kind == "encoder_decoder" else ModelConfig(input_dim=3, output_dim=2, max_length=5)
    model = make_model(config).double()
    loaded = load_model(save_model(model, tmp_path))
    assert type(loaded) is type(model) and loaded.config == config
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    assert json.loads((tmp_path / "config.json").read_text()).get("kind", "transformer") == kind


def test_the_config_is_strict_json():
    config = make().config
    assert model_config(json.loads(config.to_json())) == config
    with pytest.raises(ValueError, match="EncoderDecoderConfig has no field 'depth'"):
        model_config({**config.to_dict(), "depth": 3})
    with pytest.raises(ValueError, match="kind must be one of transformer, encoder_decoder, graph_network, got 'lstm'"):
        model_config({**config.to_dict(), "kind": "lstm"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vocab_size": None, "input_dim": 3}, "reads tokens"),
        ({"source_length": 12}, "source_length must be below max_length"),
        ({"decoder_layers": 0}, "decoder_layers must be at least 1"),
        ({"padding_token": 11}, "padding_token must lie in 0..10"),
        ({"causal": True}, "causal is not for an encoder-decoder"),
        ({"cross_layers": 1}, "cross_layers is not for an encoder-decoder"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(options, words):
    with pytest.raises(ValueError, match=words):
        make(**options)


def test_wrong_inputs_are_refused_in_a_sentence():
    model = make()
    with pytest.raises(ValueError, match="5 of the source and up to 7 of the target, got \\(3, 13\\)"):
        model(torch.cat((X, X[:, :1]), 1))
    with pytest.raises(ValueError, match="queries must be target tokens, from 5 on"):
        model(X, queries=slice(4, None))
    with pytest.raises(ValueError, match="Tokens must lie in 0..10"):
        model(X + 8)
    with pytest.raises(TypeError, match="EncoderDecoder is made from an EncoderDecoderConfig, got ModelConfig"):
        EncoderDecoder(ModelConfig(vocab_size=3, max_length=4))
    with pytest.raises(TypeError, match="Transformer is made from a ModelConfig"):
        Transformer(model.config)


def test_a_first_call_that_fails_leaves_no_context_in_the_cache():
    model = make()
    cache, (encoded, padding) = model.new_cache(), model.encode(X[:, :5])
    broken = model.decoder.blocks[-1].feedforward
    handle = broken.register_forward_pre_hook(lambda *call: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.decode(X[:, 5:6], encoded, padding, cache=cache)
    handle.remove()
    assert cache.length == 0 and all(layer.context.length == 0 for layer in cache.layers)
    first = model.decode(X[:, 5:6], encoded, padding, cache=cache)
    torch.testing.assert_close(first, model(X)[:, :1], rtol=1e-10, atol=1e-10)


def test_a_reordered_cache_continues_other_sources_and_targets():
    model, rows = make(), torch.tensor([1, 1, 0, 2])
    cache, (encoded, padding) = model.new_cache(), model.encode(X[:, :5])
    model.decode(X[:, 5:8], encoded, padding, cache=cache)
    for layer in cache.layers:
        layer.reorder(rows)
    logits = model.decode(X[rows, 8:], encoded[rows], padding[rows], cache=cache)
    torch.testing.assert_close(logits, model(X)[rows, 3:], rtol=1e-10, atol=1e-10)
