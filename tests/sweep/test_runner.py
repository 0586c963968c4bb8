"""What the runner makes of finished, failing, lost and locked runs; the engine is scripted, the trainings are real."""

import csv
import io
import json
import signal
import threading
import time

import pytest

from headcode.presets import fields_of, get_field
from headcode.sweep import SweepFailed, SweepInterrupted, config_hash, run_sweep
from headcode.sweep.display import PlainDisplay
from headcode.sweep.plan import plan
from headcode.sweep.process import Outcome
from headcode.train import read_metrics
from headcode.train.folder import RunFolder, is_in_use
from tests.support.sweeps import Listener, ScriptedEngine, small_config, train_here

LOST = Outcome("lost", "its process was ended by SIGKILL")
CONFIGS = {"a": small_config(), "b": small_config(seed=1), "c": small_config(seed=2)}


def sweep(out, configs=None, script=None, **options):
    engine, listener = ScriptedEngine(script), Listener()
    rows = run_sweep(CONFIGS if configs is None else configs, out, engine=engine, display=listener, **options)
    assert engine.closed
    return rows, engine, listener


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep")
    return out, *sweep(out)


def test_rows_say_everything(finished):
    out, rows, engine, _ = finished
    assert engine.started == ["a", "b", "c"]
    assert [row["name"] for row in rows] == ["a", "b", "c"]
    for row, config in zip(rows, CONFIGS.values(), strict=True):
        folder = out / "runs" / config_hash(config)
        assert (row["hash"], row["folder"], row["task"]) == (config_hash(config), str(folder), "logic")
        assert {field: row[field] for field in fields_of(config)} == {
            field: get_field(config, field) for field in fields_of(config)
        }
        records = read_metrics(folder)
        assert row["train/loss"] == [r["loss"] for r in records if r["kind"] == "train"][-1]
        for record in records[-3:]:
            assert record["step"] == 30 and row[f"{record['split']}/r2"] == record["r2"]
        assert {"iid/r2", "compositional/mse", "novel/loss"} <= set(row) and row["error"] is None
        timings = [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()]
        assert row["seconds"] == timings[-1]["seconds"] > 0


def test_tables_repeat_the_rows(finished):
    out, rows, _, _ = finished
    with (out / "results.csv").open() as file:
        table = list(csv.DictReader(file))
    parquet = pytest.importorskip("pyarrow.parquet")
    binary = parquet.read_table(out / "results.parquet").to_pylist()
    for row, text, entry in zip(rows, table, binary, strict=True):
        assert list(text) == list(entry) == [column for column in row if column != "error"]
        assert text["folder"] == entry["folder"] == f"runs/{row['hash']}"
        for column in ("seed", "steps", "learning_rate", "train/loss", "compositional/r2", "seconds"):
            assert float(text[column]) == entry[column] == row[column]
        assert (text["clip_norm"], entry["clip_norm"], text["causal"], entry["causal"]) == ("", None, "false", False)


def test_what_is_finished_is_not_trained_again(finished):
    out, rows, _, _ = finished
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*")}
    more = {**CONFIGS, "a again": small_config()}
    again, engine, listener = sweep(out, more)
    assert engine.started == [] and {path: path.stat().st_mtime_ns for path in before} == before
    assert {(name, words) for name, _, words in listener.events} == {(name, "was finished already") for name in "abc"}
    assert again == [rows[0], {**rows[0], "name": "a again"}, rows[1], rows[2]]


def test_a_failing_run_does_not_stop_the_others(tmp_path):
    script = {"b": [Outcome("failed", "The loss is nan at step 3.")]}
    engine, listener = ScriptedEngine(script), Listener()
    with pytest.raises(SweepFailed, match="1 of the sweep's runs failed: b: The loss is nan") as failed:
        run_sweep(CONFIGS, tmp_path, engine=engine, display=listener)
    assert failed.value.failures == {"b": "The loss is nan at step 3."}
    assert [(row["name"], row["error"]) for row in failed.value.rows] == [
        ("a", None),
        ("b", "The loss is nan at step 3."),
        ("c", None),
    ]
    told = [(name, state) for name, state, _ in listener.events]
    assert told.index(("b", "failed")) < told.index(("c", "running"))
    assert (tmp_path / "results.csv").read_text().count("\n") == 3
    rows, engine, _ = sweep(tmp_path)
    assert engine.started == ["b"] and rows[1]["error"] is None


def test_a_run_that_cannot_be_started_does_not_stop_the_others(tmp_path):
    refusals = {"a": RuntimeError("sbatch: error:\n invalid partition"), "c": OSError(28, "No space left on device")}

    class Refusing(ScriptedEngine):
        def start(self, run):
            if run.name in refusals:
                raise refusals[run.name]
            super().start(run)

    engine, listener = Refusing(), Listener()
    with pytest.raises(SweepFailed) as failed:
        run_sweep(CONFIGS, tmp_path, engine=engine, display=listener)
    assert failed.value.failures == {
        "a": "it could not be started: sbatch: error: invalid partition",
        "c": "it could not be started: No space left on device",
    }
    assert [row["error"] is None for row in failed.value.rows] == [False, True, False] and engine.started == ["b"]
    assert ("a", "failed", "failed: it could not be started: sbatch: error: invalid partition") in listener.events


def test_a_display_whose_reader_is_gone_does_not_stop_the_runs(tmp_path):
    class ClosedPipe(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    engine = ScriptedEngine()
    rows = run_sweep(CONFIGS, tmp_path, engine=engine, display=PlainDisplay(ClosedPipe(), interval=0.0))
    assert engine.started == ["a", "b", "c"] and [row["error"] for row in rows] == [None] * 3


def test_failures_can_be_allowed(tmp_path):
    rows, _, _ = sweep(tmp_path, script={"a": [Outcome("failed", "no")]}, allow_failures=True)
    assert [row["error"] for row in rows] == ["no", None, None]
    assert "compositional/r2" not in rows[0] and "compositional/r2" in rows[1]


def test_lost_runs_are_started_again_but_not_for_ever(tmp_path):
    rows, engine, listener = sweep(tmp_path / "twice", script={"a": [LOST, LOST]})
    assert engine.started == ["a", "a", "a", "b", "c"] and rows[0]["error"] is None
    assert ("a", "waiting", "will go on again: its process was ended by SIGKILL") in listener.events
    rows, engine, _ = sweep(tmp_path / "always", script={"a": [LOST] * 9}, allow_failures=True)
    assert engine.started == ["a"] * 4 + ["b", "c"]
    assert rows[0]["error"] == "its process was ended by SIGKILL" and rows[1]["error"] is None


def test_a_run_that_another_process_trains_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("headcode.sweep.runner.LOCK_INTERVAL", 0.05)
    run = plan(CONFIGS, tmp_path)[0]
    held = RunFolder.create(run.folder, run.config)
    assert is_in_use(run.folder)

    def finish():
        while not (tmp_path / "results.csv").is_file() or "\nc," not in (tmp_path / "results.csv").read_text():
            time.sleep(0.01)
        held.close()
        train_here(run)

    other = threading.Thread(target=finish)
    other.start()
    rows, engine, listener = sweep(tmp_path)
    other.join()
    # It may get the folder in the moment between the other's two locks: then it waits again, or finishes it.
    assert engine.started[:2] == ["b", "c"]
    events = [(state, words) for name, state, words in listener.events if name == "a"]
    assert events[0] == ("elsewhere", "is being trained by another process; waiting for it")
    assert events[-1][0] == "finished" and rows[0]["error"] is None
    steps = [record["step"] for record in read_metrics(run.folder) if record["kind"] == "train"]
    assert steps == [7, 14, 21, 28, 30]


def test_an_engine_that_finds_a_lock_gets_the_run_later(tmp_path, monkeypatch):
    monkeypatch.setattr("headcode.sweep.runner.LOCK_INTERVAL", 0.01)
    _, engine, _ = sweep(tmp_path, script={"a": [Outcome("locked", "in use")]})
    assert engine.started == ["a", "b", "a", "c"] or engine.started == ["a", "b", "c", "a"]


def test_a_signal_stops_the_sweep(tmp_path):
    class Interrupted(ScriptedEngine):
        def start(self, run):
            super().start(run)
            if run.name == "b":
                signal.raise_signal(signal.SIGTERM)

        def poll(self):
            return [] if "b" in self.started and not self.script else super().poll()

        def stop(self):
            self.script["b"] = [Outcome("stopped", "saved")]

    engine, listener = Interrupted(), Listener()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SweepInterrupted, match="stopped with 1 of 3 runs finished; the same command again") as stopped:
        run_sweep(CONFIGS, tmp_path, engine=engine, display=listener)
    assert stopped.value.signal_number == signal.SIGTERM and engine.started == ["a", "b"] and engine.closed
    assert signal.getsignal(signal.SIGTERM) is before
    assert listener.events[-1] == ("b", "stopped", "stopped")
    rows, engine, _ = sweep(tmp_path)
    assert engine.started == ["b", "c"] and len(rows) == 3


def test_several_sweeps_fill_one_folder(tmp_path):
    sweep(tmp_path, {"a": small_config()})
    sweep(tmp_path, {"b": small_config(seed=1)})
    names = [line.split(",")[0] for line in (tmp_path / "results.csv").read_text().splitlines()]
    assert names == ["name", "a", "b"]


def test_a_name_that_is_given_again_takes_no_row_away(tmp_path):
    """Two sweeps that name their runs alike: the later run has the name, and the earlier one its hash beside it."""

    def named():
        with (tmp_path / "results.csv").open() as file:
            return [(row["name"], row["seed"]) for row in csv.DictReader(file)]

    first, second = (config_hash(small_config(seed=seed)) for seed in (0, 2))
    sweep(tmp_path, {"a": small_config(), "b": small_config(seed=1)})
    sweep(tmp_path, {"a": small_config(seed=2)})
    assert named() == [("a", "2"), ("b", "1"), (f"a ({first})", "0")]
    # A run that somebody called just so keeps its row.
    sweep(tmp_path / "called", {"a": small_config(seed=2), f"a ({first})": small_config(seed=1)})
    sweep(tmp_path / "called", {"a": small_config()})
    assert f"a ({first})" in (tmp_path / "called" / "results.csv").read_text()
    # Back to the first: it stands there once, under its own name.
    sweep(tmp_path, {"a": small_config()})
    assert named() == [("a", "0"), ("b", "1"), (f"a ({second})", "2")]


def test_a_table_that_cannot_be_written_does_not_stop_the_runs(tmp_path, monkeypatch):
    from headcode.sweep.table import ResultsTable

    write, calls = ResultsTable.write, []

    def full_disk(table):
        calls.append(table)
        if len(calls) in (2, 3):
            raise OSError(28, "No space left on device")
        write(table)

    monkeypatch.setattr(ResultsTable, "write", full_disk)
    rows, _, listener = sweep(tmp_path)
    told = [words for _, _, words in listener.events if "could not be written (No space left on device)" in words]
    assert len(told) == 2 and len(rows) == 3 and (tmp_path / "results.csv").read_text().count("\n") == 4


def test_a_table_that_is_never_written_is_one_sentence_unless_runs_failed(tmp_path, monkeypatch):
    from headcode.sweep.table import ResultsTable

    def full_disk(table):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ResultsTable, "write", full_disk)
    with pytest.raises(
        ValueError, match=r"results could not be written to .* \(No space left on device\); the runs are"
    ):
        sweep(tmp_path / "finished")
    with pytest.raises(SweepFailed) as failed:
        sweep(tmp_path / "failed", script={"a": [Outcome("failed", "it diverged")]})
    assert failed.value.failures == {"a": "it diverged"}


def test_lost_records_come_back(tmp_path):
    config = small_config(seed=3)
    sweep(tmp_path, {"a": config})
    metrics = tmp_path / "runs" / config_hash(config) / "metrics.jsonl"
    content = metrics.read_bytes()
    metrics.write_bytes(content[: len(content) // 2])
    _, engine, _ = sweep(tmp_path, {"a": config})
    assert engine.started == ["a"] and metrics.read_bytes() == content


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"jobs": 0}, "jobs must be 1 or more"),
        ({"threads": 0}, "threads must be 1 or more"),
        ({"engine": "magic"}, "no engine 'magic'; the engines are: local, ray, slurm"),
        ({"engine": "local", "num_gpus": 1}, "engine local has no option 'num_gpus'"),
    ],
)
def test_mistakes_leave_nothing_behind(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        run_sweep(CONFIGS, tmp_path / "out", display=Listener(), **options)
    assert not (tmp_path / "out").exists()


def test_folders_that_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; choose a folder"):
        sweep(tmp_path / "file")
    with pytest.raises(ValueError, match=r"cannot be written \(Not a directory\)"):
        sweep(tmp_path / "file" / "below")
    RunFolder.create(tmp_path / "run", small_config()).close()
    with pytest.raises(ValueError, match="is a run folder"):
        sweep(tmp_path / "run")
