"""`headcode train`, `resume` and `eval`: what they print, what they refuse, and what they leave behind."""

import json
import os
import re
import subprocess
import sys

import pytest

from headcode.cli import main
from headcode.cli.train import parse
from headcode.presets import override, preset
from headcode.train import read_metrics, read_run_config
from headcode.train.folder import RunFolder
from tests.support.commands import fails

FLAGS = """--num-points 7 --dim 10 --num-heads 2 --qk-dim 6 --v-dim 6 --mlp-dim 11 --batch-size 6 --backend reference
--eval-size 23 --eval-batch-size 5 --device cpu --threads 1"""
SIZES = FLAGS.split()
RUN = ["train", "logic", *SIZES, "--steps", "12", "--log-every", "4", "--eval-every", "6", "--checkpoint-every", "5"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "run"
    main([*RUN, "--out", str(out)])
    return out


def snapshot(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_run_is_described_by_its_flags(run):
    config = read_run_config(run)
    assert (config.steps, config.task.num_points, config.model.max_length, config.batch_size) == (12, 7, 7, 6)
    assert (config.task.held_out, config.model.method, config.seed) == (0.7, "hyla", 0)
    assert [(r["step"], r["kind"]) for r in read_metrics(run) if r.get("split") in (None, "novel")] == [
        (4, "train"),
        (6, "eval"),
        (8, "train"),
        (12, "train"),
        (12, "eval"),
    ]


def test_every_kind_of_flag(tmp_path):
    flags = "--method softmax --seed 3 --clip-norm 0.5 --ema-decay 0.9 --optimizer muon --t-norm product --no-causal"
    main([*RUN, *flags.split(), "--steps", "2", "--out", str(tmp_path / "run")])
    found = read_run_config(tmp_path / "run")
    assert (found.model.method, found.seed, found.task.seed, found.task.t_norm) == ("softmax", 3, 3, "product")
    assert (found.optimization.clip_norm, found.ema_decay, found.optimization.optimizer) == (0.5, 0.9, "muon")
    curriculum = ["--aligned", "[[0, 1], [1000, 0.5]]", "--rules", "0", "1", "--num-features", "2", "--held-out", "0"]
    small = ["--steps", "2", "--batch-size", "4", "--dim", "16", "--backend", "reference", "--eval-size", "0"]
    main(["train", "sraven", *curriculum, *small, "--task-seed", "7", "--out", str(tmp_path / "puzzles")])
    task = read_run_config(tmp_path / "puzzles").task
    assert (task.aligned, task.rules, task.seed) == (((0.0, 1.0), (1000.0, 0.5)), (0, 1), 7)
    assert read_run_config(tmp_path / "puzzles").seed == 0


def test_the_same_command_again_says_what_there_is(run, capsys):
    before = snapshot(run / "checkpoints")
    main([*RUN, "--out", str(run)])
    assert "hyla on logic, seed 0, 12 steps" in capsys.readouterr().out
    main(["resume", str(run)])
    out = capsys.readouterr().out
    assert f"headcode eval {run}" in out and "compositional" in out
    assert snapshot(run / "checkpoints") == before


def test_eval_repeats_what_training_recorded(run, capsys):
    main(["eval", str(run), "--split", "compositional", "--json"])
    found = json.loads(capsys.readouterr().out)
    recorded = next(r for r in read_metrics(run) if r.get("split") == "compositional" and r["step"] == 12)
    assert {name: found[name] for name in ("step", "split", "loss", "r2", "pooled_r2", "mse")} == {
        name: recorded[name] for name in ("step", "split", "loss", "r2", "pooled_r2", "mse")
    }
    assert (found["method"], found["size"], found["task"]) == ("hyla", 23, "logic")
    main(["eval", str(run), "--json", "--size", "9"])
    everything = json.loads(capsys.readouterr().out)
    assert list(everything["splits"]) == ["iid", "compositional", "novel"] and everything["size"] == 9
    main(["eval", str(run), "--checkpoint", "best"])
    assert re.search(r"hyla on logic, step (6|12), 23 instances", capsys.readouterr().out)


def test_resume_from_nothing_and_with_the_recorded_threads(tmp_path, run, capsys):
    RunFolder.create(tmp_path / "run", read_run_config(run)).close()
    main(["resume", str(tmp_path / "run"), "--device", "cpu", "--threads", "1"])
    assert "12 steps" in capsys.readouterr().out
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    main(["resume", str(tmp_path / "run")])
    starts = json.loads((tmp_path / "run" / "environment.json").read_text())["starts"]
    assert [start["threads"] for start in starts] == [1, 1]


def test_a_dry_run_tells_the_cost_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("headcode.cli.train.PROBE_SECONDS", 0.05)
    main([*RUN, "--dry-run"])
    report = json.loads(capsys.readouterr().out)
    assert os.listdir(tmp_path) == []
    assert report["config"]["task"]["num_points"] == 7 and report["config"]["steps"] == 12
    cost = report["cost"]
    assert cost["estimated_seconds"] == pytest.approx(12 / cost["steps_per_second"], rel=0.02, abs=0.06)
    # By hand: 2 FLOPs per multiply-add, 3 passes, batch 6; a block of 7 tokens, and one that only reads the last.
    width, tokens, pairs = 10 * 6, 7, 7 * 7
    first = 7 * 3 * width + pairs * 3 * 6 + tokens * (width + 2 * 10 * 11)
    last = 7 * 2 * width + width + 7 * 3 * 6 + width + 2 * 10 * 11
    assert cost["flops_per_step"] == 3 * 6 * 2 * (7 * 5 * 10 + first + last + 10)


def test_the_default_folder_and_preset(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["train", "logic", "--preset", "logic-small", *SIZES[2:], "--steps", "1", "--method", "linear", "--seed", "2"])
    found = read_run_config(tmp_path / "runs" / "logic-small-linear-seed2")
    expected = override(preset("logic-small"), method="linear", seed=2)
    assert (found.task, found.optimization) == (expected.task, expected.optimization)
    assert "runs/logic-small-linear-seed2" in capsys.readouterr().out


def test_of_two_presets_the_last_counts():
    command = parse(["logic", "--preset", "logic-small", "--preset=logic-paper", "--steps", "7"])
    assert command.config() == override(preset("logic-paper"), steps=7)


def test_help_lists_presets_and_flags(capsys):
    for arguments, words in (
        (["train", "--help"], ["logic-paper", "sraven-width-4", "50,000 steps"]),
        (
            ["train", "logic", "--help"],
            ["--num-points", "--eval-every", "--learning-rate", "--dry-run", "--tensorboard"],
        ),
        (["train", "sraven", "--help"], ["--num-features", "--aligned"]),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        out = " ".join(capsys.readouterr().out.split())
        assert stopped.value.code == 0 and all(word in out for word in words)
    assert "--num-points" not in out


def test_mistakes(run, tmp_path, capsys):
    """Every kind of bad input: exit 2, one sentence, and nothing written."""
    before = snapshot(run)
    new = tmp_path / "new"
    for arguments, words in (
        (["train", "chess"], "There is no task 'chess'; the tasks are: logic, sraven"),
        (["train", "logic", "--preset", "paper"], "There is no preset 'paper'; the presets of logic are: logic,"),
        (["train", "logic", "--preset=sraven-small"], "The preset 'sraven-small' is for sraven; those for logic are"),
        (["train", "logic", "--num-pints", "3"], "--num-pints"),
        (["train", "logic", "--num-values", "3"], "--num-values"),
        (["train", "logic", "--steps", "many"], "--steps"),
        (["train", "logic", "--steps", "0", "--out", new], "steps must be 1 or more, got 0"),
        (["train", "logic", "--method", "magic", "--out", new], "method must be one of softmax"),
        (["train", "logic", "--num-heads", "7", "--out", new], "must be divisible by num_heads"),
        (
            ["train", "logic", "--batch-size", "10", "--accumulate", "3", "--out", new],
            "must be divisible by accumulate",
        ),
        (
            ["train", "logic", "--device", "cuda:7", "--out", new],
            "There is no device 'cuda:7' here; this machine has: cpu",
        ),
        (["train", "logic", "--precision", "tf32", "--device", "cpu", "--out", new], "'tf32' is for CUDA devices"),
        (["train", "logic", "--threads", "0", "--out", new], "threads must be 1 or more, got 0"),
        (["train", "sraven", "--aligned", "[1,", "--out", new], "--aligned takes JSON"),
        ([*RUN, "--steps", "13", "--out", run], "belongs to another run: steps is 12 there and 13 here"),
        ([*RUN, "--out", run / "metrics.jsonl"], "is a file"),
        ([*RUN, "--out", run.parent], "is not a run folder"),
        (["resume", new], "is not a run folder: there is no such folder"),
        (["resume", "zoo/logic-hyla"], "zoo/logic-hyla is a model of the zoo: its training has ended"),
        (["resume", tmp_path], "is not a run folder: it has no config.json"),
        (["resume", run, "--device", "cuda:7"], "There is no device 'cuda:7'"),
        (["eval", new], "is not a run folder"),
        (["eval", run, "--split", "test"], "has no split 'test'; it has: train, iid, compositional, novel"),
        (["eval", run, "--checkpoint", "step-3"], "has no checkpoint 'step-3'; it has: step-12"),
        (["eval", run, "--size", "0"], "--size and --batch-size must be 1 or more"),
    ):
        assert words in fails(capsys, *arguments)
        assert not new.exists()
    assert snapshot(run) == before


def test_a_folder_in_use(run, capsys):
    folder = RunFolder.open(run)
    before = snapshot(run)
    assert f"is in use by another process (process {os.getpid()})" in fails(capsys, *RUN, "--out", run)
    assert "is in use" in fails(capsys, "resume", run)
    assert snapshot(run) == before
    main(["eval", str(run), "--json"])  # reading is always possible
    folder.close()


def test_missing_trackers_name_their_extras(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert "headcode[wandb]" in fails(capsys, *RUN, "--wandb", "--out", tmp_path / "run")
    assert "headcode[tensorboard]" in fails(capsys, *RUN, "--tensorboard", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_diverges_ends_with_1(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*RUN, "--steps", "40", "--learning-rate", "1e30", "--warmup-steps", "0", "--out", str(tmp_path / "run")])
    assert stopped.value.code == 1
    words = capsys.readouterr().err
    assert re.search(r"headcode: The (loss|gradient norm) is (inf|nan) at step \d+: training stopped before", words)


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "headcode",
        *RUN,
        "--steps",
        "1000000",
        "--checkpoint-every",
        "0",
        "--out",
        str(out),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline() == "training from step 0 to 1000000\n"
        while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text():
            assert process.poll() is None
        process.send_signal(2)
        words = process.stderr.read()
    assert process.returncode == 130
    assert re.search(rf"stopped at step \d+ and saved; go on with: headcode resume {out}", words)
    assert "Traceback" not in words and list((out / "checkpoints").glob("step-*"))


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="a read-only mount needs root")
def test_a_read_only_folder(tmp_path, run):
    """On a file system that is mounted read-only: one sentence, exit 2."""
    (tmp_path / "disk").mkdir()
    if subprocess.run(["mount", "--bind", str(run), str(tmp_path / "disk")], capture_output=True).returncode:
        pytest.skip("this process may not mount")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(tmp_path / "disk")], check=True)
        for arguments in (["resume", str(tmp_path / "disk")], [*RUN, "--out", str(tmp_path / "disk")]):
            done = subprocess.run([sys.executable, "-m", "headcode", *arguments], capture_output=True, text=True)
            assert done.returncode == 2
            assert "cannot be written (Read-only file system)" in done.stderr and done.stderr.count("\n") == 1
    finally:
        subprocess.run(["umount", str(tmp_path / "disk")], check=True)
