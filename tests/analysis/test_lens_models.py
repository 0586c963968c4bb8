"""Models under the lens: streamed layer by layer, headcode's own, in batches, and with other codes."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from headcode.analysis import open_model, read_model, summarise  # noqa: E402
from headcode.interop import HeadcodeForCausalLM  # noqa: E402
from headcode.interop.huggingface import load_pretrained  # noqa: E402
from headcode.nn import ModelConfig, Transformer, edit_codes  # noqa: E402
from tests.support.lens import save_word_model  # noqa: E402

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
OWN = {"vocab_size": 50, "dim": 12, "num_layers": 2, "num_heads": 3, "qk_dim": 6, "v_dim": 15, "mlp_dim": 8}
OWN |= {"max_length": 16, "causal": True}


def own_model(**changes):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**{**OWN, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return model


def test_a_streamed_model_holds_one_layer_at_a_time(tmp_path):
    model, _ = load_pretrained(save_word_model(tmp_path, "llama", num_hidden_layers=3), tokenizer=False)
    resident = model.embed_tokens.weight.numel() + model.norm.weight.numel()
    block = sum(parameter.numel() for parameter in model.layers[0].parameters())
    in_memory = []

    def count(module, arguments):
        in_memory.append(sum(p.numel() for p in model.parameters() if not p.is_meta))

    for layer in model.layers:
        layer.mlp.register_forward_pre_hook(count)
    reading = read_model(model, IDS)
    assert in_memory == [resident + block] * 3
    assert sum(p.numel() for p in model.parameters() if not p.is_meta) == resident
    whole = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
    for streamed, layer in zip(reading.layers, read_model(whole, IDS).layers, strict=True):
        torch.testing.assert_close(streamed.codes, layer.codes, rtol=0, atol=0)
        torch.testing.assert_close(streamed.own_output, layer.own_output, rtol=0, atol=0)


def test_untrained_weights_are_drawn_by_the_seed_streamed_or_not(tmp_path):
    folder = save_word_model(tmp_path)
    generator = torch.get_rng_state()
    codes = [read_model(open_model(folder).untrained(seed), IDS).layers[1].codes for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(codes[0], codes[1]) and not torch.equal(codes[0], codes[2])
    assert (codes[0] - 1 / 11).abs().max() < 0.01  # weights of 0.02 hardly tell tokens apart
    assert not torch.equal(codes[0], read_model(folder, IDS).layers[1].codes)
    whole = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager")
    assert (read_model(open_model(whole).untrained(0), IDS).layers[1].codes - 1 / 11).abs().max() < 0.01


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "softmax"},
        {"method": "linear", "position": "rotary", "qk_dim": 12},
        {"method": "hyla"},
        {"method": "hyla", "pooling": "mean"},
        {"method": "hyla", "value_net": "swiglu", "position": "none"},
        {"method": "linear", "pooling": "mean", "share_layers": True},
    ],
)
def test_own_models_are_read_exactly(changes):
    model = own_model(**changes)
    reading = read_model(model, IDS)
    assert [layer.layer for layer in reading.layers] == [0, 1] and not reading.unreadable
    for layer in reading.layers:
        assert layer.codes.shape == (3, 11, 11) and not layer.codes[:, 2, 3:].any()  # the future
        assert layer.relative_error < 1e-5
        made = layer.contributions(7)
        torch.testing.assert_close(layer.sizes()[7], made.norm(dim=-1))
    if changes["method"] == "hyla":
        with pytest.raises(ValueError, match="two-layer networks"):
            layer.value_network(3, 1)
        assert summarise(layer)["rank_mean"] is None


def test_own_models_saved_for_hugging_face(tmp_path):
    model = own_model()
    HeadcodeForCausalLM.from_transformer(model, end_token=0).save_pretrained(tmp_path)
    reading = read_model(tmp_path, IDS)
    for layer, own in zip(reading.layers, read_model(model, IDS).layers, strict=True):
        torch.testing.assert_close(layer.codes, own.codes)
        assert layer.relative_error < 1e-5


def test_what_own_models_cannot_show_is_named():
    assert "pools by the largest" in read_model(own_model(pooling="max"), IDS).unreadable[1]
    with pytest.raises(ValueError, match="Transformer of tokens"):
        read_model(Transformer(ModelConfig(input_dim=3, output_dim=1, max_length=8)), [1])


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "own"])
def test_filling_changes_no_reading(kind, tmp_path):
    model = open_model(own_model() if kind == "own" else save_word_model(tmp_path, kind), reads_text=False)
    seen = []
    model.run(model.batch([IDS, [7, 8, 9]]), visit=lambda layer: seen.append(layer.reading(1)), layers=[-1])
    alone = read_model(model, [7, 8, 9]).layers[1]
    torch.testing.assert_close(seen[0].codes, alone.codes)
    torch.testing.assert_close(seen[0].own_output, alone.own_output, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_codes_of_zero_are_a_layer_without_values(kind, tmp_path):
    """Where the output projection is a part of the attention (Llama, GPT-2), and where it is not (BERT)."""
    model = open_model(save_word_model(tmp_path, kind), reads_text=False)
    batch = model.batch([IDS])
    own, patched = (
        model.run(batch, answer=True),
        model.run(batch, edit=lambda layer: layer.codes * 0 if layer.number == 1 else None, answer=True),
    )
    whole = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        if kind == "bert":
            values = whole.encoder.layer[1].attention.self.value
            values.weight.zero_(), values.bias.zero_()
        elif kind == "llama":
            whole.layers[1].self_attn.v_proj.weight.zero_()
        else:
            third = slice(2 * whole.config.n_embd, None)
            whole.h[1].attn.c_attn.weight[:, third].zero_(), whole.h[1].attn.c_attn.bias[third].zero_()
    expected = open_model(whole).run(batch, answer=True)
    torch.testing.assert_close(patched.float(), expected.float(), rtol=1e-4, atol=1e-5)
    assert (patched - own).abs().max() > 1e-3


def test_edits_of_own_models_are_those_of_edit_codes():
    model = own_model(method="hyla")
    opened = open_model(model)
    patched = opened.run(opened.batch([IDS]), edit=lambda layer: layer.codes.flip(1), layers=[0], answer=True)
    with torch.no_grad(), edit_codes(model, lambda layer, codes: codes.flip(1), layers=[0]):
        expected = model(torch.tensor([IDS]))[:, -1].softmax(-1)
    torch.testing.assert_close(patched.float(), expected, rtol=1e-4, atol=1e-6)


def test_a_sliding_window_hides_what_is_far(tmp_path):
    reading = read_model(save_word_model(tmp_path, "mistral", sliding_window=4, num_key_value_heads=2), IDS)
    for layer in reading.layers:
        assert layer.codes[:, 10, 7:].all() and not layer.codes[:, 10, :7].any()
        assert layer.relative_error < 1e-5


def test_probabilities_of_the_next_token_come_from_the_stored_head(tmp_path):
    folder = save_word_model(tmp_path / "base", "llama")
    base = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    model = transformers.LlamaForCausalLM(base.config)
    model.model.load_state_dict(base.state_dict())
    model.save_pretrained(tmp_path / "head")
    opened = open_model(tmp_path / "head", reads_text=False)
    assert opened.predicts and not open_model(folder, reads_text=False).predicts
    with torch.no_grad():
        expected = model.eval()(torch.tensor([IDS])).logits[:, -1].softmax(-1)
    torch.testing.assert_close(opened.run(opened.batch([IDS]), answer=True).float(), expected, rtol=1e-4, atol=1e-6)
