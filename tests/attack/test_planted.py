"""A hostile folder: modules, links, pipes and settings of git that someone planted; none is run, none is followed."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headcode.train.runtime import git_state
from tests.support import ROOT
from tests.support.attack import PATIENCE, SIZES, TRAIN, assert_sentence, run, said
from tests.support.strikes import Strike

pytestmark = pytest.mark.slow

MODULES = ["torch", "numpy", "json", "sitecustomize", "usercustomize", "safetensors", "random", "headcode", "queue"]
FILES = [".lock", "config.json", "environment.json", "metrics.jsonl", "timing.jsonl"]
DEEP_FILES = [f"checkpoints/NEWEST/{name}" for name in ("state.json", "config.json", "model.safetensors")]
VICTIM = b'{"what": "a file of somebody else"}\n'


def plant_modules(folder: Path, marker: Path) -> None:
    for name in MODULES:
        (folder / f"{name}.py").write_text(f"open({str(marker)!r}, 'a').write({name!r} + ' ')\n")


def command_in(folder: Path, tmp_path: Path, *words: object) -> subprocess.CompletedProcess:
    """The installed command, in a working folder: like any script, it does not look for modules there."""
    script = tmp_path / "bin" / "headcode-command"
    script.parent.mkdir(exist_ok=True)
    script.write_text("from headcode.cli import main\nmain()\n")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), *map(str, words)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, errors="replace"
    )


SWEEP_WORDS = [word.replace("-", "_") for word in SIZES.replace("--", "").split()]
SWEEP_SETS = [f"--set={name}={value}" for name, value in zip(SWEEP_WORDS[::2], SWEEP_WORDS[1::2], strict=True)]
COMMANDS = {
    "train": [*TRAIN, "--out", "made"],
    "report": ["report", "RUN"],
    "sweep": ["sweep", "logic", *SWEEP_SETS, "--set=steps=2", "--set=eval_every=0", "--set=seed=0", "--threads", "1"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_planted_modules(tally, whole, name, tmp_path):
    """Modules with the names of those that the command and its processes import stand in the working folder."""
    folder, marker = tmp_path / "folder", tmp_path / "ran"
    shutil.copytree(whole, folder / "run")
    plant_modules(folder, marker)
    words = [word.replace("RUN", "run") for word in COMMANDS[name]]
    with tally.attempt(name):
        done = command_in(folder, tmp_path, *words)
        assert done.returncode == 0, done.stderr
        assert not marker.exists(), f"planted modules ran: {marker.read_text()}"
    tally.check()


def settings_of(marker: Path) -> dict[str, str]:
    """Settings of a repository that make git run a command."""
    hook = f"touch {marker}; false"
    return {
        "core.fsmonitor": hook,
        "core.pager": hook,
        "filter.planted.clean": hook,
        "filter.planted.smudge": hook,
        "filter.planted.process": hook,
        "diff.external": hook,
        "core.sshCommand": hook,
        "core.hooksPath": "hooks",
    }


def repository(folder: Path, marker: Path) -> None:
    """One commit, a file that was changed since, and hooks and attributes that wait for a setting."""
    folder.mkdir()
    (folder / ".gitattributes").write_text("* filter=planted\n")
    (folder / "file").write_text("content")
    git(folder, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    (folder / "file").write_text("CONTENT")  # of the same length: git has to read it to know that it has changed
    (folder / "hooks").mkdir()
    for name in ("post-index-change", "fsmonitor-watchman", "post-checkout"):
        (folder / "hooks" / name).write_text(f"#!/bin/sh\ntouch {marker}\n")
        (folder / "hooks" / name).chmod(0o755)


def git(folder: Path, *words: str) -> None:
    command = ["git", "-c", "user.name=n", "-c", "user.email=n@example.org", *words]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def test_planted_settings_of_git(tally, tmp_path, monkeypatch):
    """A run notes the commit of the working folder's repository; no setting of that repository is carried out."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed, so nothing asks it for a commit")
    for setting in settings_of(tmp_path):
        folder, marker = tmp_path / setting, tmp_path / f"{setting}-ran"
        repository(folder, marker)
        git(folder, "config", setting, settings_of(marker)[setting])
        monkeypatch.chdir(folder)
        with tally.attempt(setting):
            state = git_state()
            assert not marker.exists(), "git ran what the repository says"
            assert state is not None and len(state["commit"]) == 40
            # Without its filter, git cannot tell whether a file was changed.
            assert state["changed"] is (None if setting.startswith("filter.") else True)
    tally.check()


def put_in_place(path: Path, kind: str, victim: Path) -> None:
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to(victim.with_name("nowhere"))
    else:
        path.symlink_to(victim)


@pytest.fixture(scope="module")
def half(whole, tmp_path_factory):
    """A run that was killed in the middle: whoever resumes it writes to all its files."""
    folder = tmp_path_factory.mktemp("half") / "run"
    assert run([*TRAIN, "--out", folder], folder.with_name("log"), Strike(str(folder), 100, "kill")) == -signal.SIGKILL
    assert (folder / "timing.jsonl").is_file() and list((folder / "checkpoints").glob("step-*"))
    return folder


def test_planted_links_and_pipes(tally, half, tmp_path):
    """One file of a run is a link to somebody else's, a pipe that nobody writes to, or a folder."""
    newest = max((half / "checkpoints").glob("step-*"), key=lambda path: int(path.name.removeprefix("step-"))).name
    cases = [(name, kind) for kind in ("link", "fifo", "twin", "dangling", "folder") for name in FILES + DEEP_FILES]
    for _ in tally.dice():
        name, kind = cases[tally.number % len(cases)]
        name = name.replace("NEWEST", newest)
        folder, log, victim = tmp_path / "run", tmp_path / "log", tmp_path / "victim"
        shutil.copytree(half, folder)
        # A twin has the very content that the run's own file would have, and is nobody's to change either.
        victim.write_bytes((folder / name).read_bytes() if kind == "twin" else VICTIM)
        before = victim.read_bytes()
        put_in_place(folder / name, kind, victim)
        with tally.attempt(f"{kind} for {name}"):
            for command in (["eval", folder, "--size", "3"], ["resume", folder], [*TRAIN, "--out", folder]):
                code = run(command, log)
                assert code in (0, 1, 2) and "Traceback" not in said(log), said(log)
                if code:
                    assert_sentence(said(log))
                assert victim.read_bytes() == before, f"{command[0]} wrote to somebody else's file"
                assert not (tmp_path / "nowhere").exists(), f"{command[0]} made a file elsewhere"
                log.unlink(missing_ok=True)
        shutil.rmtree(folder)
        for path in (log, victim, tmp_path / "nowhere"):
            path.unlink(missing_ok=True)
    tally.check()


def test_planted_links_in_a_new_run_and_a_sweep(tally, swept, tmp_path):
    """Links that wait where a run or a sweep is about to write."""
    file, _ = swept
    victim, log = tmp_path / "victim", tmp_path / "log"
    for name in [".lock", "metrics.jsonl", "timing.jsonl", "environment.json", "checkpoints"]:
        victim.write_bytes(VICTIM)
        folder = tmp_path / f"run-{name}"
        folder.mkdir()
        (folder / name).symlink_to(tmp_path if name == "checkpoints" else victim)
        with tally.attempt(f"a new run with a link for {name}"):
            code = run([*TRAIN, "--out", folder], log)
            assert code in (0, 2) and "Traceback" not in said(log), said(log)
            assert victim.read_bytes() == VICTIM
            assert not list(tmp_path.glob("step-*"))
    for name in [".lock", "results.csv", "results.parquet", "sweep.json"]:
        victim.write_bytes(VICTIM)
        folder = tmp_path / f"sweep-{name}"
        shutil.copytree(swept[1], folder)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(victim)
        with tally.attempt(f"a sweep with a link for {name}"):
            code = run(["sweep", file, "--out", folder, "--threads", "1", "--device", "cpu"], log)
            assert code in (0, 2) and "Traceback" not in said(log), said(log)
            assert victim.read_bytes() == VICTIM
    tally.check()
