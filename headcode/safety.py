"""Files and processes in folders where others may have put links, pipes or modules under the names that we use."""

import errno
import os
import stat
import sys
from pathlib import Path
from typing import Any

_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # Windows has neither
_RUN_MODULE = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[1]]; import runpy; "
    "words = sys.argv[sys.argv.index('-m') + 1 :]; sys.argv[1:] = words[1:]; "
    "runpy.run_module(words[0], run_name='__main__', alter_sys=True)"
)


def open_regular(path: str | Path, mode: str, **options: Any) -> Any:
    """`open` for regular files alone: a symbolic link is not followed, a pipe not waited for, neither is written to."""
    return open(path, mode, opener=_open_descriptor, **options)


def is_plain_name(name: object) -> bool:
    """Whether a name found in a file can only mean an entry of the folder that it is looked up in.

    >>> [is_plain_name(name) for name in ("model.safetensors", "..", "a/b", "C:x", "")]
    [True, False, False, False, False]
    """
    return isinstance(name, str) and name not in ("", ".", "..") and not any(mark in name for mark in "/\\:\0")


def safe_python() -> list[str]:
    """What to write for `python` in `python -m MODULE …` so that no module is taken from the working folder.

    `python -P` does that too, from 3.11 on. The folder of this package comes last: it may be a checkout, not installed.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [sys.executable, "-c", _RUN_MODULE, package]


def _open_descriptor(path: str, flags: int) -> int:
    try:
        descriptor = os.open(path, (flags & ~os.O_TRUNC) | _FLAGS, 0o666)
    except OSError:
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            raise _not_regular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path)
    if flags & os.O_TRUNC:  # only now: what is emptied is known to be ours
        os.ftruncate(descriptor, 0)
    return descriptor


def _not_regular(path: str) -> OSError:
    return OSError(errno.EINVAL, f"{path} is not a regular file but a link, a pipe or the like; remove it")
