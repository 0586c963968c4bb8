"""Carrying out a sweep: every run once, whatever dies on the way.

rows = run_sweep(grid(preset("logic-small"), seed=[0, 1, 2]), out="sweeps/seeds", jobs=2)

OUT/runs/HASH/       one run folder per different configuration
OUT/logs/HASH.log    what its processes said
OUT/sweep.json       the names of the runs
OUT/results.csv      a row per name of a finished run, and results.parquet
"""

import time
from pathlib import Path
from typing import Any

from headcode.files import open_own
from headcode.sweep.display import Display, RunState, SteadyDisplay, make_display
from headcode.sweep.engines import Engine, default_threads, make_engine
from headcode.sweep.plan import Configs, Run, plan
from headcode.sweep.process import Outcome
from headcode.sweep.status import Row, is_finished
from headcode.sweep.table import LOCK_FILE, ResultsTable
from headcode.train import Runtime
from headcode.train.folder import is_in_use
from headcode.train.interruption import Interruption

TICK = 0.1
LOCK_INTERVAL = 1.0
"""Seconds between two looks at a run that another process trains."""
MOST_LOSSES = 3
"""How often a run whose process was killed is started again before it counts as failed."""


class SweepFailed(RuntimeError):
    """Some runs failed; the others are finished."""

    def __init__(self, failures: dict[str, str], rows: list[Row], out: Path) -> None:
        self.failures, self.rows, self.out = failures, rows, out
        first = next(iter(failures))
        others = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        super().__init__(f"{len(failures)} of the sweep's runs failed: {first}: {failures[first]}{others}")


class SweepInterrupted(KeyboardInterrupt):
    """A signal stopped the sweep; every run that was at work has saved its step."""

    def __init__(self, signal_number: int, finished: int, total: int, out: Path) -> None:
        self.signal_number, self.out = signal_number, out
        super().__init__(
            f"The sweep was stopped with {finished} of {total} runs finished; the same command again goes on from here."
        )


def run_sweep(
    configs: Configs,
    out: str | Path,
    *,
    jobs: int | None = None,
    threads: int | None = None,
    engine: str | Engine = "local",
    device: str = "auto",
    compile: bool = False,
    allow_failures: bool = False,
    display: Display | None = None,
    **engine_options: Any,
) -> list[Row]:
    """Train every configuration and give one row of results per name, in the order given.

    What is finished in `out` is not trained again; what was begun goes on from its last checkpoint.

    Args:
        configs: a mapping, or (name, config) pairs such as those of `grid` and `zipped`.
        out: the sweep's folder.
        jobs: how many runs at a time; unless given, one here, and on a cluster as many as it has room for.
        threads: CPU threads of each run; unless given, this machine's cores divided by `jobs`, and 1 on a cluster.
        engine: local, ray, slurm, or an `Engine` of your own.
        device: auto, cpu, cuda, mps, as for a single run.
        compile: torch.compile the models.
        allow_failures: return a row with an `error` for a run that failed, instead of raising SweepFailed at the end.
        display: told what happens; lines or a live table on stderr unless given.
        engine_options: those of `headcode.sweep.ray_engine.RayEngine` and `headcode.sweep.slurm_engine.SlurmEngine`.

    Each row has name, hash, folder, task, every field of the configuration by its flat name, `train/loss`, the last
    metrics of every split (`compositional/r2`), seconds, and error (None unless the run failed).
    """
    out = Path(out)
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be 1 or more, got {jobs}.")
    if threads is None:
        threads = default_threads(jobs or 1) if engine == "local" else 1
    runtime = Runtime(device=device, threads=threads, compile=compile)
    runs = plan(configs, out)
    chosen = make_engine(engine, out, jobs, runtime, engine_options) if isinstance(engine, str) else engine
    table = ResultsTable(out)
    sweep = _Sweep(runs, chosen, table, SteadyDisplay(make_display() if display is None else display))
    try:
        _make_folder(out)
        table.announce(runs)
        sweep.carry_out()
    finally:
        chosen.close()
    try:
        table.write()
    except OSError as error:
        # Why runs failed is more to the point than that their table could not be written either.
        if not sweep.failures:
            raise ValueError(
                f"The table of results could not be written to {out} ({error.strerror or error}); the runs are "
                "finished in their folders, and the same command again writes it."
            ) from None
    rows = [_row_of(name, run, table, sweep.failures.get(run.hash)) for run in runs for name in run.names]
    if sweep.failures and not allow_failures:
        failures = {run.name: sweep.failures[run.hash] for run in runs if run.hash in sweep.failures}
        raise SweepFailed(failures, rows, out)
    return rows


class _Sweep:
    """The state of a sweep that is under way."""

    def __init__(self, runs: list[Run], engine: Engine, table: ResultsTable, display: Display) -> None:
        self.failures: dict[str, str] = {}
        """By hash: why a run failed."""
        self._runs, self._engine, self._table, self._display = runs, engine, table, display
        self._states = {run.hash: RunState(run) for run in runs}
        self._waiting: list[Run] = []
        self._not_before: dict[str, float] = {}
        """By hash: when to look again at a run that another process trains."""
        self._losses: dict[str, int] = {}
        self._next_look = 0.0

    def carry_out(self) -> None:
        """Until every run has finished or failed, or a signal asks to stop."""
        self._display.start(list(self._states.values()))
        try:
            for run in self._runs:
                if is_finished(run.folder, run.config):
                    self._note(run, "finished", "was finished already")
                else:
                    self._waiting.append(run)
            self._write_table()
            with Interruption() as interruption:
                self._work(interruption)
        finally:
            self._display.close()
        if interruption.signal_number is not None and self._unfinished():
            done = sum(state.state == "finished" for state in self._states.values())
            raise SweepInterrupted(interruption.signal_number, done, len(self._runs), self._table.out)

    def _work(self, interruption: Interruption) -> None:
        stopping = False
        while self._running() or (self._waiting and not stopping):
            if interruption.signal_number is not None and not stopping:
                stopping = True
                self._display.say("stopping: every run saves its step")
                self._engine.stop()
            while not stopping and self._engine.has_room() and (run := self._next()) is not None:
                self._start(run)
            for run, outcome in self._engine.poll():
                self._take(run, outcome, stopping)
            self._look_at_queue()
            self._display.refresh()
            time.sleep(TICK)

    def _start(self, run: Run) -> None:
        words = "goes on" if run.folder.exists() else "starts"
        try:
            self._engine.start(run)
        except Exception as error:  # of any engine: what is at work must not end because one run was refused
            self._fail(run, f"it could not be started: {_in_words(error)}")
            return
        self._note(run, *(("queued", "queued") if self._engine.queues else ("running", words)))

    def _look_at_queue(self) -> None:
        """Runs that were waiting for their turn in a cluster are at work when something holds their lock."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOCK_INTERVAL
        for run in self._runs:
            if self._states[run.hash].state == "queued" and is_in_use(run.folder):
                self._note(run, "running", "starts")

    def _next(self) -> Run | None:
        """The next run that can be started; one that another process trains has to wait."""
        now = time.monotonic()
        for run in list(self._waiting):
            if self._not_before.get(run.hash, 0.0) > now:
                continue
            if is_in_use(run.folder):
                self._wait_for_other(run)
                continue
            self._waiting.remove(run)
            if is_finished(run.folder, run.config):
                self._finish(run, "was finished by another process")
                continue
            return run
        return None

    def _wait_for_other(self, run: Run) -> None:
        self._not_before[run.hash] = time.monotonic() + LOCK_INTERVAL
        if self._states[run.hash].state != "elsewhere":
            self._note(run, "elsewhere", "is being trained by another process; waiting for it")

    def _take(self, run: Run, outcome: Outcome, stopping: bool) -> None:
        """What follows from the end of an attempt."""
        if outcome.state == "finished":
            self._finish(run, "finished")
        elif outcome.state == "locked":
            self._waiting.append(run)
            self._wait_for_other(run)
        elif outcome.state == "stopped" and stopping:
            self._note(run, "stopped", "stopped")
        elif outcome.state in ("lost", "stopped") and not stopping and self._losses.get(run.hash, 0) < MOST_LOSSES:
            self._losses[run.hash] = self._losses.get(run.hash, 0) + 1
            self._waiting.insert(0, run)
            self._note(run, "waiting", f"will go on again: {outcome.message or 'its process was stopped'}")
        elif stopping:
            self._note(run, "stopped", f"stopped: {outcome.message}")
        else:
            self._fail(run, outcome.message)

    def _finish(self, run: Run, words: str) -> None:
        self._note(run, "finished", words)
        self._write_table()

    def _fail(self, run: Run, message: str) -> None:
        self.failures[run.hash] = message
        self._note(run, "failed", f"failed: {message}")

    def _write_table(self) -> None:
        try:
            self._table.write()
        except OSError as error:
            # The runs are safe in their folders, and the table is written again.
            self._display.say(f"the table of results could not be written ({error.strerror or error})")

    def _note(self, run: Run, state: str, words: str) -> None:
        self._states[run.hash].state = state
        self._display.event(self._states[run.hash], words)

    def _running(self) -> bool:
        return any(state.state in ("running", "queued") for state in self._states.values())

    def _unfinished(self) -> bool:
        return any(state.state not in ("finished", "failed") for state in self._states.values())


def _in_words(error: Exception) -> str:
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(words.split())[:300] or type(error).__name__


def _row_of(name: str, run: Run, table: ResultsTable, error: str | None) -> Row:
    return {**table.row(name, run), "error": error}


def _make_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; choose a folder for the sweep.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        open_own(out / LOCK_FILE, "a").close()
    except OSError as error:
        raise ValueError(f"{out} cannot be written ({error.strerror or error}); choose another folder.") from None
    if (out / "config.json").is_file():
        raise ValueError(f"{out} is a run folder; choose another folder for the sweep.")
