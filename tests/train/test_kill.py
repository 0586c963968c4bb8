"""Killed at any moment, in the middle of a write, or out of disk space: resumed, it is the same run, byte for byte."""

import contextlib
import json
import os
import random
import resource
import shutil
import subprocess
import time

import pytest

from headcode.train.checkpoint import newest_checkpoint, prune
from tests.support.processes import run_command, start
from tests.support.training import assert_same

pytestmark = [pytest.mark.kills, pytest.mark.slow]

SIZES = "--num-points 16 --dim 64 --mlp-dim 64 --batch-size 64 --backend reference --threads 1"
RUN = (
    f"train logic {SIZES} --steps 300 --log-every 7 --eval-every 30 --eval-size 64 --checkpoint-every 3 --ema-decay 0.9"
)


@pytest.fixture(scope="module")
def processes():
    """Processes that need no time to import torch; the kills then fall into the run, not into imports."""
    return lambda arguments, log: start(run_command, arguments, str(log))


@pytest.fixture(scope="module")
def whole(processes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    process = processes([*RUN.split(), "--out", str(folder / "run")], folder / "log")
    process.join(300)
    assert process.exitcode == 0, (folder / "log").read_text()
    return folder / "run"


def is_writing(run):
    try:
        return any(name.startswith(".step-") for name in os.listdir(run / "checkpoints"))
    except FileNotFoundError:
        return False


def wait_for(condition, process, seconds=60.0):
    """Until the condition holds; False if the process ended first."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process.exitcode is not None:
            return False
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    return True


def newest_step(run):
    steps = [int(folder.name[5:]) for folder in (run / "checkpoints").glob("step-*")]
    return max(steps, default=0)


def test_twenty_kills(processes, whole, tmp_path):
    """Five kills at any moment from the start of the process on, five while it trains, ten in the middle of a write."""
    dice = random.Random(0)
    run, log = tmp_path / "run", tmp_path / "log"
    log.touch()
    in_the_middle = 0
    for kill in range(20):
        begun, before = log.read_text().count("training from step"), newest_step(run)
        there = (run / "config.json").is_file()
        process = processes(["resume", str(run)] if there else [*RUN.split(), "--out", str(run)], log)
        if kill % 4 == 0:
            time.sleep(dice.uniform(0.02, 0.3))
        else:
            assert wait_for(lambda n=begun: log.read_text().count("training from step") > n, process)
            if kill % 4 == 2:
                time.sleep(dice.uniform(0, 0.2))
            else:
                goal = before + 3 * dice.randrange(4)
                assert wait_for(lambda goal=goal: newest_step(run) >= goal and is_writing(run), process)
                time.sleep(dice.uniform(0, 0.004))
                in_the_middle += 1
        assert process.exitcode is None, f"the run ended before kill {kill}: {log.read_text()}"
        process.kill()
        process.join()
    assert in_the_middle == 10
    process = processes(["resume", str(run)], log)
    process.join(300)
    assert process.exitcode == 0, log.read_text()
    assert "Traceback" not in log.read_text()
    assert_same(whole, run)
    assert not [name for name in os.listdir(run / "checkpoints") if name.startswith(".")]
    starts = [start["step"] for start in json.loads((run / "environment.json").read_text())["starts"]]
    assert starts == sorted(starts) and len(starts) >= 15 and len(set(starts)) >= 5


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_kill_and_damage(processes, whole, tmp_path, damage):
    """The newest checkpoint is spoiled after a kill: it is named, and the one before it is used."""
    run, log = tmp_path / "run", tmp_path / "log"
    process = processes([*RUN.split(), "--out", str(run)], log)
    assert wait_for(lambda: (run / "checkpoints" / "step-33").is_dir(), process)
    process.kill()
    process.join()
    newest = run / "checkpoints" / f"step-{newest_step(run)}"
    content = bytearray((newest / "optimizer.safetensors").read_bytes())
    content[len(content) // 3] ^= 4
    (newest / "optimizer.safetensors").write_bytes(content if damage == "flipped" else content[: len(content) // 3])
    process = processes(["resume", str(run)], log)
    process.join(300)
    assert process.exitcode == 0, log.read_text()
    assert f"{newest.name}/optimizer.safetensors does not have the content that was written" in log.read_text()
    assert_same(whole, run)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root and the right to mount")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill_up(ballast):
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_full_disk(processes, whole, small_disk, tmp_path):
    """The disk fills up in the middle of the run; with room again, it goes on as if nothing had been."""
    run, log = small_disk / "run", tmp_path / "log"
    process = processes([*RUN.split(), "--out", str(run)], log)
    assert wait_for(lambda: (run / "checkpoints" / "step-30").is_dir(), process)
    fill_up(small_disk / "ballast")
    process.join(60)
    assert process.exitcode == 1
    words = log.read_text().strip().splitlines()[-1]
    assert "No space left on device" in words and "last good checkpoint is" in words and "headcode resume" in words
    assert "Traceback" not in log.read_text()
    (small_disk / "ballast").unlink()
    process = processes(["resume", str(run)], log)
    process.join(300)
    assert process.exitcode == 0, log.read_text()
    assert_same(whole, run)


def limited(arguments, log, size):
    """Like a full disk, for everyone: no file of this process may grow beyond `size` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    run_command(arguments, log)


def test_a_write_that_is_cut_short(processes, whole, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    process = processes([*RUN.split(), "--out", str(run)], log)
    assert wait_for(lambda: (run / "checkpoints" / "step-12").is_dir(), process)
    process.kill()
    process.join()
    best = newest_checkpoint(run)[0].state["best"]
    prune(run, best and best["step"])  # the kill may have come before that, and the next start would do it
    before = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    process = start(limited, ["resume", str(run)], str(log), 60_000)
    process.join(60)
    assert process.exitcode == 1
    assert "File too large" in log.read_text() and "Traceback" not in log.read_text()
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == before
    process = processes(["resume", str(run)], log)
    process.join(300)
    assert process.exitcode == 0, log.read_text()
    assert_same(whole, run)


TEXT_RUN = (
    "train lm --tokenizer bytes --context 16 --num-layers 2 --dim 32 --qk-dim 16 --v-dim 16 --mlp-dim 32 "
    "--batch-size 30 --backend reference --threads 1 --steps 200 --log-every 7 --eval-every 30 --eval-size 8 "
    "--checkpoint-every 9"
)


def test_kills_in_the_middle_of_epochs_of_text(processes, tmp_path, monkeypatch):
    """SIGKILL four times; an epoch is 57.5 batches, and a resumed run reads the very next window of it."""
    (tmp_path / "text.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(1430)))
    monkeypatch.setenv("HEADCODE_TEXTS", str(tmp_path / "texts"))
    arguments = [*TEXT_RUN.split(), "--text", str(tmp_path / "text.txt")]
    main_run, run, log = tmp_path / "whole", tmp_path / "run", tmp_path / "log"
    process = processes([*arguments, "--out", str(main_run)], log)
    process.join(300)
    assert process.exitcode == 0, log.read_text()
    for goal in (9, 54, 63, 135):
        process = processes(["resume", str(run)] if run.is_dir() else [*arguments, "--out", str(run)], log)
        assert wait_for(lambda goal=goal: newest_step(run) >= goal, process)
        process.kill()
        process.join()
    process = processes(["resume", str(run)], log)
    process.join(300)
    assert process.exitcode == 0, log.read_text()
    assert_same(main_run, run)
    starts = [start["step"] for start in json.loads((run / "environment.json").read_text())["starts"]]
    assert len(starts) == 5 and starts[1:] >= [9, 54, 63, 135]
