"""`headcode warmup`: what it compiled, later commands find; and the word of commands that have to compile."""

import os
import subprocess
import sys

import pytest

from headcode.cli import main

WORD = "headcode: compiling kernels for this processor"


def headcode(*words, cache):
    command = [sys.executable, "-m", "headcode", *map(str, words)]
    environment = os.environ | {"HEADCODE_CACHE_DIR": str(cache)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run


@pytest.mark.slow
def test_after_warmup_training_compiles_nothing(tmp_path):
    run = headcode("warmup", "--presets", "logic-small", "--methods", "hyla", "linear", cache=tmp_path / "cache")
    assert "logic-small hyla" in run.stdout and "logic-small linear" in run.stdout and WORD not in run.stderr
    files = {path.name for path in (tmp_path / "cache").rglob("*.nbc")}
    options = [
        "--preset",
        "logic-small",
        "--method",
        "hyla",
        "--steps",
        2,
        "--eval-size",
        64,
        "--out",
        tmp_path / "run",
    ]
    assert WORD not in headcode("train", "logic", *options, cache=tmp_path / "cache").stderr
    assert {path.name for path in (tmp_path / "cache").rglob("*.nbc")} == files


@pytest.mark.slow
def test_a_command_that_compiles_says_so_once(tmp_path):
    first, second = (headcode("puzzle", cache=tmp_path / "cache") for _ in range(2))
    assert first.stderr.count(WORD) == 1 and WORD not in second.stderr
    assert first.stdout == second.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--methods", "dodo"], "--methods must be of"),
        (["--presets", "dodo"], "There is no preset 'dodo'"),
        (["--jobs", "0"], "--jobs must be 1 or more, got 0"),
    ],
)
def test_a_mistake_is_one_sentence(capsys, words, sentence):
    with pytest.raises(SystemExit) as stopped:
        main(["warmup", *words])
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


def test_without_numba_there_is_nothing_to_compile(capsys, monkeypatch):
    monkeypatch.setenv("HEADCODE_DISABLE_NUMBA", "1")
    with pytest.raises(SystemExit):
        main(["warmup"])
    assert "HEADCODE_DISABLE_NUMBA switches compiled kernels off" in capsys.readouterr().err
