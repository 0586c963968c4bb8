"""Where the runs of a sweep are carried out: local processes, a Ray cluster, Slurm.

An engine starts runs and reports how they ended. The runner decides which runs to start, and when to try again; the
progress of a run is read from its folder.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from headcode.processes import available_cores
from headcode.sweep.plan import Run
from headcode.sweep.process import Outcome, Worker, log_of, order_for, worker_environment
from headcode.train import Runtime

ENGINES = ("local", "ray", "slurm")
PATIENCE = 30.0
"""Seconds that runs get to save before they are killed, when the sweep itself has to end at once."""


class Engine(Protocol):
    """Carries out runs."""

    queues: bool
    """Whether a run that was started may have to wait for its turn."""

    def has_room(self) -> bool:
        """Whether another run may be started now."""

    def start(self, run: Run) -> None:
        """Begin (or go on with) a run."""

    def poll(self) -> list[tuple[Run, Outcome]]:
        """The runs that ended since the last call; returns at once."""

    def stop(self) -> None:
        """Ask all runs to save and end; `poll` tells when they did."""

    def close(self) -> None:
        """Leave no run behind."""


class LocalEngine:
    """Up to `jobs` processes on this machine, each with its own threads and, if there are several, its own GPU."""

    queues = False

    def __init__(self, jobs: int, runtime: Runtime) -> None:
        self._jobs, self._runtime = jobs, runtime
        self._workers: dict[int, Worker] = {}
        """By slot: the processes, at work or ready for the next run."""
        self._runs: dict[int, Run] = {}
        """By slot: what is being trained."""

    def has_room(self) -> bool:
        return len(self._runs) < self._jobs

    def start(self, run: Run) -> None:
        order = order_for(run, self._runtime, wait=False)
        slot = next(slot for slot in range(self._jobs) if slot not in self._runs)
        if slot in self._workers and not self._workers[slot].can_go_on():
            self._workers.pop(slot).end(PATIENCE)
        if slot not in self._workers:
            environment = worker_environment(self._runtime.threads or 1, **_gpu_of(slot, self._runtime.device))
            self._workers[slot] = Worker(environment, log_of(run))
        self._runs[slot] = run
        self._workers[slot].begin(order)

    def poll(self) -> list[tuple[Run, Outcome]]:
        ended = []
        for slot in list(self._runs):
            if (outcome := self._workers[slot].poll()) is not None:
                ended.append((self._runs.pop(slot), outcome))
        return ended

    def stop(self) -> None:
        for worker in self._workers.values():
            worker.stop()

    def close(self) -> None:
        self.stop()
        for worker in self._workers.values():
            worker.end(PATIENCE)
        self._workers, self._runs = {}, {}


def make_engine(name: str, out: Path, jobs: int | None, runtime: Runtime, options: Mapping[str, Any]) -> Engine:
    """The engine of that name; its options are the further arguments of its class."""
    if name not in ENGINES:
        raise ValueError(f"There is no engine {name!r}; the engines are: {', '.join(ENGINES)}.")
    if name == "local":
        _refuse_unknown(name, options, ())
        return LocalEngine(jobs or 1, runtime)
    if name == "ray":
        from headcode.sweep.ray_engine import RayEngine

        _refuse_unknown(name, options, ("address", "num_gpus"))
        return RayEngine(jobs, runtime, **options)
    from headcode.sweep.slurm_engine import SlurmEngine

    return SlurmEngine(out, jobs, runtime, **options)


def _refuse_unknown(name: str, options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    if unknown := [option for option in options if option not in known]:
        raise ValueError(f"The engine {name} has no option {unknown[0]!r}; it has: {', '.join(known) or 'none'}.")


def default_threads(jobs: int) -> int:
    """The cores divided among the jobs: two training runs with all cores each would take many times as long."""
    return max(1, available_cores() // jobs)


def _gpu_of(slot: int, device: str) -> dict[str, str]:
    """One GPU per job, in turn, where there are several to choose from."""
    import torch

    if device not in ("auto", "cuda") or torch.cuda.device_count() < 2:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = [gpu for gpu in visible.split(",") if gpu] or [str(i) for i in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]}
