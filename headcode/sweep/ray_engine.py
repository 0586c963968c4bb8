"""The runs of a sweep on a Ray cluster.

Ray decides where a run goes, by the CPUs and GPUs that it asks for. A run whose node is lost is started again on
another one, and goes on from its folder, which all nodes must see (a shared file system). On each node the run is a
process of its own, as on a single machine, so its results do not depend on where it ran.
"""

import importlib
import json
import math
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headcode.sweep.plan import Run
from headcode.sweep.process import Outcome, Worker, order_for, wait_for, worker_environment
from headcode.train import Runtime

NODE_RETRIES = 20
"""How often Ray starts a run again whose node or process was lost."""
PATIENCE = 30.0


class RayEngine:
    """The runs are given to Ray, which carries out as many at a time as there are CPUs and GPUs for.

    Args:
        jobs: at most so many runs at a time; None for as many as fit.
        runtime: its threads are the CPUs of a run.
        address: of the cluster (`host:port` or `auto`); unless given, that in RAY_ADDRESS, or else a cluster of this
            machine alone that lives as long as the sweep.
        num_gpus: GPUs of a run; may be a fraction.
    """

    queues = True

    def __init__(self, jobs: int | None, runtime: Runtime, address: str | None = None, num_gpus: float = 0) -> None:
        _check_options(address, num_gpus)
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        ray = import_ray(on_loopback=_is_here(address))
        self._ray, self._jobs, self._runtime, self._num_gpus = ray, jobs, runtime, num_gpus
        self._started_here = not ray.is_initialized()
        if self._started_here:
            _connect(ray, address)
        options = {"num_cpus": runtime.threads or 1, "num_gpus": num_gpus, "max_retries": NODE_RETRIES}
        self._refuse_what_never_fits(options)
        self._train: Callable[..., Any] = ray.remote(**options)(train_on_node).remote
        self._at_work: dict[Any, Run] = {}

    def has_room(self) -> bool:
        return self._jobs is None or len(self._at_work) < self._jobs

    def start(self, run: Run) -> None:
        # A run that is being saved on a node that Ray gave up still holds its folder: the new attempt waits for that.
        order = order_for(run, self._runtime, wait=True)
        self._at_work[self._train(order, self._runtime.threads or 1, self._num_gpus > 0)] = run

    def poll(self) -> list[tuple[Run, Outcome]]:
        if not self._at_work:
            return []
        done, _ = self._ray.wait(list(self._at_work), num_returns=len(self._at_work), timeout=0)
        return [(self._at_work.pop(task), self._outcome(task)) for task in done]

    def stop(self) -> None:
        for task in self._at_work:
            self._ray.cancel(task, force=False)

    def close(self) -> None:
        for task in self._at_work:
            self._ray.cancel(task, force=True)
        self._at_work = {}
        if self._started_here:
            self._ray.shutdown()

    def _outcome(self, task: Any) -> Outcome:
        try:
            return Outcome(*self._ray.get(task))
        except (self._ray.exceptions.TaskCancelledError, KeyboardInterrupt):
            return Outcome("stopped", "its task was cancelled")
        except self._ray.exceptions.RayTaskError as error:
            return Outcome("failed", " ".join(str(error.cause or error).split())[:300])
        except self._ray.exceptions.RayError as error:
            return Outcome("lost", " ".join(str(error).split())[:200])

    def _refuse_what_never_fits(self, options: dict[str, Any]) -> None:
        """Ray would wait for ever for a node with more CPUs or GPUs than any has."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        cpus, gpus = options["num_cpus"], options["num_gpus"]
        if any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes):
            return
        largest: dict[str, float] = max(nodes, key=lambda node: (node.get("GPU", 0), node.get("CPU", 0)), default={})
        raise ValueError(
            f"A run needs {cpus} CPUs and {gpus:g} GPUs, and no node of the Ray cluster has them (the largest: "
            f"{largest.get('CPU', 0):g} CPUs, {largest.get('GPU', 0):g} GPUs); give fewer with --threads or num_gpus."
        )


def train_on_node(order: str, threads: int, with_gpu: bool) -> tuple[str, str]:
    """Train one run, on whatever node this is."""
    # Ray cancels a task by an interrupt, which all processes ignore that come from the background of a shell.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Who asks for no GPU shall not use one: it may be another run's.
    environment = worker_environment(threads, **({} if with_gpu else {"CUDA_VISIBLE_DEVICES": ""}))
    worker = Worker(environment, Path(json.loads(order)["log"]))
    try:
        worker.begin(order)
        outcome = wait_for(worker)
        return outcome.state, outcome.message
    finally:
        worker.end(PATIENCE)


def import_ray(*, on_loopback: bool) -> Any:
    """Ray, with its usage reports switched off before it can send any; a cluster of this machine keeps to 127.0.0.1."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if on_loopback:
        # Ray replaces 127.0.0.1 by the machine's address in the network, unless clusters are off, as on macOS.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError:
        raise ModuleNotFoundError("Ray is not installed; install it with: pip install 'headcode[ray]'.") from None


def _is_here(address: str) -> bool:
    return address == "local" or address.rpartition(":")[0] in ("127.0.0.1", "localhost")


def _check_options(address: Any, num_gpus: Any) -> None:
    if address is not None and not isinstance(address, str):
        raise ValueError(f"The address of a Ray cluster is host:port, auto or local, got {address!r}.")
    if isinstance(num_gpus, bool) or not isinstance(num_gpus, (int, float)) or not 0 <= num_gpus < math.inf:
        raise ValueError(f"num_gpus must be a number, 0 or more, got {num_gpus!r}.")


def _connect(ray: Any, address: str) -> None:
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "configure_logging": False}
    if address == "local":
        options["include_dashboard"] = False
    elif address != "auto":
        _refuse_silence(address)
    try:
        ray.init(**options)
    except ConnectionError as error:
        raise ValueError(f"There is no Ray cluster at {address}: {str(error).splitlines()[0]}") from None
    except RuntimeError as error:  # another version of Ray or Python, for example
        raise ValueError(f"The Ray cluster at {address} cannot be used: {' '.join(str(error).split())[:300]}") from None


def _refuse_silence(address: str) -> None:
    """Ray itself would try for many minutes to reach a cluster that is not there."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"The address of a Ray cluster is host:port, auto or local, got {address!r}.")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"There is no Ray cluster at {address} ({reason}).") from None
