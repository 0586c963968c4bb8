"""One training in a process of its own, watched by the process that started it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from headcode.sweep.plan import Run
from headcode.train import Runtime

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
LOGS = "logs"
IN_USE = 75
"""Exit code of a worker that found its run's folder locked (EX_TEMPFAIL)."""


class Outcome(NamedTuple):
    """How an attempt to train a run ended."""

    state: Literal["finished", "failed", "stopped", "locked", "lost"]
    """`locked`: another process trains it; `lost`: the process or its machine was killed."""
    message: str = ""


class TrainingProcess:
    """A worker with its thread caps; its output goes to the end of `log`."""

    def __init__(self, order: str, log: Path, environment: Mapping[str, str]) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headcode.sweep.worker"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=dict(environment),
                # Ctrl-C on the terminal is for the sweep, which then stops its runs in order.
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it died at once: poll will tell
            self._process.stdin.write(order.encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> Outcome | None:
        """How it ended; None while it is at work."""
        code = self._process.poll()
        return None if code is None else self._outcome(code)

    def wait(self) -> Outcome:
        return self._outcome(self._process.wait())

    def stop(self) -> None:
        """Ask it to save its step and end."""
        self._process.terminate()

    def end(self, patience: float) -> None:
        """Ask it to save and end; after some seconds, make it."""
        self.stop()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _outcome(self, code: int) -> Outcome:
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        if code == 0:
            return Outcome("finished")
        if code == IN_USE:
            return Outcome("locked", self._last_words())
        if code - 128 in (signal.SIGTERM, signal.SIGINT) or -code in (signal.SIGTERM, signal.SIGINT):
            return Outcome("stopped", self._last_words())
        if code < 0:
            return Outcome("lost", f"its process was ended by {_signal_name(-code)}")
        return Outcome("failed", self._last_words() or f"its process ended with code {code}; see {self._log}")

    def _last_words(self) -> str:
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode("utf-8", errors="replace").splitlines()
        spoken = [line.removeprefix("headcode: ") for line in lines if line.startswith("headcode: ")]
        return spoken[-1] if spoken else ""


def order_for(run: Run, runtime: Runtime, *, wait: bool) -> str:
    """What a worker needs to know, as one line of JSON."""
    order: dict[str, Any] = {
        "folder": str(run.folder.absolute()),
        "config": run.config.to_dict(),
        "runtime": runtime.to_dict(),
        "wait": wait,
    }
    return json.dumps(order, allow_nan=False)


def log_of(run: Run) -> Path:
    return run.folder.parent.parent / LOGS / f"{run.hash}.log"


def worker_environment(threads: int, **more: str) -> dict[str, str]:
    """This process's environment with every thread pool capped; a group of torchrun's is not passed on."""
    group = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in group}
    return environment | dict.fromkeys(THREAD_VARIABLES, str(threads)) | more


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
