"""The lens on models whose projections are more than their weights: it reads what they do, or says that it cannot."""

import copy
import re

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")

from headcode.analysis import read_model  # noqa: E402

IDS = [3, 1, 4, 1, 5, 9, 2]
COMMON = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
KINDS = {
    "llama": (
        {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
        | {"intermediate_size": 16, "attention_bias": True},
        ["v_proj", "o_proj"],
    ),
    "gpt2": ({"n_embd": 24, "n_layer": 2, "n_head": 6}, ["c_attn", "attn.c_proj"]),
}


def make(name):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **COMMON, **KINDS[name][0])
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def adapt(model, name):
    settings = peft.LoraConfig(r=3, target_modules=KINDS[name][1], lora_dropout=0.5, fan_in_fan_out=name == "gpt2")
    model = peft.get_peft_model(model, settings)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                parameter.normal_(std=0.3)
    return model.get_base_model()


def assert_reproduces(reading):
    assert [layer.layer for layer in reading.layers] == [0, 1] and not reading.unreadable
    for layer in reading.layers:
        assert layer.relative_error < 1e-5


@pytest.mark.parametrize("name", KINDS)
def test_lora(name):
    plain = read_model(make(name), IDS)
    reading = read_model(adapt(make(name), name).train(), IDS)
    assert_reproduces(plain)
    assert_reproduces(reading)
    changed = reading.layers[0].value_network(5, 2) - plain.layers[0].value_network(5, 2)
    assert changed.norm() > 0.1 * plain.layers[0].value_network(5, 2).norm()


@pytest.mark.parametrize("name", KINDS)
def test_hooks(name):
    model = make(name)
    for part_name, part in model.named_modules():
        if part_name.endswith(tuple(KINDS[name][1])):
            part.register_forward_hook(lambda module, arguments, output: 1.5 * output + 1)
    assert_reproduces(read_model(model, IDS))


@pytest.mark.parametrize("name", KINDS)
def test_offloaded_weights(name):
    model = make(name)
    away = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    reading, plain = read_model(away, IDS), read_model(model, IDS)
    assert_reproduces(reading)
    torch.testing.assert_close(reading.layers[1].value_network(5, 2), plain.layers[1].value_network(5, 2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantised_layers_are_named():
    model = torch.ao.quantization.quantize_dynamic(make("llama"), {torch.nn.Linear})
    reading = read_model(model, IDS)
    assert not reading.layers
    reason = r"its value projection is a torch.ao.nn.quantized.*\.Linear, which is not a linear map plus a bias"
    assert all(re.match(reason, found) for found in reading.unreadable.values()) and len(reading.unreadable) == 2
