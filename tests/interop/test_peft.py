"""LoRA by peft, on every projection: gradients reach the adapters, and merging them changes no logit."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from headcode import capture_codes  # noqa: E402
from headcode.interop import HeadcodeConfig, HeadcodeForCausalLM, to_reference  # noqa: E402
from headcode.nn import ModelConfig, Transformer, generate, load_model, save_model, value_network  # noqa: E402
from headcode.nn.capture import find_attentions  # noqa: E402

METHODS = ("softmax", "linear", "hyla")
SIZES = {"vocab_size": 29, "dim": 48, "num_heads": 4, "num_layers": 2, "qk_dim": 32, "v_dim": 16, "mlp_dim": 80}
PARTS = ["query_proj", "key_proj", "value_proj", "output_proj", "hidden_proj", "gate_proj", "signal_proj"]


def adapt(model, parts=(*PARTS, "embedding"), dropout=0.0):
    """The model with trained adapters: peft starts with a product of 0."""
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=list(parts), lora_dropout=dropout))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return model


def transformer(**changes):
    torch.manual_seed(0)
    settings = {**SIZES, "max_length": 16, "causal": True, **changes}
    return Transformer(ModelConfig(**settings))


def tokens():
    return torch.randint(29, (2, 7), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("feedforward", ["gelu", "swiglu"])
@pytest.mark.parametrize("method", METHODS)
def test_gradients_and_merging(method, feedforward):
    base = transformer(method=method, feedforward=feedforward)
    plain = base(tokens()).detach()
    model = adapt(base)
    logits = model(tokens())
    logits.square().sum().backward()
    adapters = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    assert {part for part in PARTS if any(part in name for name in adapters)} >= {
        "query_proj",
        "key_proj",
        "value_proj",
    }
    for name, parameter in adapters.items():
        assert parameter.grad is not None and parameter.grad.norm() > 0, name
    assert (logits - plain).abs().max() > 0.1
    joined = copy.deepcopy(model).merge_and_unload()
    assert not any("lora" in name for name, _ in joined.named_modules())
    torch.testing.assert_close(joined(tokens()), logits, rtol=1e-5, atol=1e-5)
    with model.disable_adapter():
        torch.testing.assert_close(model(tokens()).detach(), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", [*PARTS[:5], "embedding"])
@pytest.mark.parametrize("method", METHODS)
def test_each_part_alone(part, method):
    base = transformer(method=method)
    plain, model = base(tokens()).detach(), adapt(base, [part])
    logits = model(tokens())
    assert (logits - plain).abs().max() > 1e-3
    torch.testing.assert_close(copy.deepcopy(model).merge_and_unload()(tokens()), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_the_hugging_face_model(method):
    torch.manual_seed(0)
    model = adapt(HeadcodeForCausalLM(HeadcodeConfig(**SIZES, method=method, position="rotary"))).eval()
    joined = copy.deepcopy(model).merge_and_unload()
    loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    for name, parameter in model.named_parameters():
        assert ("lora_" in name) == (parameter.grad is not None and parameter.grad.norm() > 0), name
    with torch.no_grad():
        torch.testing.assert_close(joined(tokens()).logits, model(input_ids=tokens()).logits, rtol=1e-5, atol=1e-5)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(input_ids=tokens(), **options), joined.generate(input_ids=tokens(), **options))


@pytest.mark.parametrize("method", METHODS)
def test_decoding_and_codes(method):
    model = adapt(transformer(method=method)).eval()
    joined = copy.deepcopy(model).merge_and_unload()
    ours = model.get_base_model()
    assert list(generate(ours, [1, 2], 9, temperature=0)) == list(generate(joined, [1, 2], 9, temperature=0))
    with torch.no_grad(), capture_codes(model) as codes, capture_codes(joined) as expected:
        model(tokens()), joined(tokens())
    for layer in range(2):
        torch.testing.assert_close(codes[layer], expected[layer], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_generated_networks(method):
    """Of the adapted weights, with the adapters' dropout left out."""
    model = adapt(transformer(method=method), dropout=0.5).train()
    joined = copy.deepcopy(model).merge_and_unload()
    codes = torch.randn(2, 4, 3, 5)
    given, expected = (value_network(find_attentions(m)[1], codes) for m in (model, joined))
    torch.testing.assert_close(given.weights, expected.weights, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(given.biases[0], expected.biases[0], rtol=1e-5, atol=1e-5)


def test_saved_only_when_merged(tmp_path):
    model = adapt(transformer(method="hyla"), ["query_proj"])
    with pytest.raises(ValueError, match=r"base_layer.bias\): merge or remove its adapters"):
        save_model(model.get_base_model(), tmp_path / "adapted")
    assert not (tmp_path / "adapted").exists()
    with pytest.raises(ValueError, match="no parameter blocks.0.attention.query_proj.weight: merge or remove"):
        to_reference(model.get_base_model())
    joined = model.merge_and_unload()
    loaded = load_model(save_model(joined, tmp_path / "merged"))
    torch.testing.assert_close(loaded(tokens()), joined.eval()(tokens()))
    assert sorted(to_reference(loaded)) == sorted(to_reference(joined))


@pytest.mark.parametrize("kind", ["cpu", "disk"])
@pytest.mark.parametrize("method", METHODS)
def test_the_hugging_face_model_with_offloaded_weights(kind, method, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = HeadcodeForCausalLM(HeadcodeConfig(**SIZES, method=method, position="rotary")).eval()
    away, options = copy.deepcopy(model), {"execution_device": torch.device("cpu")}
    accelerate.cpu_offload(away, **options) if kind == "cpu" else accelerate.disk_offload(away, tmp_path, **options)
    with torch.no_grad():
        torch.testing.assert_close(away(tokens()).logits, model(tokens()).logits, rtol=1e-5, atol=1e-5)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(away.generate(input_ids=tokens(), **options), model.generate(input_ids=tokens(), **options))
