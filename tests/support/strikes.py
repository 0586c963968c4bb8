"""A process that is struck at a chosen file operation: killed before or in the middle of it, or out of disk space.

Operations are counted while a command runs: opening a file for writing, every write that reaches the system, fsync,
rename, unlink, mkdir, rmdir, truncate. Audit events tell of all but writes and fsync, from whatever library they come.
"""

import builtins
import dataclasses
import errno
import importlib
import io
import os
import pathlib
import signal
import sys
import tempfile
from typing import Any

import headcode.report.runs
import headcode.sweep.runner  # noqa: F401
from headcode.cli import COMMANDS
from headcode.presets import preset
from tests.support import processes

# Imported, and the generator's kernels loaded, once in the server: every process forked from it has them.
for command in COMMANDS:
    importlib.import_module(f"headcode.cli.{command}")
WARM = preset("logic").task.sample("train", 0, 2)
EVENTS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink"}
GROWS = {"open", "os.mkdir", "write", "fsync"}
"""What a full disk refuses; renaming and deleting go on."""


@dataclasses.dataclass(frozen=True)
class Strike:
    """What happens, and at which file operation below the folder (counted from 1)."""

    folder: str
    at: int
    how: str
    """kill: before it. torn: killed when half of a write is done. full: no room from then on. broken: EIO, once.
    count: nothing; the number of operations is written to `folder`.count."""


class _Striker:
    def __init__(self, strike: Strike) -> None:
        self.strike, self.count = strike, 0

    def operation(self, kind: str, path: Any, data: Any = b"", write: Any = None) -> None:
        """Called before each operation; raises, kills, or lets it happen."""
        if not self._is_below(path):
            return
        self.count += 1
        how, late = self.strike.how, self.count > self.strike.at
        if how == "full" and self.count >= self.strike.at and kind in GROWS:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path if isinstance(path, str) else None)
        if how == "count" or late or self.count < self.strike.at:
            return
        if how == "broken":
            raise OSError(errno.EIO, os.strerror(errno.EIO), path if isinstance(path, str) else None)
        if how == "torn" and kind == "write":
            write(bytes(data)[: len(data) // 2])
        if how in ("kill", "torn"):
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_below(self, path: Any) -> bool:
        if isinstance(path, int):  # an open file: those of the command line itself were opened before
            return path > 2
        path = os.fsdecode(path)
        # rmtree names files relative to an open folder.
        return not os.path.isabs(path) or path == self.strike.folder or path.startswith(self.strike.folder + os.sep)


def begin(strike: Strike) -> _Striker:
    """Count from now on, in this process, until it ends."""
    striker = _Striker(strike)
    open_before, write_before, sync_before = io.open, os.write, os.fsync

    class File(io.FileIO):
        def write(self, data: Any) -> Any:
            striker.operation("write", self.name, data, super().write)
            return super().write(data)

    def opened(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
        if not set(mode) & set("wxa+"):
            return open_before(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = File(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        binary = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return binary if "b" in mode else io.TextIOWrapper(binary, encoding, errors, newline, buffering == 1)

    def write(descriptor: int, data: Any) -> int:
        striker.operation("write", descriptor, data, lambda part: write_before(descriptor, part))
        return write_before(descriptor, data)

    def sync(descriptor: int) -> None:
        striker.operation("fsync", descriptor)
        sync_before(descriptor)

    def hook(event: str, arguments: tuple) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(path, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                striker.operation("open", path)
        elif event in EVENTS:
            striker.operation(event, arguments[0])

    io.open, builtins.open, os.write, os.fsync = opened, opened, write, sync
    if hasattr(pathlib, "_NormalAccessor"):  # Python 3.10 keeps the function that was there when it was imported
        pathlib._NormalAccessor.open = staticmethod(opened)
    sys.addaudithook(hook)
    return striker


def run_struck(arguments: list[str], log: str, strike: Strike | None, environment: dict[str, str]) -> None:
    """One `headcode` command with its output in a file, under a strike."""
    os.environ.update(environment)
    tempfile.tempdir = None
    begun = []
    try:
        processes.run_command(arguments, log, lambda: strike and begun.append(begin(strike)))
    finally:
        if strike is not None and strike.how == "count":
            # Beside the folder, so that this is not counted.
            pathlib.Path(strike.folder + ".count").write_text(str(begun[0].count))
