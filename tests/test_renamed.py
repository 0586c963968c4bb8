"""Renamed fields: files with the former names are read, hashes stay, and code that uses a former name is warned."""

import json
from pathlib import Path

import pytest

import headcode.train
from headcode import zoo
from headcode.cli import main
from headcode.nn import ModelConfig, Transformer
from headcode.presets import RunConfig, model_for, override, preset
from headcode.sweep import config_hash, grid
from headcode.tasks import SRaven
from headcode.train.checkpoint import Checkpoint, refuse_changed_config
from headcode.train.loss import LossContext

FAST_HASH = "c9a9ce570652"
"""Of the preset sraven-fast, before its field hint was called auxiliary_weight."""


def former(config):
    """A run's configuration as the version before wrote it."""
    values = config.to_dict()
    values["hint"] = values.pop("auxiliary_weight")
    values["model"]["hint_dims"] = values["model"].pop("auxiliary_dims")
    return values


def test_files_with_former_names_are_read_as_they_were(recwarn):
    for name in zoo.names():
        values = json.loads((zoo.folder(name) / "config.json").read_text())
        config = RunConfig.from_dict(values)
        assert config.auxiliary_weight == values.get("hint", 0.0) == zoo.card(name)["hint"]
        assert config.model.auxiliary_dims == tuple(values["model"].get("hint_dims", ()))
        assert sum(p.numel() for p in headcode.load(f"zoo/{name}").parameters()) == zoo.card(name)["parameters"]
    assert RunConfig.from_dict(former(preset("sraven-fast"))) == preset("sraven-fast")
    assert not [warning for warning in recwarn if issubclass(warning.category, DeprecationWarning)]


def test_a_renamed_field_keeps_the_hash_of_its_runs():
    assert config_hash(preset("sraven-fast")) == FAST_HASH
    assert config_hash(RunConfig.from_dict(former(preset("sraven-fast")))) == FAST_HASH
    assert config_hash(override(preset("sraven-fast"), auxiliary_weight=0.5)) != FAST_HASH


def test_both_names_at_once_are_refused():
    with pytest.raises(ValueError, match="RunConfig has auxiliary_weight twice, under its former name too"):
        RunConfig.from_dict({**preset("logic").to_dict(), "hint": 0.0})
    with (
        pytest.warns(DeprecationWarning, match="hint is"),
        pytest.raises(ValueError, match="has auxiliary_weight twice"),
    ):
        override(preset("sraven-fast"), auxiliary_weight=0.25, hint=1.0)


def test_code_with_former_names_works_and_is_warned():
    fast = preset("sraven-fast")
    batch = fast.task.sample("train", 0, 2)
    sizes = {"num_layers": 3, "dim": 8, "num_heads": 2, "qk_dim": 4, "v_dim": 4, "mlp_dim": 8}
    model = Transformer(model_for(fast.task, auxiliary_weight=1.0, **sizes))
    for use, expected in (
        (lambda: fast.hint, 1.0),
        (lambda: fast.model.hint_dims, (20, 64)),
        (lambda: fast.replace(hint=0.5).auxiliary_weight, 0.5),
        (lambda: override(fast, hint=0.5).auxiliary_weight, 0.5),
        (lambda: [name for name, _ in grid(fast, hint=[0, 1])], ["auxiliary_weight=0", "auxiliary_weight=1"]),
        (lambda: RunConfig(task=fast.task, model=fast.model, hint=1.0).auxiliary_weight, 1.0),
        (lambda: ModelConfig(input_dim=3, output_dim=2, max_length=4, hint_dims=(5,)).auxiliary_dims, (5,)),
        (lambda: SRaven().questions, SRaven().auxiliary),
        (lambda: SRaven().hint_dims, SRaven().auxiliary_dims),
        (lambda: len(fast.task.hints(batch)), 3),
        (lambda: headcode.train.hint_loss, headcode.train.auxiliary_loss),
        (lambda: LossContext(None, model, batch, fast.task, 0, 0, 0.25).hint, 0.25),
        (lambda: len(model(batch.x, hints=True)[1]), 2),
        (lambda: model_for(fast.task, hint=1.0, **sizes), model_for(fast.task, auxiliary_weight=1.0, **sizes)),
    ):
        with pytest.warns(DeprecationWarning, match=r"is called auxiliary\w* now"):
            assert use() == expected


def test_the_former_flag_is_the_new_one(capsys):
    words = [
        "train",
        "sraven",
        "--preset",
        "sraven-small",
        "--num-layers",
        "3",
        "--dry-run",
        "--steps",
        "1",
        "--threads",
        "1",
    ]
    main([*words, "--hint", "0.5"])
    shown = capsys.readouterr()
    assert json.loads(shown.out)["config"]["auxiliary_weight"] == 0.5
    assert "headcode: --hint is called --auxiliary-weight now." in shown.err


def test_a_change_is_noticed_in_a_checkpoint_with_former_names():
    fast = preset("sraven-fast")
    sealed = Checkpoint(Path("step-3"), {"step": 3, "config": former(fast)})
    refuse_changed_config(sealed, Path("run"), fast.to_dict())
    with pytest.raises(ValueError, match=r"auxiliary_weight was 1\.0 and is 0\.5 now"):
        refuse_changed_config(sealed, Path("run"), override(fast, auxiliary_weight=0.5).to_dict())


def test_an_attribute_that_never_was_is_none():
    with pytest.raises(AttributeError, match="'SRaven' object has no attribute 'helps'"):
        _ = SRaven().helps
    assert not hasattr(headcode.train, "helps")
