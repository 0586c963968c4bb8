"""Records without weights: an experiment goes on from them, and nothing but exactly its runs counts."""

import json

import pytest

from headcode.cli import main
from headcode.experiments import experiment, reproduce
from headcode.experiments.base import Experiment, Table, Verdict
from headcode.experiments.records import FILES, add_records, has_records
from headcode.presets import override, preset
from headcode.sweep import SilentDisplay, SweepFailed, SweepInterrupted, config_hash, grid, run_sweep

TINY = {"num_points": 5, "dim": 8, "num_layers": 1, "num_heads": 2, "qk_dim": 4, "v_dim": 4, "mlp_dim": 8}
SHORT = {"steps": 6, "batch_size": 4, "eval_every": 3, "eval_size": 16, "checkpoint_every": 0, "log_every": 3}
BASE = override(preset("logic"), **TINY, **SHORT, backend="reference")


class Small(Experiment):
    name, title, question, claim, selection = "small", "Small", "A test?", "Nothing.", "None."

    def runs(self, scale):
        return grid(BASE, seed=range(2))

    def tables(self, study):
        return [Table("all", [{"seed": row["seed"], "r2": row["iid/r2"]} for row in study.rows])]

    def verdicts(self, study):
        return [Verdict("It runs.", None, "a test")]

    def draw(self, study, stem):
        return []


def reproduce_with_records(folder):
    """The experiment in a folder that has its own records, and what it said."""
    said, options = [], {"threads": 1, "records": folder / "records", "display": SilentDisplay()}
    return reproduce(Small(), "smoke", folder / "out", say=said.append, **options), said


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The experiment on a first machine: its outcome, and the records that it kept."""
    folder = tmp_path_factory.mktemp("first")
    outcome, said = reproduce_with_records(folder)
    assert f"The records of 2 runs are now kept in {folder / 'records'}." in said
    return outcome, folder


def no_training(*arguments, **options):
    raise AssertionError("a kept run was trained")


def test_another_machine_goes_on_from_the_records(first, tmp_path, monkeypatch):
    outcome, folder = first
    monkeypatch.setattr("headcode.experiments.run.run_sweep", no_training)
    said = []
    again = reproduce(Small(), "smoke", tmp_path, threads=1, records=folder / "records", say=said.append)
    assert said[0] == f"2 of 2 runs are taken from kept records in {folder / 'records'}, and not trained again."
    assert (tmp_path / "small/smoke/results.csv").read_bytes() == (folder / "out/small/smoke/results.csv").read_bytes()
    assert [row["seconds"] for row in again.study.rows] == [row["seconds"] for row in outcome.study.rows]
    assert json.loads((tmp_path / "small/smoke/findings.json").read_text())["taken from kept records"] == 2
    assert "2 runs, 2 of them taken from kept records" in (tmp_path / "small/smoke/findings.md").read_text()


def test_the_former_name_of_the_argument_warns_and_works(first, tmp_path, monkeypatch):
    monkeypatch.setattr("headcode.experiments.run.run_sweep", no_training)
    with pytest.warns(DeprecationWarning, match="`kept` is now called `records`"):
        again = reproduce(Small(), "smoke", tmp_path, threads=1, kept=first[1] / "records", say=lambda words: None)
    assert again.study.from_records == 2


def test_what_is_missing_is_trained_and_the_order_stays(first, tmp_path):
    outcome, folder = first
    hashes = [row["hash"] for row in outcome.study.rows]
    for name in FILES:
        (tmp_path / "records" / hashes[1]).mkdir(parents=True, exist_ok=True)
        (tmp_path / "records" / hashes[1] / name).write_bytes((folder / "records" / hashes[1] / name).read_bytes())
    again, _ = reproduce_with_records(tmp_path)
    assert [row["hash"] for row in again.study.rows] == hashes
    assert [path.name for path in (tmp_path / "out" / "runs").iterdir()] == [hashes[0]]
    assert has_records(tmp_path / "records" / hashes[0], override(BASE, seed=0))


def test_an_experiment_that_reads_weights_trains(first, tmp_path, monkeypatch):
    _, folder = first
    monkeypatch.setattr(Small, "needs_weights", True)
    monkeypatch.setattr("headcode.experiments.run.run_sweep", no_training)
    with pytest.raises(AssertionError, match="a kept run was trained"):
        reproduce(Small(), "smoke", tmp_path, records=folder / "records")
    assert {name for name in ("logic-codes", "sraven-codes", "in-context") if experiment(name).needs_weights} == {
        "logic-codes",
        "sraven-codes",
        "in-context",
    }


def test_only_whole_records_of_exactly_this_run_count(first, tmp_path):
    outcome, folder = first
    row = outcome.study.rows[0]
    source, target = folder / "records" / row["hash"], tmp_path / row["hash"]
    target.mkdir()
    assert sorted(path.name for path in source.iterdir()) == sorted(FILES)
    for name in FILES:
        (target / name).write_bytes((source / name).read_bytes())
    config = override(BASE, seed=0)
    assert has_records(target, config)
    assert not has_records(target, override(config, seed=1))
    lines = (target / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for fewer in (lines[:-1], lines[: len(lines) // 2], []):
        (target / "metrics.jsonl").write_bytes(b"".join(fewer))
        assert not has_records(target, config)
    (target / "metrics.jsonl").unlink()
    assert not has_records(target, config)


def test_records_tell_nothing_of_the_machine(first):
    _, folder = first
    for path in (folder / "records").rglob("*"):
        if path.is_file():
            content = path.read_text(encoding="utf-8")
            assert str(folder) not in content and '"command"' not in content and '"platform"' not in content


def test_a_run_that_is_not_finished_is_not_kept(tmp_path):
    (row,) = run_sweep({"a": BASE}, tmp_path / "out", threads=1, display=SilentDisplay())
    metrics = tmp_path / "out/runs" / config_hash(BASE) / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:2]))
    assert add_records([row], tmp_path / "records") == 0
    assert not (tmp_path / "records").exists()


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        (
            SweepFailed({"a": "it diverged", "b": "no room"}, [], None),
            1,
            ["a failed: it diverged", "b failed: no room"],
        ),
        (SweepInterrupted(15, 1, 3, None), 143, ["The sweep was stopped with 1 of 3 runs finished; the same command"]),
    ],
)
def test_the_command_ends_in_sentences(end, code, words, tmp_path, monkeypatch, capsys):
    def stop(*arguments, **options):
        raise end

    monkeypatch.setattr("headcode.cli.reproduce.reproduce", stop)
    with pytest.raises(SystemExit) as stopped:
        main(["reproduce", "heads", "--out", str(tmp_path)])
    lines = capsys.readouterr().err.splitlines()
    assert stopped.value.code == code and len(lines) == len(words)
    assert all(line.startswith(f"headcode: {start}") for line, start in zip(lines, words, strict=True))
