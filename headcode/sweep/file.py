"""A sweep as a short Python file: a function `sweep` that yields (name, config) pairs."""

import runpy
import sys
import traceback
from pathlib import Path

from headcode.run import RunConfig
from headcode.sweep.plan import Configs, pairs_of


def read_sweep(path: str | Path) -> list[tuple[str, RunConfig]]:
    """The named configurations of a sweep file, or one sentence that says what is wrong with it.

    The file is a program and is run: read one that you trust.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder, not a sweep file; give a Python file that has a function sweep().")
    if not path.is_file():
        raise ValueError(f"{path} is not a sweep file: there is no such file.")
    try:
        names = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path} is not a sweep file: {_in_words(error, path)}.") from None
    function = names.get("sweep")
    if not callable(function):
        raise ValueError(f"{path} is not a sweep file: it needs a function sweep() that yields (name, config) pairs.")
    try:
        configs: Configs = function()
        found = list(pairs_of(configs))
    except (Exception, SystemExit) as error:
        raise ValueError(f"The sweep of {path} is not valid: {_in_words(error, path).rstrip('.')}.") from None
    if not found:
        raise ValueError(f"The sweep of {path} yields no runs: it must yield at least one (name, config) pair.")
    return found


def _in_words(error: BaseException, path: Path) -> str:
    """The error and the line of the file that it comes from, where there is one."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(sys.exc_info()[2]) if frame.filename == str(path)]
    place = f"line {lines[-1]}: " if lines else ""
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return f"{place}{kind}{' '.join(str(error).split())}"
