"""Kernels by their names, compiled when their address is asked for; on an empty cache by two processes at once.

Numba compiles one kernel at a time in a process. A first training step needs those of the forward pass, and a moment
later those of the backward pass: `compile_beside` has another process compile the latter meanwhile, which leaves them
in the cache on disk. It says which one it begins; this process takes the last of the others rather than wait. Whatever
happens to it costs time only: what is not on disk is compiled here.
"""

import atexit
import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from headcode.jit import address_of, is_kept, may_be_kept
from headcode.ops.cpu.records import Variant
from headcode.processes import available_cores, safe_python

POLL, PATIENCE = 0.02, 60.0
"""Seconds: between two looks at the disk, and until a process that does not come to an end is not waited for."""


class KernelName(NamedTuple):
    """Where a kernel is found: a module of `ops.cpu`, a name in it, and which of the kernels there if they are many."""

    module: str
    name: str
    variant: Hashable = None

    def find(self) -> Any:
        found = getattr(importlib.import_module(f"headcode.ops.cpu.{self.module}"), self.name)
        return found if self.variant is None else found[self.variant]


class _Helper:
    """Another process that compiles kernels, in their order."""

    def __init__(self, kernels: list[KernelName]) -> None:
        self._left = list(kernels)
        """Those that nobody has begun, as far as is known."""
        command = [*safe_python(), "-m", __name__, json.dumps(kernels)]
        nowhere = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=nowhere, stdout=subprocess.PIPE, stderr=nowhere)
        assert self._process.stdout is not None
        self._pipe, self._said = self._process.stdout.fileno(), ""
        os.set_blocking(self._pipe, False)

    def close(self) -> None:
        """Whoever is done with the helper, or ends, leaves no process and no pipe behind."""
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]

    def wait_for(self, kernel: KernelName) -> None:
        """Until that kernel is on disk or nobody compiles it; in the meantime others are compiled here."""
        waited = 0.0
        while not is_kept(kernel.find()):
            self._note_begun()
            if kernel in self._left:
                self._left = [other for other in self._left if other != kernel]
                return
            if other := self._take_last():
                address_of(other.find())
            elif self._process.poll() is not None or waited > PATIENCE:
                return
            else:
                time.sleep(POLL)
                waited += POLL

    def _take_last(self) -> KernelName | None:
        with contextlib.suppress(IndexError):  # another thread may have taken it
            return self._left.pop()
        return None

    def _note_begun(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._said += os.read(self._pipe, 2**16).decode()
        self._left = [kernel for kernel in self._left if f"{kernel}\n" not in self._said]


_helpers: dict[KernelName, _Helper] = {}
_addresses: dict[KernelName, int] = {}


def address(kernel: KernelName) -> int:
    """The address of a kernel, from the cache on disk or compiled now."""
    if kernel not in _addresses:
        if helper := _helpers.get(kernel):
            helper.wait_for(kernel)
            _helpers.pop(kernel, None)
            if helper not in _helpers.values():
                helper.close()
        _addresses[kernel] = address_of(kernel.find())
    return _addresses[kernel]


def compile_beside(kernels: Iterable[KernelName]) -> None:
    """Have another process compile those of these kernels that are not on disk, while this one does something else."""
    has_python = sys.executable and not getattr(sys, "frozen", False)  # or it is another program, which Python is in
    if available_cores() < 2 or not has_python or not may_be_kept("ops"):
        return
    wanted = dict.fromkeys(kernel for kernel in kernels if kernel not in _addresses and kernel not in _helpers)
    missing = [kernel for kernel in wanted if not is_kept(kernel.find())]
    if len(missing) < 2:
        return
    try:
        helper = _Helper(missing)
    except OSError:
        return
    _helpers.update(dict.fromkeys(missing, helper))


def _close_helpers() -> None:
    for helper in set(_helpers.values()):
        helper.close()
    _helpers.clear()


atexit.register(_close_helpers)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_helpers.clear)  # they are the parent's


def main(words: str) -> None:
    """Compile kernels, unless another process was faster."""
    for module, name, variant in json.loads(words):
        kernel = KernelName(module, name, Variant(*variant) if isinstance(variant, list) else variant)
        if not is_kept(kernel.find()):
            print(kernel, flush=True)
            address(kernel)


if __name__ == "__main__":
    main(sys.argv[1])
