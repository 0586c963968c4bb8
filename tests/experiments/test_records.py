"""Records without weights: an experiment goes on from them, and nothing but exactly its runs counts."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from headcode.experiments import experiment, reproduce
from headcode.experiments.base import Experiment, Table, Verdict
from headcode.experiments.records import add_records, commit_of, find_records, has_records, unpack
from headcode.experiments.records import main as add_main
from headcode.presets import RunConfig, override, preset
from headcode.sweep import SilentDisplay, SweepFailed, SweepInterrupted, config_hash, grid, run_sweep
from tests.support import ROOT
from tests.support.commands import exit_code

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
    found = json.loads((tmp_path / "small/smoke/findings.json").read_text())
    assert found["taken from kept records"] == 2
    assert found["commits"] == sorted({row["commit"] for row in outcome.study.rows if row["commit"]})
    assert "2 runs, 2 of them taken from kept records" in (tmp_path / "small/smoke/findings.md").read_text()


def test_the_former_name_of_the_argument_warns_and_works(first, tmp_path, monkeypatch):
    monkeypatch.setattr("headcode.experiments.run.run_sweep", no_training)
    with pytest.warns(DeprecationWarning, match="`kept` is now called `records`"):
        again = reproduce(Small(), "smoke", tmp_path, threads=1, kept=first[1] / "records", say=lambda words: None)
    assert again.study.from_records == 2


def test_what_is_missing_is_trained_and_the_order_stays(first, tmp_path):
    outcome, folder = first
    hashes = [row["hash"] for row in outcome.study.rows]
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "another.jsonl").write_bytes(find_records(folder / "records", hashes)[hashes[1]] + b"\n")
    again, _ = reproduce_with_records(tmp_path)
    assert [row["hash"] for row in again.study.rows] == hashes
    assert [path.name for path in (tmp_path / "out" / "runs").iterdir()] == [hashes[0]]
    assert list(find_records(tmp_path / "records", hashes)) == [hashes[1], hashes[0]]
    assert (tmp_path / "records" / "small.jsonl").read_bytes().count(b"\n") == 1


def test_folders_of_version_0_1_are_read(first, tmp_path, monkeypatch):
    outcome, _ = first
    for row in outcome.study.rows:
        shutil.copytree(row["folder"], tmp_path / "records" / row["hash"])
    monkeypatch.setattr("headcode.experiments.run.run_sweep", no_training)
    again = reproduce(Small(), "smoke", tmp_path / "out", records=tmp_path / "records", say=lambda words: None)
    assert again.study.from_records == 2


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


def test_a_table_has_every_byte_of_the_runs_files(first, tmp_path):
    outcome, folder = first
    for row in outcome.study.rows:
        line = find_records(folder / "records", [row["hash"]])[row["hash"]]
        assert unpack(line, tmp_path / row["hash"], override(BASE, seed=row["seed"]))
        assert json.loads(line).get("commit") == row["commit"] == commit_of(Path(row["folder"]))
        for name in ("config.json", "metrics.jsonl", "timing.jsonl"):
            assert (tmp_path / row["hash"] / name).read_bytes() == Path(row["folder"], name).read_bytes()


def test_only_whole_records_of_exactly_this_run_count(first, tmp_path):
    outcome, folder = first
    config, identity = override(BASE, seed=0), outcome.study.rows[0]["hash"]
    line = find_records(folder / "records", [identity])[identity]
    assert unpack(line, tmp_path, config) and has_records(tmp_path, config)
    assert not unpack(line, tmp_path, override(config, seed=1))
    whole = json.loads(line)
    for count in (-1, len(whole["metrics"]["rows"]) // 2, 0):
        metrics = whole["metrics"] | {"rows": whole["metrics"]["rows"][:count]}
        assert not unpack(json.dumps(whole | {"metrics": metrics}).encode(), tmp_path, config)
    for damaged in (line[:-1], line[1:], b"", b"[]", line.replace(b'"rows"', b'"row"'), line.replace(b"[0, ", b"[7, ")):
        assert not unpack(damaged, tmp_path, config)


def test_the_command_adds_finished_runs_once(first, tmp_path, capsys):
    outcome, folder = first
    runs = [row["folder"] for row in outcome.study.rows]
    table = tmp_path / "mine.jsonl"
    add_main([str(table), runs[1]])
    add_main([str(table), *runs])
    add_main([str(tmp_path / "other.jsonl"), *runs])
    counts = [line.split(" of ")[0] for line in capsys.readouterr().out.splitlines()]
    assert counts == ["1", "1", "0"] and not (tmp_path / "other.jsonl").exists()
    assert table.read_bytes() == (folder / "records" / "small.jsonl").read_bytes()
    with pytest.raises(SystemExit) as end:
        add_main([str(table), str(tmp_path / "nothing")])
    assert end.value.code == 2 and "is not a run folder" in capsys.readouterr().err


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
    assert add_records([Path(row["folder"])], tmp_path / "records" / "a.jsonl") == 0
    assert not (tmp_path / "records").exists()


def test_every_line_of_the_repositorys_tables_is_a_whole_run(tmp_path):
    lines = [line for table in (ROOT / "docs/results/records").iterdir() for line in table.read_bytes().splitlines()]
    assert len(lines) >= 150
    for line in lines:
        entry = json.loads(line)
        config = RunConfig.from_dict(entry["config"])
        assert config_hash(config) == entry["hash"] and unpack(line, tmp_path / entry["hash"], config)
    assert len(list(tmp_path.iterdir())) == len(lines)  # no run is in two tables


FAILURES = {"a": "it diverged", "b": "no room"}


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        (SweepFailed(FAILURES, [], None), 1, ["a failed: it diverged", "b failed: no room"]),
        (SweepInterrupted(15, 1, 3, None), 143, ["The sweep was stopped with 1 of 3 runs finished; the same command"]),
    ],
)
def test_the_command_ends_in_sentences(end, code, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("headcode.cli.reproduce.reproduce", Mock(side_effect=end))
    assert exit_code("reproduce", "heads", "--out", tmp_path) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(words)
    assert all(line.startswith(f"headcode: {start}") for line, start in zip(lines, words, strict=True))
