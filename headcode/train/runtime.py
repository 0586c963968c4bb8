"""The device, threads and so on of a run, which are no part of its configuration and are recorded beside it."""

import contextlib
import dataclasses
import functools
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch

from headcode.config import Config
from headcode.ops.cpu import why_no_bf16
from headcode.train.distributed import local_rank
from headcode.version import __version__

MOST_THREADS = 1024


class RunWarning(UserWarning):
    """Something that the owner of a run should know and that does not stop the run."""


class TrainingFailed(RuntimeError):
    """Training had to stop; the last good checkpoint is in place. The message says why and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runtime(Config):
    """How a run is carried out. A resumed run takes what was recorded: the last bits of its numbers depend on it."""

    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda, cuda:1, mps."""
    threads: int | None = None
    """CPU threads of torch; None leaves torch's choice."""
    compile: bool = False
    """torch.compile the model: pays off in long runs, most of all on GPUs."""
    fsdp: bool = False
    """Shard weights, gradients and optimiser state over the processes (FSDP2) instead of replicating them (DDP)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be 1 or more, got {self.threads}.")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise ValueError(f"threads must be at most {MOST_THREADS}, got {self.threads}.")


def check_memory(num_parameters: int, dtype: torch.dtype) -> None:
    """Refuse a model whose weights alone are more than this machine's memory, before any of them is made."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # a system that does not tell
        return
    needed = num_parameters * dtype.itemsize
    if needed > memory:
        raise ValueError(
            f"The model's {num_parameters:,} parameters take {needed / 2**30:,.1f} GiB, and this machine has "
            f"{memory / 2**30:,.1f} GiB of memory: make the model smaller."
        )


def find_device(name: str) -> torch.device:
    """The torch device of that name, or one sentence that says what this machine has."""
    available = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        available.append("mps")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and torch.cuda.is_available():
        name = f"cuda:{local_rank() % torch.cuda.device_count()}"
    if name not in available:
        raise ValueError(f"There is no device {name!r} here; this machine has: {', '.join(available)}.")
    return torch.device(name)


@contextlib.contextmanager
def numerics(precision: str, device: torch.device, threads: int | None) -> Iterator[None]:
    """Threads, matrix-product precision and the current GPU for the time of a run; all are put back afterwards."""
    if precision == "tf32" and device.type != "cuda":
        raise ValueError(f"precision 'tf32' is for CUDA devices, this run is on {device.type}; use float32.")
    if precision == "bf16" and device.type == "cpu" and (reason := why_no_bf16()):
        raise ValueError(
            f"precision 'bf16' on a CPU needs kernels and a processor with avx512_bf16, but {reason}; use float32."
        )
    if precision == "float64" and device.type == "mps":
        raise ValueError("precision 'float64' is not available on mps; use float32 or device cpu.")
    threads_before, products_before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    if threads is not None:
        torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        # Collectives and kernels go to the current GPU, whichever one their tensors are on.
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            yield
    finally:
        torch.set_num_threads(threads_before)
        torch.set_float32_matmul_precision(products_before)


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next step: returned to the system, every page would be cleared anew.

    A step allocates and frees the same few hundred megabytes each time; clearing pages costs a tenth of it. Other
    systems' allocators are left alone.
    """
    import ctypes

    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, 2**30)
        mallopt(trim_threshold, 2**31 - 1)


def describe_environment(runtime: Runtime, device: torch.device, precision: str, world_size: int) -> dict[str, Any]:
    """Versions, machine, threads and git state, for the run's records."""
    import numpy

    return {
        "headcode": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "world_size": world_size,
        "tf32": precision == "tf32",
        "command": sys.argv,
        "git": git_state(),
        "runtime": runtime.to_dict(),
    }


def changes_of_environment(starts: list[dict[str, Any]], now: dict[str, Any]) -> str:
    """What differs between the last start of a run and this one, of the things that change the last bits."""
    if not starts:
        return ""
    names = ("headcode", "torch", "device", "threads", "world_size")
    changed = [name for name in names if starts[-1].get(name) != now[name]]
    if starts[-1].get("runtime", {}).get("compile") != now["runtime"]["compile"]:
        changed.append("compile")
    return ", ".join(changed)


def git_state() -> dict[str, Any] | None:
    """Commit and cleanliness of the working folder's repository; None where there is none.

    The repository may be anyone's, so git runs none of the programs that its configuration names.
    """
    # No lock: git writes no index, and so calls no hook. No protocol: objects that a partial clone lacks stay away.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_ALLOW_PROTOCOL": "none"}
    settings = ["core.fsmonitor=false", f"core.hooksPath={os.devnull}"]

    def git(*arguments: str, codes: tuple[int, ...] = (0,)) -> str:
        command = ["git", *(word for setting in settings for word in ("-c", setting)), *arguments]
        finished = subprocess.run(
            command, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL, env=environment
        )
        if finished.returncode not in codes:
            finished.check_returncode()
        return finished.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        found = git("config", "--null", "--name-only", "--get-regexp", r"^filter\.", codes=(0, 1))  # 1: there is none
        filters = sorted(set(filter(None, found.split("\0"))))
        if any("=" in name for name in filters):
            return {"commit": commit, "changed": None}  # -c cannot switch off a filter of such a name
        settings += [f"{name}=" for name in filters]
        # Inside a submodule git would start anew, under the submodule's own configuration.
        changed = bool(git("status", "--porcelain", "--ignore-submodules=dirty"))
        # Without its filters (as of git-lfs) git may take a file for changed that is not.
        return {"commit": commit, "changed": None if changed and filters else changed}
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
