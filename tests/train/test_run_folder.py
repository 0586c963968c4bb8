"""Run folders: one run, one configuration, one process; and nothing of anyone else's is ever overwritten."""

import json
import os
import subprocess
import sys

import pytest

from headcode.train import TrainingFailed, read_metrics, read_run_config
from headcode.train.folder import RunFolder, read_environments
from tests.support.training import small_config, train


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_configuration_goes_out_and_in(tmp_path, config):
    RunFolder.create(tmp_path / "new" / "run", config).close()
    assert read_run_config(tmp_path / "new" / "run") == config
    (tmp_path / "empty").mkdir()
    RunFolder.create(tmp_path / "empty", config).close()
    assert read_run_config(tmp_path / "empty") == config


def test_another_configuration_is_refused(tmp_path, config):
    train(config, tmp_path / "run")
    before = contents(tmp_path / "run")
    for changes, words in (
        ({"steps": 31}, "steps is 30 there and 31 here"),
        ({"method": "softmax"}, "model.method is 'hyla' there and 'softmax' here"),
        ({"task_seed": 3}, "task.seed is 0 there and 3 here"),
        ({"learning_rate": 0.5}, r"optimization.learning_rate is 0.001 there and 0.5 here"),
    ):
        with pytest.raises(ValueError, match=rf"belongs to another run: {words}"):
            train(small_config(**changes), tmp_path / "run")
    assert contents(tmp_path / "run") == before


def test_what_is_no_run_folder_is_left_alone(tmp_path, config):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("Once upon a time")
    with pytest.raises(ValueError, match=r"is not a run folder \(it has no config.json, but chapter1.tex\)"):
        RunFolder.create(tmp_path / "thesis", config)
    assert contents(tmp_path / "thesis") == {"chapter1.tex": b"Once upon a time"}
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is a file"):
        RunFolder.create(tmp_path / "file", config)
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "config.json").write_text('{"port": 80}')
    with pytest.raises(ValueError, match="its config.json is not that of a run"):
        RunFolder.create(tmp_path / "web", config)
    assert contents(tmp_path / "web") == {"config.json": b'{"port": 80}'}
    with pytest.raises(ValueError, match="there is no such folder"):
        RunFolder.open(tmp_path / "nothing")


def test_a_kill_before_the_configuration_leaves_a_usable_folder(tmp_path, config):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text("123\n")
    (tmp_path / "run" / ".config.json.123").write_text('{"half')
    RunFolder.create(tmp_path / "run", config).close()
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", "config.json"]


def test_one_process_at_a_time(tmp_path, config):
    folder = RunFolder.create(tmp_path / "run", config)
    with pytest.raises(ValueError, match=rf"is in use by another process \(process {os.getpid()}\)"):
        RunFolder.open(tmp_path / "run")
    folder.close()
    RunFolder.open(tmp_path / "run").close()


def test_a_dead_process_holds_no_lock(tmp_path, config):
    """The lock is the system's: whatever a killed process left in the file does not count."""
    folder = RunFolder.create(tmp_path / "run", config)
    folder.close()
    script = (
        "import sys, os, signal\n"
        "from headcode.train.folder import RunFolder\n"
        "folder = RunFolder.open(sys.argv[1])\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=rf"in use by another process \(process {process.pid}\)"):
            RunFolder.open(tmp_path / "run")
        process.kill()
        process.wait()
        RunFolder.open(tmp_path / "run").close()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(13, "Permission denied"), "Permission denied"),
        (OSError(30, "Read-only file system"), "Read-only file system"),
    ],
)
def test_a_folder_that_cannot_be_written(tmp_path, config, monkeypatch, error, words):
    train(config, tmp_path / "run")
    before = contents(tmp_path / "run")

    def refuse(path):
        raise error

    monkeypatch.setattr("headcode.train.folder._take_lock", refuse)
    with pytest.raises(ValueError, match=rf"cannot be written \({words}\)"):
        train(config, tmp_path / "run")
    assert contents(tmp_path / "run") == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into folders without write permission")
def test_a_folder_without_write_permission(tmp_path, config):
    train(config, tmp_path / "run")
    for folder, _, files in os.walk(tmp_path / "run"):
        os.chmod(folder, 0o500)
        for file in files:
            os.chmod(os.path.join(folder, file), 0o400)
    with pytest.raises(ValueError, match=r"cannot be written \(Permission denied\)"):
        train(config, tmp_path / "run")


def test_metrics_are_brought_back_to_the_checkpoint(tmp_path, config):
    folder = RunFolder.create(tmp_path / "run", config)
    records = [{"kind": "train", "step": step, "loss": 1 / 3} for step in (1, 2)]
    folder.rewind_metrics([])
    for record in records:
        folder.add_metrics(record)
    folder.rewind_metrics(records[:1])
    assert read_metrics(tmp_path / "run") == records[:1]
    folder.add_metrics(records[1])
    assert read_metrics(tmp_path / "run") == records
    folder.close()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tr')
    assert read_metrics(tmp_path / "run") == records
    (tmp_path / "run" / "metrics.jsonl").write_text('{"kind": "a", "step": 1}\nnonsense\n{}\n')
    with pytest.raises(ValueError, match="line 2 is not valid JSON"):
        read_metrics(tmp_path / "run")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
def test_metrics_on_a_full_disk_are_explained(tmp_path, monkeypatch):
    """The line that found no room is still in the file's buffer when it is closed: that must not hide the sentence."""
    rewind = RunFolder.rewind_metrics

    def rewind_onto_a_full_disk(folder, records):
        rewind(folder, records)
        folder._metrics.close()
        folder._metrics = open("/dev/full", "a")  # noqa: SIM115 - the folder closes it

    monkeypatch.setattr(RunFolder, "rewind_metrics", rewind_onto_a_full_disk)
    with pytest.raises(TrainingFailed, match=r"could not be written at step 7 \(No space left on device\)"):
        train(small_config(checkpoint_every=0), tmp_path / "run")


def test_every_start_is_on_record(tmp_path, config):
    train(config, tmp_path / "run")
    path = tmp_path / "run" / "environment.json"
    values = json.loads(path.read_text())
    values["starts"][0]["torch"] = "1.0"
    path.write_text(json.dumps(values))
    with pytest.warns(UserWarning, match="its last bits may differ: torch"):
        train(config, tmp_path / "run")
    assert [start["step"] for start in read_environments(tmp_path / "run")] == [0, 30]
