"""A model as a folder: what is written, what is read back, and what is refused."""

import os

import pytest
import torch

import headcode
from headcode.nn import load_model, save_model
from tests.support.models import make


def test_a_saved_model_loads_with_the_same_outputs(tmp_path):
    model, x = make(share_layers=True), torch.randn(2, 7, 5)
    save_model(model, tmp_path / "model")
    again = headcode.load(tmp_path / "model")
    assert again.config == model.config and not again.training
    assert torch.equal(model.eval()(x), again(x))
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes as on Unix")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_is_not_said_to_be_missing(tmp_path, name):
    save_model(make(), tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} is not a regular file"):
        load_model(tmp_path)


def test_a_damaged_folder_is_refused_and_the_damage_named(tmp_path):
    save_model(make(), tmp_path)
    with pytest.raises(ValueError, match="it has no config.json"):
        load_model(tmp_path / "nowhere")
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"dim": 48', '"dim": 60'))
    with pytest.raises(ValueError, match="does not belong to its config.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(config.replace('"dim"', '"dimm"'))
    with pytest.raises(ValueError, match="has no field 'dimm'"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(config)
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_text(config.replace('"max_length": 13', '"max_length": 2000000000'))
    with pytest.raises(ValueError, match="does not belong to its config.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        load_model(tmp_path)
