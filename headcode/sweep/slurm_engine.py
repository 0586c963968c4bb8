"""The runs of a sweep as Slurm jobs, through submitit.

A job that Slurm preempts, or whose time is over, saves its step and is put back into the queue by submitit; then it
goes on from its folder, which all nodes must see. Jobs live on when the sweep that submitted them is killed: started
again, the sweep waits for those that are at work, and a job that comes too late finds its run finished.

submitit hands its functions to the nodes as pickles in OUT/slurm; ours is a class of this module and text.
"""

import contextlib
import importlib
import json
import shlex
from pathlib import Path
from typing import Any

from headcode.processes import safe_python
from headcode.sweep.plan import Run
from headcode.sweep.process import Outcome, Worker, order_for, wait_for, worker_environment
from headcode.train import Runtime

SLURM = "slurm"
PATIENCE = 25.0
"""Seconds to save a step in: Slurm kills half a minute after it asks."""
MOST_TIMEOUTS = 10**9
"""How often a job may run out of time; submitit's own three would give a long run up, which saves each time."""
_NEVER_BEGUN = ("CANCELLED", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REQUEUED", "OUT_OF_MEMORY", "INTERRUPTED")


class SlurmEngine:
    """One job per run.

    Args:
        out: the sweep's folder; submitit's own files go to `out/slurm`.
        jobs: at most so many jobs at a time, in the queue or at work; None for all.
        runtime: its threads are the CPUs of a job.
        cluster: what submitit is to use: slurm where there is one; `local` (processes here) is for trying things out.
        timeout_minutes: of a job; when it is over, the run is requeued.
        num_gpus: GPUs of a job.
        partition: and other words for Slurm (account, qos, constraint, …) go to submitit as `slurm_…`.
    """

    queues = True

    def __init__(
        self,
        out: Path,
        jobs: int | None,
        runtime: Runtime,
        /,  # so that options of these names go to submitit, which refuses them in its own words
        cluster: str | None = None,
        timeout_minutes: int = 240,
        num_gpus: int = 0,
        **slurm: Any,
    ) -> None:
        submitit = _import_submitit()
        self._jobs, self._runtime = jobs, runtime
        python = shlex.join(safe_python())
        try:
            self._executor = submitit.AutoExecutor(
                folder=out / SLURM,
                cluster=cluster,
                slurm_python=python,
                local_python=python,
                slurm_max_num_timeout=MOST_TIMEOUTS,
                local_max_num_timeout=MOST_TIMEOUTS,
            )
            self._executor.update_parameters(
                name="headcode",
                timeout_min=timeout_minutes,
                cpus_per_task=runtime.threads or 1,
                gpus_per_node=num_gpus,
                **{f"slurm_{name}": value for name, value in slurm.items()},
            )
        except (RuntimeError, ValueError, NameError, TypeError, AssertionError) as error:
            raise ValueError(f"submitit refuses the options: {' '.join(str(error).split())}") from None
        if self._executor.cluster == "local" and cluster is None:
            raise ValueError("There is no Slurm here (no sbatch); use another engine, or cluster=local to try it out.")
        self._at_work: list[tuple[Run, Any]] = []

    def has_room(self) -> bool:
        return self._jobs is None or len(self._at_work) < self._jobs

    def start(self, run: Run) -> None:
        order = order_for(run, self._runtime, wait=True)
        self._at_work.append((run, self._executor.submit(Job(order, self._runtime.threads or 1))))

    def poll(self) -> list[tuple[Run, Outcome]]:
        ended = [(run, job) for run, job in self._at_work if job.done()]
        self._at_work = [(run, job) for run, job in self._at_work if not any(job is other for _, other in ended)]
        return [(run, _outcome(job)) for run, job in ended]

    def stop(self) -> None:
        for _, job in self._at_work:
            job.cancel(check=False)

    def close(self) -> None:
        self.stop()
        self._at_work = []


class Job:
    """What a Slurm job does: one run, in a process of its own."""

    def __init__(self, order: str, threads: int) -> None:
        self._order, self._threads = order, threads
        self._worker: Worker | None = None

    def __call__(self) -> tuple[str, str]:
        self._worker = Worker(worker_environment(self._threads), Path(json.loads(self._order)["log"]))
        with contextlib.closing(self):
            self._worker.begin(self._order)
            outcome = wait_for(self._worker)
            return outcome.state, outcome.message

    def checkpoint(self, *arguments: Any) -> Any:
        """Called by submitit before the job is put back into the queue."""
        self.close()
        return _import_submitit().helpers.DelayedSubmission(Job(self._order, self._threads))

    def close(self) -> None:
        if self._worker is not None:
            self._worker.end(PATIENCE)


def _outcome(job: Any) -> Outcome:
    import submitit

    try:
        return Outcome(*job.result())
    except submitit.core.utils.FailedJobError as error:
        return Outcome("failed", " ".join(str(error).split())[-300:])
    except submitit.core.utils.UncompletedJobError as error:
        state = str(job.state).split()[0].rstrip("+")
        words = f"its Slurm job {job.job_id} ended as {state}"
        return Outcome("lost" if state in _NEVER_BEGUN else "failed", f"{words}: {' '.join(str(error).split())[:200]}")


def _import_submitit() -> Any:
    try:
        return importlib.import_module("submitit")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "submitit is not installed; install it with: pip install 'headcode[slurm]'."
        ) from None
