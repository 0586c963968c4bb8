"""A run's config.json is sealed by its checkpoints: what was changed since is refused, by name, old value and new."""

import json
import shutil

import pytest

import headcode
from headcode.analysis.runs import open_run
from headcode.cli import main
from headcode.train import read_run_config
from headcode.train.checkpoint import newest_checkpoint
from tests.support.training import assert_same, small_config, train, write_sealed


def change(run, name, value):
    path = run / "config.json"
    values = json.loads(path.read_text())
    section, _, field = name.rpartition(".")
    (values[section] if section else values)[field] = value
    path.write_text(json.dumps(values))


def forget_config(run):
    """Checkpoints as they were before configurations were sealed."""
    for path in (run / "checkpoints").glob("step-*/state.json"):
        state = json.loads(path.read_text())
        del state["config"]
        write_sealed(path, state)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("steps", 30, 31),
        ("seed", 0, 1),
        ("task.seed", 0, 2),
        ("model.method", "hyla", "softmax"),
        ("optimization.learning_rate", 0.001, 0.003),
        ("ema_decay", None, 0.5),
    ],
)
def test_a_changed_field_is_named_with_both_values(run, capsys, name, old, new):
    change(run, name, new)
    words = (
        rf"config\.json was changed after step-30 was saved: {name} was {old!r} and is {new!r} now; put {old!r} back"
    )
    for operation in (headcode.load, open_run, lambda path: train(read_run_config(path), path)):
        with pytest.raises(ValueError, match=words):
            operation(run)
    for command in (["resume"], ["eval", "--device", "cpu"]):
        with pytest.raises(SystemExit) as ended:
            main([command[0], str(run), *command[1:]])
        captured = capsys.readouterr()
        assert ended.value.code == 2 and captured.err.count("\n") == 1
        assert f"{name} was {old!r} and is {new!r} now" in captured.err


@pytest.mark.slow
def test_every_single_bit_of_the_configuration_matters(run):
    """All of them: a run is resumed with its own configuration or not at all."""
    path, config = run / "config.json", read_run_config(run)
    content = path.read_bytes()
    refused = 0
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            found = read_run_config(run)
        except ValueError:
            continue
        if found != config:
            with pytest.raises(
                ValueError, match=r"config\.json was changed after step-30 was saved: \S+ was .* now; put"
            ):
                train(found, run)
            refused += 1
    assert refused > 100  # there is no lack of bits that make another configuration


def test_other_white_space_is_the_same_configuration(run, finished):
    path = run / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    train(small_config(), run)
    assert_same(finished, run)


def test_a_run_without_checkpoints_has_nothing_to_compare(run):
    shutil.rmtree(run / "checkpoints")
    change(run, "seed", 1)
    train(read_run_config(run), run)
    assert newest_checkpoint(run)[0].state["config"]["seed"] == 1


def test_older_checkpoints_stay_readable(run, finished):
    forget_config(run)
    assert isinstance(headcode.load(run), headcode.Transformer)
    assert train(small_config(), run).step == 30
    assert (run / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


def test_a_model_loads_though_its_run_is_of_an_unknown_task_or_a_later_version(run):
    change(run, "later_field", 7)
    assert headcode.load(run).config.method == "hyla"
    state_files = (run / "checkpoints").glob("step-*/state.json")
    change(run, "task.name", "mine")
    for path in state_files:
        state = json.loads(path.read_text())
        state["config"]["task"]["name"] = "mine"
        write_sealed(path, state)
    assert headcode.load(run).config.method == "hyla"


def test_a_field_that_a_later_version_added_is_no_change(run):
    values = json.loads((run / "config.json").read_text())
    del values["ema_decay"]
    (run / "config.json").write_text(json.dumps(values))
    train(small_config(), run)
    assert headcode.load(run).config.method == "hyla"
