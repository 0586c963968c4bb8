"""What loading, saving and changing a Hugging Face model are expected to do, tried on the library's Llama and on ours.

`docs/huggingface.md` has a row for each of these tests.
"""

import json
import pickle

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.support.hf_models import KINDS, LAYERS, VOCABULARY, WIDTH, close, config, model, model_class, tokens

pytestmark = pytest.mark.parametrize("kind", KINDS)
HEADED = {"base": AutoModel, "lm": AutoModelForCausalLM, "labels": AutoModelForSequenceClassification}
WEIGHTS = "model.safetensors"


@torch.no_grad()
def test_saved_and_loaded(kind, tmp_path):
    """By its own class and by the Auto classes, with nothing missing and nothing left over."""
    for head, auto in HEADED.items():
        one = model(kind, head)
        one.save_pretrained(tmp_path / head)
        for made in (type(one), auto):
            loaded, report = made.from_pretrained(tmp_path / head, output_loading_info=True)
            assert type(loaded) is type(one) and not loaded.training
            assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
            close(loaded(tokens())[0], one(tokens())[0], 1e-6)
        assert (tmp_path / head / "generation_config.json").exists() == (head == "lm")
    assert type(AutoConfig.from_pretrained(tmp_path / "base")) is type(one.config)


@torch.no_grad()
def test_heads_and_base_models_read_each_other(kind, tmp_path):
    lm, base = model(kind), model(kind, "base")
    lm.save_pretrained(tmp_path / "lm")
    base.save_pretrained(tmp_path / "base")
    lm.base_model.save_pretrained(tmp_path / "part")
    close(model_class(kind, "base").from_pretrained(tmp_path / "lm")(tokens())[0], lm.base_model(tokens())[0], 1e-6)
    close(model_class(kind).from_pretrained(tmp_path / "part")(tokens())[0], lm(tokens())[0], 1e-6)
    labels, report = model_class(kind, "labels").from_pretrained(tmp_path / "base", output_loading_info=True)
    assert set(report["missing_keys"]) == {"score.weight"}
    close(labels.base_model(tokens())[0], base(tokens())[0], 1e-6)


def test_tied_weights_are_one(kind, tmp_path):
    """In memory, in files, after loading, and after a change of the vocabulary."""
    one = model(kind)
    one.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / WEIGHTS)
    for made in (one, AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert made.get_output_embeddings().weight is made.get_input_embeddings().weight
        assert len(made.all_tied_weights_keys) == 1
        made.resize_token_embeddings(VOCABULARY + 4)
        assert made.get_output_embeddings().weight is made.get_input_embeddings().weight


@torch.no_grad()
def test_untied_weights_are_two(kind, tmp_path):
    one = model(kind, tie_word_embeddings=False)
    assert not torch.equal(one.get_output_embeddings().weight, one.get_input_embeddings().weight)
    one.save_pretrained(tmp_path)
    assert "lm_head.weight" in load_file(tmp_path / WEIGHTS)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.tie_word_embeddings is False
    close(loaded(tokens()).logits, one(tokens()).logits, 1e-6)
    loaded.resize_token_embeddings(VOCABULARY + 4)
    assert loaded(tokens()).logits.shape[-1] == VOCABULARY + 4
    assert loaded.get_output_embeddings().weight is not loaded.get_input_embeddings().weight
    assert torch.equal(one.generate(tokens(), max_new_tokens=2)[:, :7], tokens())


@torch.no_grad()
def test_the_vocabulary_changes(kind):
    for head in HEADED:
        one = model(kind, head)
        before = one.get_input_embeddings().weight.clone()
        for size in (VOCABULARY + 10, VOCABULARY - 15):
            table = one.resize_token_embeddings(size)
            assert table.num_embeddings == one.config.vocab_size == size
            kept = min(size, VOCABULARY - 15 if size < VOCABULARY else VOCABULARY)
            assert torch.equal(table.weight[:kept], before[:kept])
            outputs = one(tokens().clamp(max=size - 1))
            assert head != "lm" or outputs.logits.shape[-1] == size
        assert one.resize_token_embeddings(pad_to_multiple_of=16).num_embeddings == 48
        with pytest.raises(ValueError, match="not and integer"):
            one.resize_token_embeddings(40, pad_to_multiple_of=1.3)


def test_weights_that_a_file_lacks_are_made(kind, tmp_path):
    """As in a new model: finite, of the usual size, norms 1."""
    model(kind).save_pretrained(tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    kept = {name: weight for name, weight in weights.items() if "layers.1." not in name and "blocks.1." not in name}
    save_file(kept, tmp_path / WEIGHTS, {"format": "pt"})
    loaded, report = model_class(kind).from_pretrained(tmp_path, output_loading_info=True)
    assert len(report["missing_keys"]) == len(weights) - len(kept) > 5
    fresh = dict(model(kind).named_parameters())
    for name, parameter in loaded.named_parameters():
        assert parameter.isfinite().all()
        if name in report["missing_keys"] and fresh[name].std() > 0:
            assert parameter.std().item() == pytest.approx(fresh[name].std().item(), rel=0.3)
        elif name in report["missing_keys"]:
            assert torch.equal(parameter, fresh[name])


def test_weights_of_other_shapes_are_refused(kind, tmp_path):
    model(kind).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="size mismatch|mismatched"):
        model_class(kind).from_pretrained(tmp_path, vocab_size=VOCABULARY + 1)
    loaded = model_class(kind).from_pretrained(tmp_path, vocab_size=60, ignore_mismatched_sizes=True)
    assert loaded(tokens()).logits.shape[-1] == 60


def test_files_in_shards(kind, tmp_path):
    one = model(kind)
    one.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    close(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens()).logits, one(tokens()).logits, 1e-6)


def test_a_state_dict_in_place_of_files(kind):
    one = model(kind)
    made = model_class(kind).from_pretrained(None, config=one.config, state_dict=one.state_dict())
    close(made.eval()(tokens()).logits, one(tokens()).logits, 1e-6)


def test_dtypes_of_loading(kind, tmp_path):
    model(kind).to(torch.bfloat16).save_pretrained(tmp_path)
    for asked, dtype in ((None, torch.bfloat16), ("auto", torch.bfloat16), (torch.float32, torch.float32)):
        options = {} if asked is None else {"dtype": asked}
        assert AutoModelForCausalLM.from_pretrained(tmp_path, **options).dtype == dtype
    assert AutoModelForCausalLM.from_config(config(kind), dtype=torch.float16).dtype == torch.float16


def test_models_without_memory(kind, tmp_path):
    """On the meta device, and loaded from there by a device map."""
    with torch.device("meta"):
        empty = model_class(kind)(config(kind))
    assert all(parameter.is_meta for parameter in empty.parameters())
    one = model(kind)
    one.save_pretrained(tmp_path)
    for options in ({"device_map": "cpu"}, {"device_map": "auto"}, {"low_cpu_mem_usage": True}):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        assert not any(parameter.is_meta for parameter in loaded.parameters())
        close(loaded(tokens()).logits, one(tokens()).logits, 1e-6)


@torch.no_grad()
def test_weights_on_the_disk(kind, tmp_path):
    pytest.importorskip("accelerate")
    one = model(kind)
    one.save_pretrained(tmp_path / "whole")
    layers = "model.layers" if kind == "llama" else "model.transformer.blocks"
    names = [name for name, part in one.named_modules() if name and not list(part.children())]
    places = {name: "disk" if name.startswith(f"{layers}.1") else "cpu" for name in names}
    if kind != "llama":
        places |= {name: "cpu" for name, _ in one.named_parameters(recurse=False)}
    options = {"device_map": places, "offload_folder": tmp_path / "away"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", **options)
    assert any(parameter.is_meta for parameter in loaded.parameters())
    close(loaded(tokens()).logits, one(tokens()).logits, 1e-6)


def test_pickled_models(kind, tmp_path):
    one = model(kind)
    torch.save(one.state_dict(), tmp_path / "weights.pt")
    other = model_class(kind)(config(kind)).eval()
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    for made in (other, pickle.loads(pickle.dumps(one))):
        close(made(tokens()).logits, one(tokens()).logits, 1e-6)


def test_configurations(kind, tmp_path):
    """Common names, settings of one's own, and files that say the same."""
    settings = config(kind, use_cache=False, num_labels=3, output_attentions=True)
    assert (settings.hidden_size, settings.num_hidden_layers, settings.vocab_size) == (WIDTH, LAYERS, VOCABULARY)
    settings.hidden_size = 64
    assert settings.hidden_size == 64
    settings.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.to_diff_dict() == settings.to_diff_dict() and loaded.num_labels == 3 and not loaded.use_cache
    assert type(settings)(**json.loads((tmp_path / "config.json").read_text())).to_dict()["vocab_size"] == VOCABULARY
    changed = AutoConfig.from_pretrained(tmp_path, vocab_size=99)
    assert changed.vocab_size == 99


def test_every_number_is_in_the_files_or_made_anew(kind, tmp_path):
    one = model(kind)
    one.save_pretrained(tmp_path)
    saved = set(load_file(tmp_path / WEIGHTS))
    assert saved | set(one.all_tied_weights_keys) == set(one.state_dict())
    assert all(isinstance(t, (nn.Parameter, torch.Tensor)) for t in one.state_dict().values())


def test_plans_of_sharding_name_parts(kind):
    """Each entry of the FSDP plan, and each class that is never split, is a part of the model."""
    one = model(kind)
    names = {".".join("*" if word.isdigit() else word for word in name.split(".")) for name, _ in one.named_modules()}
    assert len(one.fsdp_plan) >= 3 and set(one.fsdp_plan) <= names
    assert set(one._no_split_modules) <= {type(part).__name__ for part in one.modules()}
