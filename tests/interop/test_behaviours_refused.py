"""What the library's Llama does and ours does not, each with its sentence; and that nothing is ignored in silence.

`docs/huggingface.md` has a row for each case of REFUSED.
"""

import json

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache, EncoderDecoderCache
from transformers.integrations.executorch import convert_and_export_with_cache

from headcode.interop import HeadcodeCache, HeadcodeConfig
from tests.support.hf_models import METHODS, close, config, model, model_class, tokens


def export_with_a_cache(kind):
    one = model(kind)
    one.generation_config.cache_implementation = "static"
    one.generation_config.cache_config = {"batch_size": 1, "max_cache_len": 16}
    convert_and_export_with_cache(one, strict=False)


BIAS = torch.zeros(1, 1, 7, 7).masked_fill(torch.ones(7, 7).triu(1).bool(), torch.finfo(torch.float32).min)

REFUSED = {
    "attention by another implementation": (
        lambda kind: model_class(kind)._from_config(config(kind), attn_implementation="sdpa"),
        "compute attention in kernels of their own: leave attn_implementation out",
    ),
    "another implementation of attention later": (
        lambda kind: model(kind).set_attn_implementation("sdpa"),
        "compute attention in kernels of their own: leave attn_implementation out",
    ),
    "masks that are added to scores": (
        lambda kind: model(kind)(tokens(), attention_mask=BIAS - 0.5 * (BIAS == 0)),
        r"must be 0 \(kept\) or its dtype's lowest number \(masked\) everywhere",
    ),
    "continuous batching": (
        lambda kind: model(kind).init_continuous_batching(),
        "no paged cache for continuous batching: call generate with a padded batch",
    ),
    "fewer heads for keys and values": (
        lambda kind: config(kind, num_key_value_heads=2),
        "have no num_key_value_heads: leave them out",
    ),
    "scaled rotary positions": (
        lambda kind: config(kind, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
        "have no rope_parameters: leave them out",
    ),
    "a cache inside an exported graph": (
        export_with_a_cache,
        "An exported graph of a headcode model keeps no cache: export it with use_cache=False",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_does_and_ours_refuses(case):
    attempt, sentence = REFUSED[case]
    attempt("llama")
    for kind in METHODS:
        with pytest.raises((ValueError, NotImplementedError), match=sentence):
            attempt(kind)


def test_layers_are_not_divided_by_heads(tmp_path):
    assert model("llama").supports_tp_plan and not model("hyla").supports_tp_plan
    assert not model("hyla").supports_pp_plan and not model("hyla").supports_context_parallel
    model("hyla").save_pretrained(tmp_path)
    for options in ({"tp_plan": "auto"}, {"tp_size": 2}):
        with pytest.raises(ValueError, match="A code spans all heads of its layer"):
            AutoModelForCausalLM.from_pretrained(tmp_path, **options)


@pytest.mark.parametrize("kind", METHODS)
def test_nothing_is_ignored_in_silence(kind):
    one = model(kind)
    for options in (
        {"token_type_ids": tokens()},
        {"head_mask": tokens()},
        {"cu_seq_lens_q": tokens()},
        {"is_causal": 1},
    ):
        with pytest.raises(TypeError, match=f"do nothing with '{next(iter(options))}'; leave it out"):
            one(tokens(), **options)
        with pytest.raises(TypeError, match=f"do nothing with '{next(iter(options))}'; leave it out"):
            one.base_model(tokens(), **options)
    for cache in ((), EncoderDecoderCache(DynamicCache(), DynamicCache())):
        with pytest.raises(ValueError, match="past_key_values must be a HeadcodeCache or a cache"):
            one(tokens(), past_key_values=cache)
    with pytest.raises(ValueError, match=r"attention_mask must be \(batch, tokens so far\) or"):
        one(tokens(), attention_mask=torch.ones(2, 7, 7))
    for shape in ((2, 5), (2, 12), (1, 7), (3, 7)):
        with pytest.raises(ValueError, match=r"attention_mask must be \(batch, tokens so far\) = \(2, 7\), got"):
            one(tokens(), attention_mask=torch.ones(shape).long())
    cache = one(tokens(), use_cache=True).past_key_values
    with pytest.raises(
        ValueError, match=r"= \(2, 10\), got \(2, 3\); with a cache it covers the tokens in the cache too"
    ):
        one(tokens()[:, :3], attention_mask=torch.ones(2, 3).long(), past_key_values=cache)
    with pytest.raises(ValueError, match="1 where a token counts and 0 where it is padding, got negative numbers"):
        one(tokens(), attention_mask=torch.zeros(2, 7).masked_fill(tokens() < 9, -1e9))
    with pytest.raises(ValueError, match=r"position_ids must be \(batch, new tokens\) = \(2, 7\), got \(2, 6\)"):
        one(tokens(), position_ids=torch.arange(6).expand(2, -1))
    with pytest.raises(ValueError, match="pack several sequences into a row: call with use_cache=False"):
        one(tokens(), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]]), use_cache=True)
    with pytest.raises(ValueError, match=r"inputs_embeds must be \(batch, length, 32\), got \(2, 7, 9\)"):
        one(inputs_embeds=torch.ones(2, 7, 9))
    with pytest.raises(TypeError, match=r"must be an nn.Embedding, got Linear"):
        one.set_input_embeddings(torch.nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"one entry per logit, got \(2, 6\) for logits \(2, 7, 53\)"):
        one(tokens(), labels=tokens()[:, :6])


def test_a_state_cannot_go_back():
    one = model("linear")
    cache = HeadcodeCache(one)
    one.generate(tokens(), past_key_values=cache, max_new_tokens=2)
    with pytest.raises(ValueError, match="The state of linear attention cannot go back; use HeadcodeCache"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="no keys and values to add to"):
        cache.update(torch.ones(2, 4, 1, 8), torch.ones(2, 4, 1, 8), 0)
    with pytest.raises(ValueError, match="codes are not formed"):
        one(tokens()[:, :1], past_key_values=cache, output_attentions=True)


@torch.no_grad()
@pytest.mark.parametrize("position", ["relative", "relative_learned", "learned", "sinusoidal", "none"])
def test_positions_of_other_kinds(position):
    """The T5 band refuses what it cannot heed; positions that are added to tokens heed everything."""
    one, places = model("hyla", position=position), torch.arange(7).expand(2, -1)
    plain = one(tokens()).logits
    for options in ({}, {"attention_mask": torch.ones(2, 7).long()}):
        if "relative" in position:
            with pytest.raises(ValueError, match="counts tokens in their order"):
                one(tokens(), position_ids=2 * places, attention_mask=torch.ones(2, 7).long())
        else:
            spread = one(tokens(), position_ids=2 * places, **options, use_cache=False).logits
            assert ((spread - plain).abs().max() > 1e-4) == (position != "none" or not options)
    padded, mask = torch.cat((torch.zeros(2, 3).long(), tokens()), 1), torch.ones(2, 10).long()
    mask[:, :3] = 0
    found = one(padded, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    close(found[:, 3:], plain)
    expected = one.generate(tokens(), max_new_tokens=3, do_sample=False)
    found = one.generate(padded, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert torch.equal(found[:, 3:], expected)
    packed = one(tokens().reshape(1, 14), position_ids=places.reshape(1, 14), use_cache=False).logits
    close(packed.reshape(2, 7, -1), plain)


@torch.no_grad()
def test_files_of_the_first_version(tmp_path):
    """Configurations with our names and nothing tied, weights without the base model's level."""
    one = model("hyla", position="learned")
    one.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    for name, former in {v: k for k, v in HeadcodeConfig.attribute_map.items()}.items():
        settings[former] = settings.pop(name)
    del settings["logit_scale"], settings["use_cache"]
    (tmp_path / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": False}))
    weights = load_file(tmp_path / "model.safetensors")
    former = {name.replace("model.transformer.", "model."): weight for name, weight in weights.items()}
    save_file(former, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert loaded.lm_head.weight is loaded.transformer.embedding.weight
    close(loaded(tokens()).logits, one(tokens()).logits, 1e-6)
    loaded.save_pretrained(tmp_path / "again")
    assert set(load_file(tmp_path / "again" / "model.safetensors")) == set(weights)


def test_the_model_card(tmp_path):
    model("hyla").save_pretrained(tmp_path / "mine")
    card = (tmp_path / "mine" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\ntags: [headcode, hyla]\n") and "# mine" in card
    assert "pipeline_tag: text-generation" in card and "| heads | 4 |" in card
    (tmp_path / "mine" / "README.md").write_text("words of its author")
    model("hyla").save_pretrained(tmp_path / "mine")
    assert (tmp_path / "mine" / "README.md").read_text() == "words of its author"
