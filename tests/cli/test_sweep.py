"""`headcode sweep` and `headcode results`: what they print, what they refuse, how they end."""

import io
import json
import os
import re
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from headcode.cli import main
from headcode.cli.sweep import configs_of
from headcode.presets import override, preset
from headcode.sweep import SweepFailed, SweepInterrupted
from tests.support import ROOT
from tests.support.commands import exit_code

SETTINGS = {
    "num_points": 7,
    "dim": 10,
    "num_layers": 1,
    "num_heads": 2,
    "qk_dim": 6,
    "v_dim": 6,
    "mlp_dim": 11,
    "steps": 10,
    "batch_size": 6,
    "log_every": 5,
    "eval_size": 23,
    "eval_batch_size": 5,
    "backend": "reference",
}
SIZES = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]


def fails(capsys, *arguments):
    assert exit_code(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("headcode: ") and captured.err.count("\n") == 1
    return captured.err


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep of two methods and two seeds, by one command."""
    out = tmp_path_factory.mktemp("cli") / "out"
    words = ["--set", "method=softmax,hyla", "--set", "seed=0,1", "--device", "cpu", "--threads", "1"]
    main(["sweep", "logic", *SIZES, *words, "--out", str(out)])
    return out


def test_a_sweep_and_its_results(swept, capsys):
    main(["results", str(swept), "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [
        "method=softmax,seed=0",
        "method=softmax,seed=1",
        "method=hyla,seed=0",
        "method=hyla,seed=1",
    ]
    assert list(rows[0]) == ["name", "train/loss", "iid/r2", "compositional/r2", "novel/r2", "seconds"]
    main(["results", str(swept), "--where", "method=hyla", "--where", "seed>0", "--columns", "dim,method", "--json"])
    assert json.loads(capsys.readouterr().out) == [{"dim": 10, "method": "hyla"}]
    main(["results", str(swept), "--group-by", "method", "--columns", "iid/r2", "--json"])
    groups = json.loads(capsys.readouterr().out)
    assert [(group["method"], group["runs"]) for group in groups] == [("softmax", 2), ("hyla", 2)]
    scores = [row["iid/r2"] for row in rows if "hyla" in row["name"]]
    assert groups[1]["iid/r2"]["mean"] == pytest.approx(sum(scores) / 2) and groups[1]["iid/r2"]["num_values"] == 2


def test_results_as_tables(swept, capsys):
    main(["results", str(swept), "--sort", "compositional/r2", "--descending", "--columns", "name,compositional/r2"])
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["name", "compositional/r2"] and len(lines) == 4
    scores = [float(line.split()[1]) for line in lines]
    assert scores == sorted(scores, reverse=True)
    main(["results", str(swept), "--group-by", "method"])
    out = capsys.readouterr().out
    assert " ± " in out and out.splitlines()[-1].endswith("the runs of a group differ in: seed")
    main(["results", str(swept), "--where", "method=linear"])
    assert "no finished run" in capsys.readouterr().out


def test_the_same_sweep_again(swept, capsys):
    words = ["--set", "method=softmax,hyla", "--set", "seed=0,1", "--device", "cpu", "--threads", "1"]
    main(["sweep", "logic", *SIZES, *words, "--out", str(swept), "--json"])
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["rows"]) == 4 and captured.err.count("was finished already") == 4
    main(["sweep", "logic", *SIZES, *words, "--out", str(swept), "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1)[1].split() for line in lines] == [
        ["finished", f"method={method},seed={seed}"] for method in ("softmax", "hyla") for seed in (0, 1)
    ]


def test_values_on_the_command_line():
    def configs(*words):
        return configs_of(preset("sraven"), words)

    assert [name for name, _ in configs("dim=16,32", "steps=100")] == ["dim=16", "dim=32"]
    assert configs("dim=16,32", "steps=100")[0][1] == override(preset("sraven"), dim=16, steps=100)
    assert [name for name, _ in configs("seed=3", "steps=100")] == ["seed=3,steps=100"]
    assert [c.optimization.clip_norm for _, c in configs("clip-norm=null,0.5")] == [None, 0.5]
    assert [c.task.permute for _, c in configs("permute=true,False")] == [True, False]
    assert [c.model.norm for _, c in configs("norm=none,softmax", "method=hyla", "value_net=relu")] == [
        "none",
        "softmax",
    ]
    schedules = [c.task.aligned for _, c in configs("aligned=0.5,[[0,1],[1000,0]]")]
    assert schedules == [0.5, ((0.0, 1.0), (1000.0, 0.0))]


def test_mistakes_are_one_sentence(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "no field 'metod'" in fails(capsys, "sweep", "logic", "--set", "metod=hyla,linear")
    assert "no field 'stepz'" in fails(capsys, "sweep", "logic", "--set", "stepz=1")
    assert "method must be one of softmax" in fails(capsys, "sweep", "logic", "--set", "method=hylo")
    assert "dim must be a whole number, got 'a'" in fails(capsys, "sweep", "logic", "--set", "dim=16,a")
    assert "--set takes NAME=VALUE" in fails(capsys, "sweep", "logic", "--set", "dim")
    assert "--set dim is given twice" in fails(capsys, "sweep", "logic", "--set", "dim=16", "--set", "dim=32")
    assert "needs values to try" in fails(capsys, "sweep", "logic")
    assert "no task or sweep file 'lgic'" in fails(capsys, "sweep", "lgic", "--set", "seed=0,1")
    assert "there is no such file" in fails(capsys, "sweep", "missing.py")
    assert "is for sraven" in fails(capsys, "sweep", "logic", "--preset", "sraven", "--set", "seed=0")
    assert "no engine 'magic'" in fails(capsys, "sweep", "logic", "--set", "seed=0", "--engine", "magic")
    assert "jobs must be 1 or more" in fails(capsys, "sweep", "logic", "--set", "seed=0", "--jobs", "0")
    (tmp_path / "syntax.py").write_text("def sweep(:\n")
    assert "syntax.py is not a sweep file: line 1" in fails(capsys, "sweep", "syntax.py")
    (tmp_path / "empty.py").write_text("def sweep():\n    return []\n")
    assert "yields no runs" in fails(capsys, "sweep", "empty.py")
    (tmp_path / "twice.py").write_text(
        "from headcode.presets import preset\ndef sweep():\n"
        "    yield 'a', preset('logic')\n    yield 'a', preset('sraven')\n"
    )
    assert "Two different configurations are called 'a'" in fails(capsys, "sweep", "twice.py")
    assert "leave out --set" in fails(capsys, "sweep", "twice.py", "--set", "seed=0")
    assert "twice is a folder, not a sweep file" in fails(capsys, "sweep", folder_called(tmp_path / "twice"))
    assert "has no results" in fails(capsys, "results", tmp_path)
    assert not (tmp_path / "sweeps").exists()


def folder_called(path):
    path.mkdir()
    return path


@pytest.mark.parametrize(
    ("engine", "option", "words"),
    [
        ("local", "jobs=2", "The engine local has no option 'jobs'; use --jobs."),
        ("slurm", "out=here", "The engine slurm has no option 'out'; use --out."),
        ("ray", "allow-failures=true", "The engine ray has no option 'allow_failures'; see docs/sweeps.md"),
        ("slurm", "display=3", "The engine slurm has no option 'display'; see docs/sweeps.md"),
        ("ray", "num_gpus=one", "num_gpus must be a number, 0 or more, got 'one'."),
        ("ray", "address=123", "The address of a Ray cluster is host:port, auto or local, got 123."),
        ("slurm", "runtime=3", "submitit refuses the options"),
        ("slurm", "timeout_minutes=long", "submitit refuses the options"),
    ],
)
def test_options_that_are_not_the_engines(engine, option, words, capsys, tmp_path):
    if engine == "slurm":
        pytest.importorskip("submitit")
    local = ["--option", "cluster=local"] if engine == "slurm" else []
    command = ["sweep", "logic", "--set", "seed=0", "--engine", engine, "--out", tmp_path / "out"]
    assert words in fails(capsys, *command, *local, "--option", option)
    assert not (tmp_path / "out" / "runs").exists()


def test_language_runs_need_a_sweep_file(capsys, tmp_path):
    words = "The run 'seed=0' has no text, and sweep has no flag for one; write a sweep file that gives it"
    assert words in fails(capsys, "sweep", "lm", "--set", "seed=0,1", "--out", tmp_path)
    assert words in fails(capsys, "sweep", "lm", "--set", "seed=0,1", "--out", tmp_path, "--dry-run")
    (tmp_path / "no_text.py").write_text(
        "from headcode.presets import preset\ndef sweep():\n    yield 'a', preset('lm-small')\n"
    )
    assert "The run 'a' has no text" in fails(capsys, "sweep", tmp_path / "no_text.py", "--out", tmp_path / "out")


def test_the_sweep_file_of_the_docs_for_language_runs(capsys, tmp_path, monkeypatch):
    """The block as it stands, with smaller runs: from a file of text to results."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    (block,) = [code for code in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "# novel.py" in code]
    sizes = ", ".join(f"{name}={value!r}" for name, value in LANGUAGE_SETTINGS.items())
    assert block.count("steps=400") == 1
    Path("novel.py").write_text(block.replace("steps=400", sizes))
    Path("novel.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(500)))
    main(["sweep", "novel.py", "--device", "cpu", "--threads", "1", "--out", "out", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["name"] for row in rows] == ["method=softmax", "method=hyla"]
    assert [row["error"] for row in rows] == [None, None]
    assert all(0 < row["validation/bits_per_byte"] < 10 for row in rows)


LANGUAGE_SETTINGS = {
    "vocab_size": 290,
    "context": 16,
    "dim": 12,
    "num_layers": 1,
    "num_heads": 2,
    "qk_dim": 8,
    "v_dim": 6,
    "mlp_dim": 11,
    "steps": 6,
    "batch_size": 5,
    "eval_every": 0,
    "eval_size": 6,
    "eval_batch_size": 4,
    "backend": "reference",
}


def test_a_folder_that_cannot_be_written(capsys, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir()
    if os.geteuid() != 0:
        locked.chmod(0o500)
        assert "cannot be written" in fails(capsys, "sweep", "logic", "--set", "seed=0", "--out", locked / "out")
        return
    # Root may write anywhere but on a read-only file system.
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(locked)], capture_output=True).returncode:
        (tmp_path / "file").write_text("")
        locked = tmp_path / "file"
    try:
        assert "cannot be written" in fails(capsys, "sweep", "logic", "--set", "seed=0", "--out", locked / "out")
    finally:
        subprocess.run(["umount", str(locked)], capture_output=True)


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        (
            SweepFailed({"a": "It diverged.", "b": "It too."}, [], None),
            1,
            ["a failed: It diverged.", "b failed: It too."],
        ),
        (SweepInterrupted(15, 3, 7, None), 143, ["stopped with 3 of 7 runs finished; the same command again goes on"]),
        (SweepInterrupted(2, 3, 7, None), 130, ["the same command again"]),
    ],
)
def test_exit_codes(end, code, words, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("headcode.sweep.runner.run_sweep", Mock(side_effect=end))
    command = ("sweep", "logic", "--set", "seed=0", "--out", tmp_path)
    assert exit_code(*command) == code
    err = capsys.readouterr().err
    assert all(word in err for word in words)

    class ClosedPipe(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("sys.stderr", ClosedPipe())
    assert exit_code(*command) == code
