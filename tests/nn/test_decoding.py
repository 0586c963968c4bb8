"""Compiled decoding: the logits of the layers in float64, whatever the model, lengths, padding and threads."""

import copy
import itertools
import math
import os
import subprocess
import sys

import pytest
import torch

from headcode import METHODS
from headcode.nn import FastWeightState, generate, why_decoded_op_by_op
from headcode.ops.cpu import NET_CODES, NORM_CODES, decode_plan
from tests.support.models import distance, exact, make

TOKENS = {"vocab_size": 71, "input_dim": None, "output_dim": None, "causal": True, "max_length": 41}
POSITIONS = ("none", "rotary", "relative", "learned", "sinusoidal", "relative_learned")


def decoder(**changes):
    return make(**(TOKENS | changes)).eval()


def tokens(batch, length, seed=2):
    return torch.randint(71, (batch, length), generator=torch.Generator().manual_seed(seed))


def decode(model, x, lengths, recurrent=False, cache=None, padding=None):
    """Logits of the tokens x (B, T), so many of them in each pass."""
    cache = model.new_cache(recurrent=recurrent) if cache is None else cache
    found = []
    with torch.no_grad():
        for part in x.split(lengths, 1):
            mask = None
            if padding is not None:
                end = cache.length + part.shape[1]
                mask = padding[:, cache.length : end] if recurrent else padding[:, :end]
            found.append(model(part, cache=cache, key_padding_mask=mask))
    return torch.cat(found, 1)


def check(model, x, lengths, compiled, recurrent=False, padding=None, bound=1e-5):
    compiled.clear()
    given = decode(model, x, lengths, recurrent, padding=padding)
    assert compiled == [True] * len(lengths)
    expected = decode(exact(model), x, [x.shape[1]], recurrent, padding=padding)
    assert distance(given, expected) < bound
    return given


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("method", METHODS)
def test_logits_are_those_of_the_layers(method, position, compiled, poisoned):
    for (batch, feedforward), recurrent in itertools.product(((1, "gelu"), (3, "swiglu")), (False, True)):
        if recurrent and (method != "linear" or "relative" in position):
            continue
        model = decoder(method=method, position=position, feedforward=feedforward)
        check(model, tokens(batch, 23), [5, 1, 1, 1, 7, 1, 1, 1, 5], compiled, recurrent)
        check(model, tokens(batch, 9), [1] * 9, compiled, recurrent)


@pytest.mark.parametrize("value_net", NET_CODES)
@pytest.mark.parametrize("norm", NORM_CODES)
def test_all_norms_and_value_nets_at_odd_head_widths(norm, value_net, compiled, poisoned):
    """Heads of width 3 and 1, of 11 and 3, of 16 and 8."""
    for heads, qk_dim, v_dim in ((16, 48, 16), (16, 176, 48), (2, 32, 16)):
        widths = {"num_heads": heads, "qk_dim": qk_dim, "v_dim": v_dim}
        model = decoder(norm=norm, value_net=value_net, position="relative", **widths)
        check(model, tokens(2, 19), [3, 1, 1, 1, 13], compiled)


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": True, "position": "rotary"},
        {"share_layers": True, "num_layers": 3},
        {"output_dim": 13, "position": "relative_learned"},
        {"position": "learned", "position_period": 7},
        {"max_length": 1, "position": "none"},
        {"attention_dropout": 0.5},
    ],
)
def test_models_of_other_kinds(changes, compiled, poisoned):
    check(decoder(method="hyla", **changes), tokens(2, 19), [3, 1, 1, 1, 13], compiled)


@pytest.mark.parametrize("position", ["rotary", "relative"])
@pytest.mark.parametrize("method", ["softmax", "linear", "hyla"])
def test_padding_in_any_place(method, position, compiled, poisoned):
    """On the left, between, everywhere, and none; what is behind it is never read."""
    model = decoder(method=method, position=position)
    padding = torch.zeros(4, 21, dtype=torch.bool)
    padding[0, :11] = padding[1, 4:6] = padding[1, 13] = padding[2] = True
    for recurrent in (False, True) if method == "linear" and position == "rotary" else (False,):
        check(model, tokens(4, 21), [6, 1, 1, 1, 3, 1, 1, 1, 1, 5], compiled, recurrent, padding)
    cache, whole = model.new_cache(recurrent=False), tokens(4, 21)
    decode(model, whole[:, :20], [20], cache=cache, padding=padding)
    clean = copy.deepcopy(cache)
    for layer in cache.layers:
        layer.keys[0, :, :11] = layer.values[0, :, :11] = math.nan
    given, expected = (decode(model, whole[:, 20:], [1], cache=c, padding=padding) for c in (cache, clean))
    assert torch.equal(given, expected)


def test_a_cache_that_grows(compiled, poisoned):
    model = decoder(method="hyla", position="rotary")
    check(model, tokens(2, 201), [60, *[1] * 31, 17, *[1] * 3, 90], compiled)


@pytest.mark.parametrize("method", ["softmax", "linear", "hyla"])
def test_the_bits_do_not_depend_on_threads_or_batch_mates(method, compiled, threads, monkeypatch):
    monkeypatch.setattr(decode_plan, "SMALL", 0)
    found = {}
    for recurrent in (False, True) if method == "linear" else (False,):
        for count, piece in itertools.product((1, 2, 5), (8, 64)):
            threads(count)
            monkeypatch.setattr(decode_plan, "PIECE", piece)
            model = decoder(method=method, position="rotary", num_layers=3)
            found[count, piece] = check(model, tokens(3, 17), [4, 1, 1, 1, 10], compiled, recurrent)
        assert all(torch.equal(found[1, 64], logits) for logits in found.values())
        alone = decode(model, tokens(3, 17)[1:2], [4, 1, 1, 1, 10], recurrent)
        assert torch.equal(alone, found[1, 64][1:2])


def test_outputs_of_some_positions(compiled):
    model, x = decoder(method="hyla", position="rotary"), tokens(2, 9)
    whole = check(model, x, [9], compiled)
    compiled.clear()
    for queries in (slice(-1, None), slice(2, 5), slice(None), slice(-4, -1)):
        with torch.no_grad():
            assert torch.equal(model(x, queries=queries, cache=model.new_cache()), whole[:, queries])
    assert compiled == [True] * 4


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("method", ["softmax", "linear", "hyla"])
def test_generated_tokens_are_those_of_the_layers(method, position, compiled):
    model = decoder(method=method, position=position, output_dim=71)
    plain = exact(model)
    choices = [
        {"temperature": 0},
        {"temperature": 1.3, "seed": 5},
        {"temperature": 0.8, "top_k": 7, "seed": 1},
        {"temperature": 2.0, "top_p": 0.8, "seed": 2},
        {"temperature": 2.0, "top_k": 20, "top_p": 0.7, "seed": 3},
    ]
    for options in choices:
        given = list(generate(model, [3, 1, 4], 21, **options))
        assert compiled == [True] * 21 and len(set(given)) > 1
        compiled.clear()
        assert given == list(generate(plain, [3, 1, 4], 21, **options, cache=False))
        assert given == list(generate(model, [3, 1, 4], 21, **options, recurrent=False))
        compiled.clear()


def test_sequences_that_change_places(compiled):
    x, order = tokens(3, 12), torch.tensor([2, 0, 0, 1])
    for method, recurrent in (("hyla", False), ("linear", True)):
        model = decoder(method=method, position="rotary")
        cache = model.new_cache(recurrent=recurrent)
        decode(model, x[:, :7], [6, 1], cache=cache, recurrent=recurrent)
        for layer in cache.layers:
            layer.reorder(order)
        rest = decode(model, x[order, 7:], [1] * 5, cache=cache, recurrent=recurrent)
        assert distance(rest, decode(exact(model), x[order], [12], recurrent)[:, 7:]) < 1e-5
    assert compiled.count(True) == 14


def test_nothing_is_packed_or_moved(compiled):
    """A token is added where the buffers have room, and the state before it stays as it was."""
    model, x = decoder(method="hyla", position="rotary"), tokens(1, 9)
    cache = model.new_cache()
    decode(model, x[:, :3], [3], cache=cache)
    buffers = [(layer.keys, layer.values) for layer in cache.layers]
    before = [layer.keys.clone() for layer in cache.layers]
    decode(model, x[:, 3:], [1] * 6, cache=cache)
    for layer, (keys, values), old in zip(cache.layers, buffers, before, strict=True):
        assert layer.keys is keys and layer.values is values and layer.length == 9
        assert torch.equal(keys[:, :, :3], old[:, :, :3])
    model = decoder(method="linear", position="rotary")
    cache = model.new_cache(recurrent=True)
    decode(model, x[:, :3], [3], cache=cache, recurrent=True)
    held = [(layer.state, layer.state.clone()) for layer in cache.layers]
    decode(model, x[:, 3:], [1] * 6, cache=cache, recurrent=True)
    assert all(torch.equal(state, copied) for state, copied in held)


def test_a_copied_cache_goes_its_own_way(compiled):
    model, x = decoder(method="hyla", position="rotary"), tokens(2, 9)
    cache = model.new_cache()
    decode(model, x[:, :5], [4, 1], cache=cache)
    other = copy.deepcopy(cache)
    assert other.compiled is None and cache.compiled is not None
    first = decode(model, x[:, 5:], [1] * 4, cache=cache)
    decode(model, x[:, :4].flip(1), [1] * 4, cache=model.new_cache())
    assert torch.equal(first, decode(model, x[:, 5:], [1] * 4, cache=other))
    assert all(compiled)


def test_mistakes_are_the_layers_to_say(compiled):
    model, x = decoder(method="linear", position="learned"), tokens(2, 7)
    cache = model.new_cache()
    decode(model, x[:, :5], [4, 1], cache=cache)
    with torch.no_grad():
        for wrong in (71, -1):
            with pytest.raises(ValueError, match=r"Tokens must lie in 0\.\.70"):
                model(torch.tensor([[3], [wrong]]), cache=cache)
        with pytest.raises(ValueError, match="holds a batch of 2, got 3"):
            model(tokens(3, 1), cache=cache)
        with pytest.raises(ValueError, match=r"must have shape \(batch, keys\) = \(2, 6\), got \(2, 5\)"):
            model(tokens(2, 1), cache=cache, key_padding_mask=torch.zeros(2, 5, dtype=torch.bool))
        with pytest.raises(TypeError, match="must be a boolean tensor"):
            model(tokens(2, 1), cache=cache, key_padding_mask=torch.zeros(2, 6))
        with pytest.raises(ValueError, match="Learned positions reach 41 tokens, got 42"):
            model(tokens(2, 37), cache=cache)
        with pytest.raises(ValueError, match="queries must name at least one"):
            model(tokens(2, 1), cache=cache, queries=slice(3, 4))
    assert cache.length == 5 and {layer.length for layer in cache.layers} == {5}
    rest = decode(model, x[:, 5:], [1, 1], cache=cache)
    assert distance(rest, decode(exact(model), x, [7])[:, 5:]) < 1e-5


def test_a_state_where_none_is_possible(compiled):
    model = decoder(method="hyla", position="rotary")
    cache = model.new_cache()
    cache.layers = [FastWeightState() for _ in cache.layers]
    with torch.no_grad(), pytest.raises(ValueError, match="recurrent form is not possible"):
        model(tokens(2, 1), cache=cache)


def test_why_not():
    assert why_decoded_op_by_op(decoder(method="hyla")) is None
    reasons = {
        "all widths must be multiples of 16": {"mlp_dim": 72},
        "the kernel has no norm 'rms_head' with value net 'tanh' and pooling 'sum'": {"value_net": "tanh"},
        "the backend 'reference' was asked for": {"backend": "reference"},
        "the model is no causal model of tokens": {"causal": False},
    }
    for reason, changes in reasons.items():
        assert why_decoded_op_by_op(decoder(**({"method": "hyla"} | changes))) == reason
    assert "float32" in why_decoded_op_by_op(decoder(method="hyla").double())
    assert why_decoded_op_by_op(decoder(attention_dropout=0.1).train()) == "attention dropout is on"


WITHOUT = """
import torch
from headcode.nn import generate, why_decoded_op_by_op
from tests.nn.test_decoding import decoder
model = decoder(method="hyla", position="rotary", output_dim=71)
print(why_decoded_op_by_op(model) is None, list(generate(model, [3, 1, 4], 9, temperature=0)))
"""


def test_without_numba_the_same_tokens():
    def tell(disabled):
        environment = {**os.environ, "HEADCODE_DISABLE_NUMBA": disabled}
        run = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr
        return run.stdout.split(" ", 1)

    (served, with_kernels), (not_served, without) = tell("0"), tell("1")
    assert (served, not_served) == ("True", "False") and with_kernels == without
