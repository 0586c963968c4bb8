"""Training in processes of their own, watched by the process that started them."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headcode.files import open_own
from headcode.processes import safe_python
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
POLL_INTERVAL = 0.1
REUSED_WITHIN = 60.0
"""Seconds: a process that did its last run in less gets another one, because starting one takes a few seconds."""


class Outcome(NamedTuple):
    """How an attempt to train a run ended."""

    state: str
    """finished, failed, stopped (it saved its step), locked (another process trains it) or lost (killed)."""
    message: str = ""


class Worker:
    """A `headcode.sweep.worker` with its thread caps; it trains one run at a time."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        with open_log(log) as output:
            self._process = subprocess.Popen(
                [*safe_python(), "-m", "headcode.sweep.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=dict(environment),
                # Ctrl-C on the terminal is for the sweep, which then stops its runs in order.
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._answers = self._process.stdin, self._process.stdout
        os.set_blocking(self._answers.fileno(), False)
        self._answer = b""
        self._log = log
        self._begun = self._took = 0.0

    def begin(self, order: str) -> None:
        self._begun = time.monotonic()
        with contextlib.suppress(OSError):  # it died at once: poll will tell
            self._orders.write(order.encode() + b"\n")
            self._orders.flush()

    def poll(self) -> Outcome | None:
        """How the run ended; None while it is at work."""
        code = self._process.poll()  # before reading: what it said before it ended is then in the pipe
        self._answer += self._answers.read() or b""
        if self._answer.endswith(b"\n"):
            outcome = Outcome(**json.loads(self._answer))
            self._answer, self._took = b"", time.monotonic() - self._begun
            return outcome
        return None if code is None else self._unspoken_end(code)

    def can_go_on(self) -> bool:
        """Whether it should get another run after this one."""
        return self._process.poll() is None and self._took < REUSED_WITHIN

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
        for pipe in (self._orders, self._answers):
            with contextlib.suppress(OSError):
                pipe.close()

    def _unspoken_end(self, code: int) -> Outcome:
        if -code in (signal.SIGTERM, signal.SIGINT):
            return Outcome("stopped", "its process was stopped before it began to train")
        if code < 0:
            return Outcome("lost", f"its process was ended by {_signal_name(-code)}")
        return Outcome("failed", f"its process ended with code {code}; see {self._log}")


def wait_for(worker: Worker) -> Outcome:
    while (outcome := worker.poll()) is None:
        time.sleep(POLL_INTERVAL)
    return outcome


def order_for(run: Run, runtime: Runtime, *, wait: bool) -> str:
    """The order to train a run, for a worker, as one line of JSON."""
    order: dict[str, Any] = {
        "folder": str(run.folder.absolute()),
        "log": str(log_of(run).absolute()),
        "config": run.config.to_dict(),
        "runtime": runtime.to_dict(),
        "wait": wait,
    }
    return json.dumps(order, allow_nan=False)


def log_of(run: Run) -> Path:
    return run.folder.parent.parent / LOGS / f"{run.hash}.log"


def open_log(path: Path) -> Any:
    path.parent.mkdir(parents=True, exist_ok=True)
    return open_own(path, "ab")


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
