"""Decoding: with or without a cache, in keys or in a state, the same tokens; and counted arithmetic."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headcode import METHODS
from headcode.nn import ModelConfig, Transformer, forward_flops, generate
from headcode.nn.config import can_recur
from headcode.nn.generation import choose, longest_sequence
from tests.support.models import DECODER


def small(**changes):
    # Read with the embedding (no output_dim), an untrained model repeats its last token for ever.
    settings = DECODER | {"output_dim": 23, "max_length": 31} | changes
    torch.manual_seed(3)
    return Transformer(ModelConfig(**settings)).double().eval()


PROMPT = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("position", ["rotary", "relative", "none", "learned", "sinusoidal", "relative_learned"])
@pytest.mark.parametrize("method", METHODS)
def test_greedy_with_a_cache_is_greedy_without(method, position):
    model = small(method=method, position=position)
    plain = list(generate(model, PROMPT, 20, temperature=0, cache=False))
    assert plain == list(generate(model, PROMPT, 20, temperature=0))
    assert plain == list(generate(model, PROMPT, 20, temperature=0, recurrent=False))
    assert len(plain) == 20 and len(set(plain)) > 1
    # By hand: the whole text once, and the most probable token of each place.
    logits = model(torch.tensor([PROMPT + plain]))[0]
    assert logits[len(PROMPT) - 1 : -1].argmax(-1).tolist() == plain


def test_the_state_is_used_where_it_can_be_and_stays_small():
    assert can_recur(small(method="linear", position="rotary").config)
    assert can_recur(small(method="linear", position="rotary", attention_dropout=0.1).config)
    bands = [{"method": "linear", "position": position} for position in ("relative", "relative_learned")]
    for changes in ({"method": "hyla"}, {"method": "softmax"}, *bands):
        assert not can_recur(small(**({"position": "rotary"} | changes)).config)
    model = small(method="linear", position="rotary")
    made = []
    original = model.new_cache
    model.new_cache = lambda **options: made.append(original(**options)) or made[-1]
    assert len(list(generate(model, PROMPT, 60, temperature=0))) == 60  # beyond max_length: rotary goes on
    assert {tuple(layer.state.shape) for layer in made[0].layers} == {(1, 2, 4, 3)}
    assert made[0].length == len(PROMPT) + 59


@pytest.mark.parametrize("chunks", [[1] * 29, [29], [5, 1, 11, 12]])
def test_the_recurrent_form_is_the_parallel_form(chunks):
    model = small(method="linear", position="rotary")
    tokens = torch.randint(0, 23, (3, 29), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        parallel = model(tokens)
        cache = model.new_cache(recurrent=True)
        pieces = [model(part, cache=cache) for part in tokens.split(chunks, 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), parallel, rtol=1e-12, atol=1e-12)


def kept_bytes(cache):
    """Memory of everything that a cache holds on to."""
    tensors = [t for layer in cache.layers for t in vars(layer).values() if isinstance(t, torch.Tensor)]
    return sum(t.untyped_storage().nbytes() for t in tensors)


def test_what_a_token_costs_in_memory():
    """The state of linear attention is as large after 500 tokens as after one; keys and values grow."""
    grown = {}
    for recurrent in (True, False):
        model = small(method="linear", position="rotary")
        made = []
        original = model.new_cache
        model.new_cache = lambda **options: made.append(original(**options)) or made[-1]  # noqa: B023 - used at once
        sizes = []
        for _ in generate(model, PROMPT, 500, temperature=0, recurrent=recurrent):
            sizes.append(kept_bytes(made[-1]))
        grown[recurrent] = sizes
    # Two layers, two heads, (4, 3) numbers of 8 bytes.
    assert set(grown[True]) == {2 * 2 * 4 * 3 * 8}
    assert grown[False][-1] >= 2 * 2 * (4 + 3) * 504 * 8 > grown[False][0] >= 2 * 2 * (4 + 3) * 5 * 8


def test_a_cache_whose_sequences_change_places():
    tokens = torch.randint(0, 23, (3, 12), generator=torch.Generator().manual_seed(1))
    order = torch.tensor([2, 0, 0, 1])
    for method, recurrent in (("hyla", False), ("linear", True)):
        model = small(method=method, position="rotary")
        with torch.no_grad():
            cache = model.new_cache(recurrent=recurrent)
            model(tokens[:, :7], cache=cache)
            for layer in cache.layers:
                layer.reorder(order)
                assert layer.batch_size == 4
            torch.testing.assert_close(model(tokens[order, 7:], cache=cache), model(tokens[order])[:, 7:])


def test_where_it_stops():
    model = small(method="hyla", position="relative")
    assert longest_sequence(model.config) == 31 and longest_sequence(small(position="rotary").config) is None
    everything = list(generate(model, PROMPT, 1000, temperature=0))
    assert len(everything) == 31 - len(PROMPT)
    end = next(token for token in everything if token != everything[0])
    stopped = list(generate(model, PROMPT, 1000, temperature=0, end_token=end))
    assert stopped == list(itertools.takewhile(lambda token: token != end, everything))
    model.train()
    next(generate(model, PROMPT, 2))
    assert model.training


def test_draws_are_a_function_of_the_seed_and_follow_the_probabilities():
    model = small(method="softmax", position="rotary")
    draws = [list(generate(model, PROMPT, 9, seed=seed)) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert draws[0] == list(generate(model, PROMPT, 9, seed=1, cache=False))
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    counts = torch.zeros(4)
    for _ in range(2000):
        counts[choose(logits, 1.0, 1.0, generator)] += 1
    torch.testing.assert_close(counts / 2000, logits.exp(), atol=0.04, rtol=0)
    assert {choose(logits, 1.0, 0.8, generator) for _ in range(200)} == {0, 1}
    assert {choose(logits, 1.0, 0.81, generator) for _ in range(300)} == {0, 1, 2}
    assert {choose(logits, 1.0, 1.0, generator, top_k=2) for _ in range(200)} == {0, 1}
    # Of the three that top_k leaves, the first has 0.5 / 0.95 = 0.526.
    assert {choose(logits, 1.0, 0.52, generator, top_k=3) for _ in range(200)} == {0}
    assert {choose(logits, 1.0, 0.53, generator, top_k=3) for _ in range(200)} == {0, 1}
    assert {choose(logits, 1.0, 1.0, generator, top_k=99) for _ in range(500)} == {0, 1, 2, 3}
    assert {choose(logits, 1.0, 1e-9, generator) for _ in range(50)} == {0}
    assert {choose(logits, 1e-4, 1.0, generator) for _ in range(50)} == {0} == {choose(logits, 0, 1.0, generator)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_tokens": 0}, "max_tokens must be a whole number, 1 or more, got 0"),
        ({"temperature": -1.0}, "temperature must be 0 or more"),
        ({"temperature": float("nan")}, "temperature must be 0 or more"),
        ({"top_k": 0}, "top_k must be a whole number, 1 or more, got 0"),
        ({"top_k": 2.5}, "top_k must be a whole number, 1 or more, got 2.5"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1"),
        ({"prompt": []}, "The prompt has no tokens"),
        ({"prompt": [1] * 31}, "has 31 tokens, and this model .*'relative'.* has places for 31 in all; shorten"),
        ({"recurrent": True}, "recurrent=True is not possible"),
    ],
)
def test_mistakes_are_said_before_the_first_token(changes, words):
    arguments = {"prompt": PROMPT, "max_tokens": 3} | changes
    with pytest.raises(ValueError, match=words):
        generate(small(position="relative"), arguments.pop("prompt"), arguments.pop("max_tokens"), **arguments)
    with pytest.raises(ValueError, match="causal models of tokens"):
        generate(small(causal=False), PROMPT, 3)


@pytest.mark.parametrize(("method", "per_pair"), [("softmax", 8 + 6), ("linear", 8 + 6), ("hyla", 8 + 6 + 6)])
def test_counted_flops_are_what_torch_counts(method, per_pair):
    model = small(method=method, position="rotary")
    length, batch = 13, 2
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(batch, length, dtype=torch.long))
    # The reference forms all pairs, the count of a causal model those that it sees: (T+1)/2 of T keys on average.
    unseen = model.config.num_layers * per_pair * length * (length - 1) // 2
    assert counter.get_total_flops() == batch * (forward_flops(model.config, length) + 2 * unseen)
