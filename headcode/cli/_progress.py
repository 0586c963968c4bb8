"""Progress of work in parts: a bar on a terminal, a plain line a minute elsewhere; both on standard error."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:  # the help of a command needs no torch
    from headcode.analysis.runs import Tell

PLAIN_INTERVAL = 60.0


@contextlib.contextmanager
def shown(name: str, stream: TextIO | None = None) -> Iterator["Tell"]:
    """A function to be told of the progress of what has this name."""
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        yield _lines(name, stream)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(file=stream), transient=True) as bar:
        work = bar.add_task(name, total=None)
        yield lambda what, done, total: bar.update(work, description=f"{name}: {what}", completed=done, total=total)


def _lines(name: str, stream: TextIO) -> "Tell":
    last = time.monotonic()

    def tell(what: str, done: int, total: int | None) -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_INTERVAL:
            last = time.monotonic()
            print(f"{name}: {what}" + ("" if total is None else f" ({done} of {total} parts done)"), file=stream)

    return tell
