"""What `generate` is expected to do, tried on the library's Llama and on ours.

`docs/huggingface.md` has a row for each of these tests.
"""

import copy

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, LogitsProcessorList, StaticCache
from transformers.generation import BaseStreamer, MinLengthLogitsProcessor

from headcode.interop import HeadcodeCache
from tests.support.hf_models import HEADS, KINDS, LAYERS, VOCABULARY, WIDTH, close, model, tokens

pytestmark = pytest.mark.parametrize("kind", KINDS)
NEW = 5


def lively(kind, **changes):
    """A model with larger weights, whose greedy texts are not one token over and over."""
    one = model(kind, **changes)
    with torch.no_grad():
        for parameter in one.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3 if kind == "llama" else 2)
    return one


def greedy(one, ids=None, **options):
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    return one.generate(tokens() if ids is None else ids, **options)


def test_greedy_texts_are_those_of_single_steps(kind):
    one, ids = lively(kind), tokens()
    for _ in range(NEW):
        ids = torch.cat((ids, one(ids).logits[:, -1:].argmax(-1)), 1)
    assert one.can_generate()
    for use_cache in (True, False):
        assert torch.equal(greedy(one, use_cache=use_cache), ids)


@pytest.mark.parametrize("way", [{}, {"do_sample": True}, {"num_beams": 2}, {"num_beams": 2, "do_sample": True}])
def test_all_that_was_asked_for_is_returned(kind, way):
    """Scores, logits, attentions, hidden states and the cache, greedy, drawn and with beams."""
    asked = dict.fromkeys(("output_scores", "output_logits", "output_attentions", "output_hidden_states"), True)
    torch.manual_seed(1)
    found = greedy(lively(kind), **way, **asked, return_dict_in_generate=True)
    rows = 2 * way.get("num_beams", 1)
    assert found.sequences.shape == (2, 7 + NEW)
    assert [tuple(part.shape) for part in found.scores] == [(rows, VOCABULARY)] * NEW
    assert len(found.logits) == len(found.attentions) == len(found.hidden_states) == NEW
    for step, (codes, states) in enumerate(zip(found.attentions, found.hidden_states, strict=True)):
        length = 7 if step == 0 else 1
        assert [tuple(part.shape) for part in codes] == [(rows, HEADS, length, 7 + step)] * LAYERS
        assert [tuple(part.shape) for part in states] == [(rows, length, WIDTH)] * (LAYERS + 1)
    assert found.past_key_values.get_seq_length() == 7 + NEW - 1
    for layer in found.past_key_values.layers:
        assert layer.keys.shape == (rows, HEADS, 7 + NEW - 1, WIDTH // HEADS)


def test_draws_follow_the_seed(kind):
    one, drawn = lively(kind), []
    for seed, use_cache in ((1, True), (1, False), (2, True)):
        torch.manual_seed(seed)
        options = {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.2, "num_return_sequences": 3}
        drawn.append(greedy(one, **options, use_cache=use_cache))
    assert drawn[0].shape == (6, 7 + NEW)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_beams_with_and_without_a_cache(kind):
    one = lively(kind)
    for options in ({"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 2.0}):
        assert torch.equal(greedy(one, **options), greedy(one, **options, use_cache=False))


def test_padding_on_the_left_changes_no_text(kind):
    one = lively(kind)
    plain = greedy(one)[:, 7:]
    padded = torch.cat((torch.zeros(2, 3).long(), tokens()), 1)
    mask = (padded != 0).long()
    for options in ({"attention_mask": mask}, {"attention_mask": mask, "num_beams": 1, "use_cache": False}, {}):
        # Without a mask, padding is found by its token.
        assert torch.equal(greedy(one, padded, **options)[:, 10:], plain)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    assert torch.equal(greedy(one, padded, attention_mask=mask, position_ids=positions)[:, 10:], plain)


def test_prompts_as_embeddings(kind):
    one = lively(kind)
    embedded = one.get_input_embeddings()(tokens()).detach()
    for options in ({}, {"num_beams": 2}):
        expected = greedy(one, **options)
        assert torch.equal(greedy(one, inputs_embeds=embedded, **options), expected)
        found = one.generate(inputs_embeds=embedded, max_new_tokens=NEW, do_sample=False, **options)
        assert torch.equal(found, expected[:, 7:])


def test_a_text_goes_on_from_its_cache(kind):
    """From tokens and from embeddings; a copied cache goes on by itself."""
    one = lively(kind)
    whole = greedy(one, max_new_tokens=2 * NEW)
    first = greedy(one, return_dict_in_generate=True)
    mask = torch.ones_like(first.sequences)
    for cache in (copy.deepcopy(first.past_key_values), first.past_key_values):
        assert torch.equal(greedy(one, first.sequences, attention_mask=mask, past_key_values=cache), whole)


def test_caches_of_the_library(kind):
    one = lively(kind)
    expected = greedy(one)
    for implementation in ("dynamic", "static", "offloaded"):
        if implementation == "offloaded" and not torch.cuda.is_available():
            continue  # on a CPU there is nowhere to move it to
        assert torch.equal(greedy(one, cache_implementation=implementation), expected)
    for cache in (DynamicCache(config=one.config), StaticCache(one.config, 7 + NEW)):
        assert torch.equal(greedy(one, past_key_values=cache), expected)
        assert cache.get_seq_length() == 7 + NEW - 1
    mask = (torch.cat((torch.zeros(2, 3).long(), tokens()), 1) != 0).long()
    padded = tokens(2, 10) * mask
    expected = greedy(one, padded, attention_mask=mask)
    assert torch.equal(greedy(one, padded, attention_mask=mask, cache_implementation="static"), expected)


@pytest.mark.parametrize("assistant", ["same", "other"])
def test_assisted_decoding_is_greedy_decoding(kind, assistant):
    one = lively(kind)
    helper = one if assistant == "same" else lively(kind, num_hidden_layers=1)
    helper.generation_config.num_assistant_tokens = 3
    ids = tokens(1)
    found = greedy(one, ids, assistant_model=helper, max_new_tokens=12, return_dict_in_generate=True)
    assert torch.equal(found.sequences, greedy(one, ids, max_new_tokens=12))
    assert found.past_key_values.get_seq_length() == 7 + 12 - 1
    torch.manual_seed(3)
    drawn = greedy(one, ids, assistant_model=helper, do_sample=True, max_new_tokens=6)
    assert drawn.shape == (1, 13)


def test_prompt_lookup_is_greedy_decoding(kind):
    one, ids = lively(kind), tokens(1, 4).repeat(1, 3)
    found = greedy(one, ids, prompt_lookup_num_tokens=3, max_new_tokens=12)
    assert torch.equal(found, greedy(one, ids, max_new_tokens=12))
    end = int(found[0, 14])
    stopped = greedy(one, ids, prompt_lookup_num_tokens=3, max_new_tokens=12, eos_token_id=end)
    assert stopped[0, -1] == end and stopped.shape[1] <= 15


def test_texts_end_at_their_end_token(kind):
    one = lively(kind)
    plain = greedy(one)
    end = int(plain[0, 8])
    found = greedy(one, eos_token_id=end, pad_token_id=0)
    after = (plain[0, 7:] == end).nonzero()[0, 0] + 8
    assert torch.equal(found[0, :after], plain[0, :after]) and (found[0, after:] == 0).all()


def test_processors_of_logits(kind):
    one = lively(kind)
    first = int(greedy(one)[0, 7])
    assert first not in greedy(one, bad_words_ids=[[first]])[0, 7:]
    found = greedy(one, repetition_penalty=10.0, no_repeat_ngram_size=1, remove_invalid_values=True)
    assert all(len(set(row)) == NEW for row in found[:, 7:].tolist())
    processors = LogitsProcessorList([MinLengthLogitsProcessor(7 + NEW, first)])
    assert first not in greedy(one, logits_processor=processors)[0, 7:]


def test_streamers_get_each_token(kind):
    class Seen(BaseStreamer):
        def __init__(self):
            self.found = []

        def put(self, value):
            self.found += value.flatten().tolist()

        def end(self):
            self.found.append(None)

    seen = Seen()
    expected = greedy(lively(kind), tokens(1), streamer=seen)
    assert seen.found == [*expected[0].tolist(), None]


def test_a_text_from_nothing(kind):
    one = lively(kind)
    found = one.generate(max_new_tokens=NEW, do_sample=False)
    assert torch.equal(found, greedy(one, torch.tensor([[1]]))) and found.shape == (1, 1 + NEW)


def test_logits_to_keep_changes_no_text(kind):
    one = lively(kind)
    assert torch.equal(greedy(one, logits_to_keep=0), greedy(one))


def test_long_prompts_in_pieces(kind):
    one = lively(kind)
    for options in ({}, {"cache_implementation": "static"}):
        assert torch.equal(greedy(one, prefill_chunk_size=3, **options), greedy(one))


def test_mistyped_arguments_are_named(kind):
    with pytest.raises(ValueError, match="max_new_tokns"):
        greedy(model(kind), max_new_tokns=3)


def test_a_cache_goes_back(kind):
    """Cropped, reordered, selected and repeated, it goes on as if it had never been further."""
    one = lively(kind)
    caches = [DynamicCache(config=one.config)]
    if kind != "llama":
        caches.append(HeadcodeCache(one, recurrent=False))
    for cache in caches:
        with torch.no_grad():
            one(tokens(), past_key_values=cache)
            cache.crop(-3)
            assert cache.get_seq_length() == 4
            cache.batch_repeat_interleave(2)
            cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
            cache.batch_select_indices(torch.tensor([1, 3]))  # the first row, the second row
            found = one(tokens()[:, 4:], past_key_values=cache).logits
            close(found, one(tokens()).logits[:, 4:])
