"""Twelve runs, two of them killed with SIGKILL, the sweep itself once: nothing is lost, nothing is trained twice."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from headcode.sweep.file import read_sweep
from headcode.sweep.plan import plan
from headcode.sweep.status import is_finished
from headcode.train import read_metrics
from headcode.train.folder import is_in_use, read_environments
from tests.support.sweeps import SIZES, results_of

pytestmark = [pytest.mark.kills, pytest.mark.slow]

FILE = f"""
from headcode.presets import override, preset
from headcode.sweep import grid

def sweep():
    base = override(preset("logic"), **{SIZES | {"steps": 120, "checkpoint_every": 10, "eval_every": 60}})
    yield from grid(base, method=["softmax", "linear", "hyla"], seed=range(4))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweep") / "twelve.py"
    path.write_text(FILE)
    return path


def start(file, out, log):
    command = [sys.executable, "-m", "headcode", "sweep", str(file), "--out", str(out), "--jobs", "2"]
    with log.open("ab") as output:
        return subprocess.Popen([*command, "--threads", "1", "--device", "cpu"], stdout=output, stderr=output)


@pytest.fixture(scope="module")
def undisturbed(file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    sweep = start(file, folder / "out", folder / "log")
    assert sweep.wait(400) == 0, (folder / "log").read_text()
    return folder / "out"


def wait_until(condition, sweep, seconds=200):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert sweep.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    return found


def saved_steps(run):
    """The steps that have a checkpoint."""
    return [int(folder.name[5:]) for folder in (run.folder / "checkpoints").glob("step-*")]


def in_the_middle(runs, spared=()):
    """A run that has a checkpoint, is not finished, and is being trained; and the process that trains it."""
    for run in runs:
        if run.hash in spared or is_finished(run.folder, run.config) or not is_in_use(run.folder):
            continue
        steps = saved_steps(run)
        if steps and max(steps) < run.config.steps / 2:  # time enough to send a signal
            with contextlib.suppress(OSError, ValueError):
                return run, int((run.folder / ".lock").read_text())
    return None


def test_two_runs_and_the_sweep_are_killed(file, undisturbed, tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    runs = plan(read_sweep(file), out)
    assert len(runs) == 12
    sweep = start(file, out, log)
    killed = {}
    for _ in range(2):
        run, process = wait_until(lambda: in_the_middle(runs, killed), sweep)
        os.kill(process, signal.SIGKILL)
        killed[run.hash] = run
        wait_until(lambda run=run: f"{run.name}: will go on again" in log.read_text(), sweep)
    wait_until(lambda: sum(is_finished(run.folder, run.config) for run in runs) >= 4, sweep)
    wait_until(lambda: in_the_middle(runs), sweep)
    sweep.kill()
    sweep.wait()
    done = {run.hash: read_environments(run.folder) for run in runs if is_finished(run.folder, run.config)}
    assert 4 <= len(done) < 12
    sweep = start(file, out, log)
    assert sweep.wait(400) == 0, log.read_text()
    assert "Traceback" not in log.read_text()

    for run in runs:
        steps = Counter((r["kind"], r["step"], r.get("split")) for r in read_metrics(run.folder))
        assert max(steps.values()) == 1 and is_finished(run.folder, run.config)
        starts = [entry["step"] for entry in read_environments(run.folder)]
        assert starts[0] == 0 and starts == sorted(starts)
        if run.hash in done:
            assert read_environments(run.folder) == done[run.hash], "finished runs are not touched again"
        if run.hash in killed:
            assert len(starts) >= 2 and starts[1] > 0
    begun = sum(len(read_environments(run.folder)) for run in runs)
    # One start per run, one more per kill, and one for each of the two that were at work when the sweep was killed.
    assert 12 + 2 <= begun <= 12 + 2 + 2
    assert results_of(out) == results_of(undisturbed)


def test_ctrl_c_saves_and_tells_how_to_go_on(tmp_path):
    """One run has ended by itself when the signal comes, and one never would."""
    path = tmp_path / "two.py"
    path.write_text(FILE.replace('method=["softmax", "linear", "hyla"], seed=range(4)', "steps=[120, 10**6]"))
    out, log = tmp_path / "out", tmp_path / "log"
    short, endless = plan(read_sweep(path), out)
    sweep = start(path, out, log)
    wait_until(lambda: is_finished(short.folder, short.config) and in_the_middle([endless]), sweep)
    sweep.send_signal(signal.SIGINT)
    assert sweep.wait(60) == 130
    assert not is_in_use(endless.folder) and saved_steps(endless)
    words = log.read_text()
    assert "stopping: every run saves its step" in words and "Traceback" not in words
    assert "1 of 2 runs finished; the same command again goes on from here" in words.splitlines()[-1]
    stopped = (out / "logs" / f"{endless.hash}.log").read_text()
    assert f"Training was stopped at step {max(saved_steps(endless))} and saved" in stopped


def test_two_sweeps_over_one_folder(file, undisturbed, tmp_path):
    """Side by side they share the work: every run is trained once."""
    out = tmp_path / "out"
    logs = [tmp_path / "one", tmp_path / "other"]
    sweeps = [start(file, out, log) for log in logs]
    for sweep, log in zip(sweeps, logs, strict=True):
        assert sweep.wait(400) == 0, log.read_text()
        assert "12 of 12 runs finished" in log.read_text()
    for run in plan(read_sweep(file), out):
        assert [start["step"] for start in read_environments(run.folder) if start["step"] < 120] == [0]
    assert results_of(out) == results_of(undisturbed)
