"""How the package starts Python: without modules that somebody put into the working folder, on the cores it may use."""

import os
import sys

_RUN_MODULE = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[1]]; import runpy; "
    "words = sys.argv[sys.argv.index('-m') + 1 :]; sys.argv[1:] = words[1:]; "
    "runpy.run_module(words[0], run_name='__main__', alter_sys=True)"
)


def safe_python() -> list[str]:
    """What to write for `python` in `python -m MODULE …` so that no module is taken from the working folder.

    `python -P` does that too, from 3.11 on. The folder of this package comes last: it may be a checkout, not installed.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [sys.executable, "-c", _RUN_MODULE, package]


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
