"""Runs on text: interrupted in the middle of an epoch, they go on with the very next window."""

import json
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from headcode.presets import RunConfig, override, preset, with_task
from headcode.tasks import LanguageModelling
from headcode.tasks.language.corpus import TextFiles
from headcode.tasks.language.prepare import prepare
from headcode.train import TrainingInterrupted, load, read_metrics, read_run_config
from tests.support import ROOT
from tests.support.training import Interrupting, assert_same, train


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(150)))
    task = LanguageModelling(context=7).with_text(prepare(TextFiles(file), tokenizer="bytes"))
    settings = {
        "backend": "reference",
        "dim": 10,
        "num_layers": 2,
        "num_heads": 2,
        "qk_dim": 8,
        "v_dim": 6,
        "mlp_dim": 11,
        "attention_dropout": 0.1,
        "batch_size": 30,
        "log_every": 3,
        "eval_every": 10,
        "eval_size": 23,
        "eval_batch_size": 5,
        "checkpoint_every": 7,
    }
    config = with_task(override(preset("lm-small"), **settings), task)
    # Two and a half epochs, whose ends fall inside batches.
    return config.replace(steps=round(2.5 * task.epoch_size / 30))


def test_stopped_in_the_middle_of_an_epoch_and_resumed(config, tmp_path):
    seen = {"whole": [], "broken": []}

    def loss_into(place):
        from headcode.train import task_loss

        def loss(context):
            place.append((context.step, context.batch.info["start"].tolist()))
            return task_loss(context)

        return loss

    per_epoch = config.task.epoch_size / config.batch_size
    assert config.steps > 2 * per_epoch and per_epoch != round(per_epoch)
    train(config, tmp_path / "whole", loss=loss_into(seen["whole"]))
    for stop in (5, round(per_epoch) + 3):
        with pytest.raises(TrainingInterrupted):
            train(config, tmp_path / "broken", loss=loss_into(seen["broken"]), reporters=[Interrupting(stop)])
    # A new process knows the run folder alone.
    again = read_run_config(tmp_path / "broken")
    assert again == config
    train(again, tmp_path / "broken", loss=loss_into(seen["broken"]))
    assert seen["whole"] == seen["broken"]  # every window as often and in the same order
    assert_same(tmp_path / "whole", tmp_path / "broken")
    first = [start for _, starts in seen["whole"] for start in starts][: config.task.epoch_size]
    assert len(set(first)) == config.task.epoch_size


def train_and_die(configuration, out, step):
    """In a process of its own: the run until it is killed, without a chance to write anything more."""
    train(RunConfig.from_dict(json.loads(configuration)), out, reporters=[Interrupting(int(step), signal.SIGKILL)])


@pytest.mark.kills
@pytest.mark.slow
def test_killed_in_the_middle_of_an_epoch_and_resumed(config, tmp_path):
    """Steps since the last checkpoint are done again, with the same windows."""
    per_epoch = config.task.epoch_size / config.batch_size
    train(config, tmp_path / "whole")
    for stop in (5, round(per_epoch) + 3, round(2 * per_epoch) + 2):
        assert stop % config.checkpoint_every  # something is lost each time
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
        code += "from tests.train import test_language_runs as here; "
        arguments = [json.dumps(config.to_dict()), str(tmp_path / "broken"), str(stop)]
        command = [sys.executable, "-c", code + "here.train_and_die(*sys.argv[1:])", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not (tmp_path / "broken" / "checkpoints" / f"step-{stop}").exists()
    train(read_run_config(tmp_path / "broken"), tmp_path / "broken")
    assert_same(tmp_path / "whole", tmp_path / "broken")


def test_what_a_run_folder_keeps(config, tmp_path):
    train(config.replace(steps=3), tmp_path / "run")
    memory = json.loads((tmp_path / "run" / "text.json").read_text())
    assert memory["shards"] == config.task.shards and memory["source"]["text"].endswith("text.txt")
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == config.task.text.tokenizer.content
    assert "text.txt" not in (tmp_path / "run" / "config.json").read_text()  # where the text lay is not the result
    model = load(tmp_path / "run")
    assert model.config.vocab_size == 257 and model.config.causal
    (last,) = [record for record in read_metrics(tmp_path / "run") if record["kind"] == "eval"]
    batch = config.task.instances("validation", range(23))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(batch.x).flatten(0, 1), batch.y.flatten())
    assert last["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_validation_is_never_counted_twice(config, tmp_path):
    size = config.task.split_size("validation")
    results = [train(config.replace(steps=2, eval_size=count)).metrics[-1] for count in (size, 10 * size)]
    assert results[0] == results[1]


def test_the_store_may_be_elsewhere(config, tmp_path, monkeypatch):
    train(config.replace(steps=2), tmp_path / "run")
    monkeypatch.setenv("HEADCODE_TEXTS", str(tmp_path / "empty"))
    monkeypatch.setattr("headcode.tasks.language.shards._KNOWN", {})
    with pytest.raises(ValueError, match="are neither in"):
        LanguageModelling.from_dict(config.task.to_dict()).sample("train", 0, 2)
    again = read_run_config(tmp_path / "run")  # text.json says where the shards were
    assert torch.equal(again.task.sample("train", 0, 2).x, config.task.sample("train", 0, 2).x)


def test_weights_do_not_depend_on_the_parts_of_a_batch(config, tmp_path):
    """Accumulated parts read the same windows; the sums differ in their last bits alone."""
    for name, accumulate in (("one", 1), ("three", 3)):
        train(config.replace(steps=4, accumulate=accumulate), tmp_path / name)
    one, three = (load_file(tmp_path / n / "checkpoints" / "step-4" / "model.safetensors") for n in ("one", "three"))
    for name in one:
        torch.testing.assert_close(one[name], three[name], rtol=0, atol=1e-5)
