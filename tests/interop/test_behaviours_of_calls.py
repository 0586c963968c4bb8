"""What a call of a Hugging Face model is expected to do, tried on the library's Llama and on ours.

`docs/huggingface.md` has a row for each of these tests.
"""

import copy
import inspect

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache

from tests.support.hf_models import HEADS, KINDS, LAYERS, VOCABULARY, WIDTH, close, model, tokens

pytestmark = pytest.mark.parametrize("kind", KINDS)
HEADED = ("base", "lm", "labels")


@torch.no_grad()
def test_the_same_call_twice_gives_the_same(kind):
    for head in HEADED:
        one = model(kind, head)
        assert torch.equal(one(tokens())[0], one(tokens())[0])


@torch.no_grad()
def test_a_row_alone_gives_what_it_gives_in_a_batch(kind):
    for head in HEADED:
        one = model(kind, head)
        close(one(tokens())[0][:1], one(tokens()[:1])[0])


def test_input_ids_come_first(kind):
    for head in HEADED:
        one = model(kind, head)
        assert next(iter(inspect.signature(one.forward).parameters)) == "input_ids"
        assert one.main_input_name == "input_ids"


@torch.no_grad()
def test_a_tuple_has_the_outputs_in_order(kind):
    options = {"output_hidden_states": True, "output_attentions": True}
    for head in HEADED:
        one = model(kind, head)
        whole, parts = one(tokens(), **options), one(tokens(), **options, return_dict=False)
        assert isinstance(parts, tuple) and len(parts) == 4
        assert torch.equal(parts[0], whole[0]) and torch.equal(parts[2][1], whole.hidden_states[1])
        assert torch.equal(parts[3][-1], whole.attentions[-1])


@torch.no_grad()
def test_attentions(kind):
    """One tensor (B, H, T, T) for each layer, by argument and by configuration, and nothing unless asked for."""
    asked, configured = model(kind), model(kind, output_attentions=True)
    assert asked(tokens()).attentions is None
    for found in (asked(tokens(), output_attentions=True), configured(tokens())):
        assert [tuple(part.shape) for part in found.attentions] == [(2, HEADS, 7, 7)] * LAYERS
        for part in found.attentions:
            assert (part.triu(1) == 0).all() and (part.tril() != 0).any()
            if kind in ("llama", "softmax"):
                close(part.sum(-1), torch.ones(2, HEADS, 7))
    close(asked(tokens(), output_attentions=True).logits, asked(tokens()).logits)


@torch.no_grad()
def test_hidden_states(kind):
    """The embeddings, and what each layer gives; the last one normalised, as the base model returns it."""
    one = model(kind)
    for found in (one(tokens(), output_hidden_states=True), model(kind, output_hidden_states=True)(tokens())):
        assert [tuple(part.shape) for part in found.hidden_states] == [(2, 7, WIDTH)] * (LAYERS + 1)
        close(found.hidden_states[0], one.get_input_embeddings()(tokens()))
        close(found.hidden_states[-1], one.base_model(tokens()).last_hidden_state)
    assert one(tokens()).hidden_states is None


@torch.no_grad()
def test_hidden_states_of_chosen_layers(kind):
    found, every = (model(kind)(tokens(), output_hidden_states=wanted).hidden_states for wanted in ([1], True))
    assert len(found) == LAYERS and found[0] is None and found[2] is None
    assert torch.equal(found[1], every[2])


def test_gradients_of_hidden_states_and_attentions(kind):
    found = model(kind)(tokens(), output_hidden_states=True, output_attentions=True)
    parts = [*found.hidden_states[:-1], *found.attentions]
    for part in parts:
        part.retain_grad()
    found.logits.square().sum().backward()
    assert all(part.grad.abs().sum() > 0 for part in parts)


@torch.no_grad()
def test_inputs_embeds_stand_for_their_tokens(kind):
    for head in HEADED:
        one = model(kind, head)
        close(one(inputs_embeds=one.get_input_embeddings()(tokens()))[0][:, -1], one(tokens())[0][:, -1])


def test_tokens_and_embeddings_together_are_refused(kind):
    one = model(kind)
    for inputs in ({}, {"input_ids": tokens(), "inputs_embeds": one.get_input_embeddings()(tokens())}):
        with pytest.raises(ValueError, match=r"inputs_embeds"):
            one(**inputs)


@torch.no_grad()
def test_padding_changes_nothing(kind):
    """On either side, in logits of the tokens themselves; a mask without padding is no mask."""
    one = model(kind)
    plain = one(tokens()).logits
    close(one(tokens(), attention_mask=torch.ones(2, 7)).logits, plain)
    filler, on, off = torch.full((2, 3), 5), torch.ones(2, 7).long(), torch.zeros(2, 3).long()
    right = one(torch.cat((tokens(), filler), 1), attention_mask=torch.cat((on, off), 1))
    close(right.logits[:, :7], plain)
    positions = torch.cat((off, torch.arange(7).expand(2, -1)), 1)
    for options in ({}, {"position_ids": positions}):
        left = one(torch.cat((filler, tokens()), 1), attention_mask=torch.cat((off, on), 1), **options)
        close(left.logits[:, 3:], plain)


@torch.no_grad()
def test_masks_of_pairs(kind):
    """(B, 1, T, T), boolean or floating: three rows that share their first tokens, folded into one."""
    one = model(kind)
    ids, positions = torch.tensor([[7, 8, 9, 4, 9, 5, 9, 6]]), torch.tensor([[0, 1, 2, 3, 2, 3, 2, 3]])
    sees = torch.zeros(8, 8)
    for row, past in enumerate(
        ([0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 1, 4, 5], [0, 1, 6], [0, 1, 6, 7])
    ):
        sees[row, past] = 1
    rows = torch.tensor([[7, 8, 9, 4], [7, 8, 9, 5], [7, 8, 9, 6]])
    expected = one(rows).logits[:, -1]
    lowest = torch.finfo(torch.float32).min
    for mask in (sees.bool(), (1 - sees) * lowest):
        if kind == "llama" and mask.dtype == torch.bool:
            continue  # its eager attention adds the mask to the scores
        found = one(ids, attention_mask=mask[None, None], position_ids=positions).logits[0, [3, 5, 7]]
        close(found, expected)


@torch.no_grad()
def test_positions_are_heeded(kind):
    """A step of two between tokens is another text; a common shift is none."""
    one, places = model(kind), torch.arange(7).expand(2, -1)
    plain = one(tokens()).logits
    close(one(tokens(), position_ids=places).logits, plain)
    close(one(tokens(), position_ids=places + 5).logits, plain, 1e-3)
    spread = one(tokens(), position_ids=2 * places, attention_mask=torch.ones(2, 7).long()).logits
    assert (spread - plain).abs().max() > 1e-4


@torch.no_grad()
def test_sequences_packed_into_a_row(kind):
    """Positions that begin anew: the sequences do not see each other."""
    one = model(kind)
    packed = one(
        torch.cat((tokens()[:1, :4], tokens()[1:]), 1),
        position_ids=torch.cat((torch.arange(4), torch.arange(7)))[None],
        use_cache=False,
    ).logits
    close(packed[:, :4], one(tokens()[:1, :4]).logits)
    close(packed[:, 4:], one(tokens()[1:]).logits)


@torch.no_grad()
def test_logits_of_chosen_positions(kind):
    one = model(kind)
    every = one(tokens()).logits
    assert one(tokens(), logits_to_keep=1).logits.shape == (2, 1, VOCABULARY)
    close(one(tokens(), logits_to_keep=3).logits, every[:, -3:])
    close(one(tokens(), logits_to_keep=torch.tensor([1, 4])).logits, every[:, [1, 4]])
    chosen = torch.tensor([[1, 2], [6, 0]])
    close(one(tokens(), logits_to_keep=chosen).logits, torch.stack([every[0, [1, 2]], every[1, [6, 0]]]))
    seen = torch.rand(2, 7, generator=torch.Generator().manual_seed(1)) > 0.5
    close(one(tokens(), logits_to_keep=seen).logits, every[seen])


@torch.no_grad()
def test_a_cache_is_returned_as_configured(kind):
    assert model(kind)(tokens()).past_key_values.get_seq_length() == 7
    assert model(kind)(tokens(), use_cache=False).past_key_values is None
    assert model(kind, use_cache=False)(tokens()).past_key_values is None
    assert model(kind, use_cache=False)(tokens(), use_cache=True).past_key_values is not None


def test_a_cache_has_keys_and_values_of_each_layer(kind):
    cache = model(kind)(tokens(), use_cache=True).past_key_values
    assert len(cache) == LAYERS and cache.get_seq_length() == 7
    for layer in cache.layers:
        assert layer.keys.shape == layer.values.shape == (2, HEADS, 7, WIDTH // HEADS)


@torch.no_grad()
def test_a_text_in_parts_is_the_text(kind):
    """Token by token and in pieces, from our cache and from the library's, with and without padding."""
    one = model(kind)
    mask = torch.ones(2, 7).long()
    mask[0, :2] = 0
    for made in (lambda: None, lambda: DynamicCache(config=one.config), lambda: StaticCache(one.config, 16)):
        for seen in (torch.ones(2, 7).long(), mask):
            whole, cache, found = one(tokens(), attention_mask=seen).logits, made(), []
            for start, stop in ((0, 3), (3, 4), (4, 7)):
                options = {"attention_mask": seen[:, :stop], "past_key_values": cache, "use_cache": True}
                step = one(tokens()[:, start:stop], **options)
                cache = step.past_key_values
                found.append(step.logits)
            close(torch.cat(found, 1)[seen == 1], whole[seen == 1])


@torch.no_grad()
def test_attentions_of_a_text_in_parts(kind):
    one = model(kind)
    whole = one(tokens(), output_attentions=True).attentions
    first = one(tokens()[:, :4], output_attentions=True)
    rest = one(tokens()[:, 4:], output_attentions=True, past_key_values=first.past_key_values).attentions
    for layer in range(LAYERS):
        close(rest[layer], whole[layer][:, :, 4:])


def test_gradients_through_a_cache(kind):
    """A loss on later tokens reaches what the cache was made from, as prefix tuning needs."""
    one = model(kind)
    embedded = one.get_input_embeddings()(tokens()).detach().requires_grad_()
    first = one(inputs_embeds=embedded[:, :4], use_cache=True)
    parts = one(inputs_embeds=embedded[:, 4:], past_key_values=first.past_key_values).logits
    (found,) = torch.autograd.grad(parts.square().sum(), embedded)
    (expected,) = torch.autograd.grad(one(inputs_embeds=embedded).logits[:, 4:].square().sum(), embedded)
    close(found, expected)


@torch.no_grad()
def test_embeddings_can_be_got_and_set(kind):
    for head in HEADED:
        one = model(kind, head)
        assert isinstance(one.get_input_embeddings(), nn.Embedding)
        new = nn.Embedding(VOCABULARY, WIDTH)
        one.set_input_embeddings(new)
        assert one.get_input_embeddings() is new
    one = model(kind)
    assert isinstance(one.get_output_embeddings(), nn.Linear)
    assert one.get_output_embeddings().weight is one.get_input_embeddings().weight
    before = one(tokens()).logits
    one.set_output_embeddings(nn.Linear(WIDTH, 11, bias=False))
    assert one(tokens()).logits.shape == (2, 7, 11) and before.shape == (2, 7, VOCABULARY)


@torch.no_grad()
def test_heads_have_a_base_model(kind):
    for head in ("lm", "labels"):
        one = model(kind, head)
        assert one.base_model is not one and one.base_model is one.get_decoder()
        assert isinstance(one.base_model, type(model(kind, "base")))
        assert one.base_model(tokens()).last_hidden_state.shape == (2, 7, WIDTH)


@torch.no_grad()
def test_copies_and_dtypes(kind):
    one = model(kind)
    expected = one(tokens()).logits
    assert torch.equal(copy.deepcopy(one)(tokens()).logits, expected)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        found = copy.deepcopy(one).to(dtype)(tokens()).logits
        assert found.dtype == dtype
        close(found.float(), expected, 0.1)
