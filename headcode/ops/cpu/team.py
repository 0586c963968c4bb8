"""Kernels on the threads that torch itself uses.

After a matrix product torch's OpenMP threads keep spinning for the next one. Threads of our own would have to share the
cores with them; the team that spins is there at once. So a kernel is handed to torch's own OpenMP library where that is
found, and to the pool of `threads` otherwise.
"""

import contextlib
import ctypes
import functools
import os
import re
from collections.abc import Callable
from typing import Any

from headcode.ops.cpu.threads import run_in_threads

_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_forked = False


def _note_fork() -> None:
    global _forked
    _forked = True


# The team does not survive a fork, and its library does not notice.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def run_in_team(work: Callable[[], None], num_threads: int) -> None:
    """Call `work` in this thread and in num_threads - 1 others at once; it must share out what is to be done."""
    if num_threads <= 1:
        work()
        return
    parallel = None if _forked else _openmp_parallel()
    if parallel is None:
        run_in_threads(work, num_threads)
        return
    errors: list[BaseException] = []

    def body(_: Any) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    callback = _Body(body)
    parallel(callback, None, num_threads, 0)
    if errors:
        raise errors[0]


def run_native_in_team(function: int, argument: int, num_threads: int) -> None:
    """Call compiled code, by its address and with one address, at once in this thread and num_threads - 1 others.

    The others need not hold the GIL for it, nor wait for whoever holds it.
    """
    body = _native(function)
    if num_threads <= 1:
        body(argument)
        return
    parallel = None if _forked else _openmp_parallel()
    if parallel is None:
        run_in_threads(functools.partial(body, argument), num_threads)
    else:
        parallel(body, argument, num_threads, 0)


@functools.lru_cache(maxsize=256)
def _native(function: int) -> Any:
    """Compiled code as ctypes calls it: to make this takes longer than the call."""
    return _Body(function)


@functools.cache
def _openmp_parallel() -> Callable[..., None] | None:
    """GOMP_parallel of the OpenMP library that torch has loaded; None where there is none to be found."""
    with contextlib.suppress(OSError, AttributeError):
        with open("/proc/self/maps", encoding="utf-8") as maps:
            loaded = set(re.findall(r"(/\S*lib(?:gomp|omp|iomp5)\b\S*)", maps.read()))
        # Other packages bring OpenMP libraries of their own; those have other threads.
        torchs = sorted(path for path in loaded if "/torch" in path) or sorted(loaded)
        if len(torchs) == 1:
            function = ctypes.CDLL(torchs[0]).GOMP_parallel
            function.restype = None
            function.argtypes = [_Body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            return function
    return None
