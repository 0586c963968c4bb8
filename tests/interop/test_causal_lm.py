"""headcode's models inside Hugging Face's library: saved, loaded, generated from, trained."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from headcode import METHODS, interop
from headcode.interop import HeadcodeCache, HeadcodeConfig, HeadcodeForCausalLM
from headcode.nn import FastWeightState, ModelConfig, Transformer, generate, transformer
from headcode.nn.decoding import decode_compiled
from tests.support.models import DECODER

SIZES = DECODER | {"max_length": 40}


def pair(end_token=None, **changes):
    torch.manual_seed(5)
    ours = Transformer(ModelConfig(**(SIZES | {"position": "rotary"} | changes))).double().eval()
    return ours, HeadcodeForCausalLM.from_transformer(ours, end_token)


WIDTHS = {"dim": 48, "qk_dim": 32, "v_dim": 16, "mlp_dim": 80, "backend": "auto", "output_dim": 23}


def served(method, position="rotary"):
    """A model in float32 that the decoding kernel serves, and it in Hugging Face's library."""
    ours = pair(method=method, position=position, **WIDTHS)[0].float()
    return ours, HeadcodeForCausalLM.from_transformer(ours)


@pytest.fixture
def compiled(monkeypatch):
    """Whether each pass with a cache so far was one call of the decoding kernel, in order."""
    passes = []

    def watched(*arguments):
        logits = decode_compiled(*arguments)
        passes.append(logits is not None)
        return logits

    monkeypatch.setattr(transformer, "decode_compiled", watched)
    return passes


@pytest.mark.parametrize("position", ["rotary", "relative", "none", "learned"])
@pytest.mark.parametrize("method", ["softmax", "linear", "hyla"])
def test_the_librarys_loop_decodes_by_the_kernel(method, position, compiled):
    """Batches, beams and prompts of different lengths: the tokens of whole passes without a cache."""
    _, theirs = served(method, position)
    prompts, choices = tokens(), {"max_new_tokens": 12, "do_sample": False}
    mask = torch.ones_like(prompts)
    if position != "learned":
        mask[0, :5] = mask[2, :2] = 0
    for options in ({}, {"num_beams": 3}, {"attention_mask": mask}, {"attention_mask": mask, "num_beams": 2}):
        compiled.clear()
        found = theirs.generate(prompts, **choices, **options)
        assert all(compiled) and len(compiled) == 12
        assert torch.equal(found, theirs.generate(prompts, **choices, **options, use_cache=False))
    for seed in (1, 2):
        drawn = []
        for use_cache in (True, False):
            torch.manual_seed(seed)
            drawn.append(theirs.generate(prompts, max_new_tokens=9, do_sample=True, top_k=9, use_cache=use_cache))
        assert torch.equal(*drawn)


def test_the_librarys_loop_sees_hooks_and_new_weights(compiled):
    _, theirs = served("hyla")
    options = {"max_new_tokens": 6, "do_sample": False}
    before = theirs.generate(tokens(), **options)
    for parameter in theirs.parameters():
        parameter.data.mul_(-1)
    after = theirs.generate(tokens(), **options)
    assert all(compiled) and not torch.equal(before, after)
    assert torch.equal(after, theirs.generate(tokens(), **options, use_cache=False))
    compiled.clear()
    seen = []
    theirs.transformer.blocks[0].attention.key_proj.register_forward_hook(lambda *arguments: seen.append(1))
    assert torch.equal(after, theirs.generate(tokens(), **options))
    assert len(seen) == 6 and not any(compiled)


def tokens(batch=3, length=7):
    return torch.randint(0, 23, (batch, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("position", ["rotary", "relative"])
@pytest.mark.parametrize("method", METHODS)
def test_generate_is_ours(method, position):
    ours, theirs = pair(method=method, position=position)
    prompts = tokens()
    found = theirs.generate(prompts, max_new_tokens=15, do_sample=False)
    for prompt, row in zip(prompts.tolist(), found[:, 7:].tolist(), strict=True):
        assert row == list(generate(ours, prompt, 15, temperature=0))
    assert torch.equal(found, theirs.generate(prompts, max_new_tokens=15, do_sample=False, use_cache=False))


@pytest.mark.parametrize("method", ["hyla", "linear"])
def test_beams_and_padding(method):
    _, theirs = pair(method=method)
    prompts = tokens()
    beams = [theirs.generate(prompts, max_new_tokens=8, num_beams=3, use_cache=c) for c in (True, False)]
    assert torch.equal(*beams)
    plain = theirs.generate(prompts, max_new_tokens=12, do_sample=False)
    padded = torch.cat([torch.full((3, 4), 22), prompts], 1)
    mask = torch.cat([torch.zeros(3, 4), torch.ones(3, 7)], 1).long()
    found = theirs.generate(padded, attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert torch.equal(found[:, 11:], plain[:, 7:])
    keys = HeadcodeCache(theirs, recurrent=False)  # keys and values where a state would do
    found = theirs.generate(padded, attention_mask=mask, max_new_tokens=12, do_sample=False, past_key_values=keys)
    assert torch.equal(found[:, 11:], plain[:, 7:])


@pytest.mark.parametrize("position", ["rotary", "relative"])
@pytest.mark.parametrize("method", ["hyla", "linear", "softmax"])
def test_prompts_of_different_lengths_in_one_batch(method, position):
    """Padded on the left to one length, each goes on as it would alone."""
    ours, theirs = pair(method=method, position=position)
    lengths = (2, 7, 5)
    prompts = [row[-length:].tolist() for row, length in zip(tokens(), lengths, strict=True)]
    padded = torch.tensor([[0] * (7 - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (7 - length) + [1] * length for length in lengths])
    for use_cache in (True, False):
        found = theirs.generate(padded, attention_mask=mask, max_new_tokens=12, do_sample=False, use_cache=use_cache)
        for prompt, row in zip(prompts, found[:, 7:].tolist(), strict=True):
            assert row == list(generate(ours, prompt, 12, temperature=0))


@pytest.mark.parametrize("method", ["hyla", "linear"])
def test_draws_with_a_cache_are_draws_without(method):
    _, theirs = pair(method=method)
    draws = []
    for seed, use_cache in ((1, True), (1, False), (2, True)):
        torch.manual_seed(seed)
        options = {"do_sample": True, "temperature": 1.3, "top_p": 0.9, "num_return_sequences": 2}
        draws.append(theirs.generate(tokens(), max_new_tokens=12, use_cache=use_cache, **options))
    assert draws[0].shape == (6, 19) and torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_draws_follow_the_models_probabilities():
    ours, theirs = pair(method="linear")
    prompt = tokens(1)
    with torch.no_grad():
        expected = torch.softmax(ours(prompt)[0, -1], -1)
    torch.manual_seed(0)
    drawn = theirs.generate(prompt.expand(4000, -1), max_new_tokens=1, do_sample=True, top_k=0)[:, -1]
    shares = torch.bincount(drawn, minlength=23).double() / 4000
    assert ((shares - expected).abs() <= 5 * (expected * (1 - expected) / 4000).sqrt()).all()


def test_the_cache_of_linear_attention_is_a_state():
    ours, theirs = pair(method="linear")
    cache = HeadcodeCache(theirs)
    assert all(isinstance(layer, FastWeightState) for layer in cache.decoding.layers)
    with torch.no_grad():
        first = theirs(tokens()[:, :5], past_key_values=cache)
        rest = theirs(tokens()[:, 5:], past_key_values=first.past_key_values, logits_to_keep=1)
        torch.testing.assert_close(rest.logits, ours(tokens())[:, -1:])
    assert cache.get_seq_length() == 7 and rest.logits.shape == (3, 1, 23)


@pytest.mark.parametrize("position", ["rotary", "relative", "learned"])
def test_saved_and_loaded_by_the_auto_classes(tmp_path, position):
    _, model = pair(end_token=4, position=position, method="hyla", share_layers=True, qk_norm=True)
    model.save_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, HeadcodeConfig) and config.to_model_config() == model.transformer.config
    assert (config.hidden_size, config.num_attention_heads, config.eos_token_id) == (10, 2, 4)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, HeadcodeForCausalLM) and loaded.dtype == torch.float64
    for (name, one), (other_name, other) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert name == other_name and torch.equal(one, other)
    # Buffers that no file holds are there too; the same weights at other addresses may be added in another order.
    torch.testing.assert_close(loaded(tokens()).logits, model(tokens()).logits, rtol=1e-13, atol=1e-13)


def test_another_process_needs_one_import(tmp_path):
    pair()[1].save_pretrained(tmp_path)
    code = (
        "import sys, headcode; assert 'transformers' not in sys.modules; import headcode.interop.causal_lm;"
        "from transformers import AutoModelForCausalLM;"
        f"print(AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}).model.config.vocab_size)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "23", done.stderr


def test_new_weights_are_made_as_ours():
    sizes = {name: size for name, size in SIZES.items() if name != "max_length"}
    model = HeadcodeForCausalLM(HeadcodeConfig(**(sizes | {"dim": 256, "position": "relative"}))).transformer
    assert model.embedding.weight.std().item() == pytest.approx(1 / 16, rel=0.05)
    assert model.blocks[0].feedforward.gate_proj.weight.std().item() == pytest.approx(1 / 16, rel=0.05)
    assert model.blocks[0].attention.relative_bias.buckets[:5].tolist() == [0, 1, 2, 3, 4]
    assert model.config.max_length == 128


def test_the_loss_is_of_the_next_token():
    _, theirs = pair()
    labels = tokens()
    labels[0, 3] = -100
    out = theirs(tokens(), labels=labels)
    logs = out.logits.log_softmax(-1)
    picked = [-logs[b, t - 1, labels[b, t]] for b in range(3) for t in range(1, 7) if labels[b, t] >= 0]
    torch.testing.assert_close(out.loss.double(), sum(picked) / 17, rtol=1e-6, atol=0)
    whole = theirs(tokens(), labels=labels, num_items_in_batch=34)
    torch.testing.assert_close(whole.loss, out.loss / 2)
    (logits,) = theirs(tokens(), return_dict=False)
    assert torch.equal(logits, out.logits)


def test_a_vocabulary_that_grows(tmp_path):
    """Tokens that were added to a tokenizer are read and predicted, and saved with the rest."""
    _, theirs = pair(method="hyla")
    before = theirs(tokens()).logits
    theirs.resize_token_embeddings(29, mean_resizing=False)
    grown = theirs(torch.full((1, 3), 28)).logits
    assert grown.shape == (1, 3, 29)
    torch.testing.assert_close(theirs(tokens()).logits[..., :23], before)
    theirs.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.vocab_size == loaded.transformer.config.vocab_size == 29
    torch.testing.assert_close(loaded(torch.full((1, 3), 28)).logits, grown)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        row = (torch.arange(9) + index) % 5
        return {"input_ids": row, "labels": row}


def test_the_librarys_trainer(tmp_path):
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if name != "max_length"}
    model = HeadcodeForCausalLM(HeadcodeConfig(**sizes, position="rotary", attention_dropout=0.1))
    settings = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=25,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=0.03,
        logging_steps=5,
        save_steps=25,
        report_to=[],
        use_cpu=True,
        seed=1,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=Rows())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.5 * losses[0]
    saved = tmp_path / "run" / "checkpoint-25"
    assert (saved / "model.safetensors").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    assert loaded.generate(torch.tensor([[0, 1, 2]]), max_new_tokens=4, do_sample=False)[0].tolist() == [
        0,
        1,
        2,
        3,
        4,
        0,
        1,
    ]
    assert json.loads((saved / "config.json").read_text())["model_type"] == "headcode"


def test_mistakes_are_sentences():
    _, band = pair(position="relative")
    with pytest.raises(ValueError, match="has places for 40 tokens, got 41"):
        band.generate(tokens(1, 36), max_new_tokens=10, do_sample=False)
    with pytest.raises(ValueError, match="must be a HeadcodeCache or a cache .*, got list"):
        band(tokens(), past_key_values=[])
    with pytest.raises(ValueError, match="needs a causal model of tokens"):
        HeadcodeForCausalLM(HeadcodeConfig(causal=False))
    _, learned = pair(position="learned")
    mask = torch.ones(3, 7).long()
    mask[1, 0] = 0
    with pytest.raises(ValueError, match="Padding on the left would shift"):
        learned(tokens(), attention_mask=mask)
    with pytest.raises(AttributeError, match="no attribute 'HeadcodeForChess'"):
        _ = interop.HeadcodeForChess
