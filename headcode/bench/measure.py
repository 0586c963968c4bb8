"""What the measurements share: turns and their medians, threads, errors against a reference, files and tables."""

import contextlib
import csv
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headcode.files import open_own
from headcode.ops import METHODS
from headcode.ops.cpu import NET_CODES

FEWEST_REPEATS = 5


def medians(
    runs: Mapping[str, Callable[[], Any]], repeats: int, warmup: int = 1, wait: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Seconds by name. The runs take turns, so that whatever slows the machine slows them all.

    The first `warmup` rounds, in which kernels are compiled, do not count; `wait` is called until a device is done.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + warmup):
        for name, run in runs.items():
            wait()
            start = time.perf_counter()
            run()
            wait()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[warmup:]) for name, values in times.items()}


def timed(call: Callable[[], None], seconds: float, fewest: int) -> list[float]:
    """Seconds of each of the calls that fit in a turn of so many seconds, but of `fewest` calls in any case."""
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < fewest or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return taken


@contextlib.contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Inside the `with`, so many CPU threads of torch; None or 0 leaves torch's choice."""
    before = torch.get_num_threads()
    if threads:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def relative_error(actual: Tensor, wanted: Tensor) -> float:
    """The root mean square of the difference, relative to that of what is wanted."""
    error = (actual.double() - wanted).square().mean().sqrt()
    return float(error / wanted.square().mean().sqrt().clamp(min=1e-30))


OP_METHODS = tuple(name for name, method in METHODS.items() if method.value_net in NET_CODES)
"""Methods whose value net the kernels have: the others are these with more around them, or have no kernels to time."""


def check_words(flag: str, given: Iterable[str], allowed: Iterable[str] = METHODS) -> None:
    """Refuse a word of a flag that is not allowed."""
    for word in given:
        if word not in allowed:
            raise ValueError(f"--{flag} must be of {', '.join(allowed)}, got {word!r}.")


def check_repeats(repeats: int) -> None:
    if repeats < FEWEST_REPEATS:
        raise ValueError(f"--repeats must be at least {FEWEST_REPEATS} for a median worth the name, got {repeats}.")


def write_csv(path: Path, fields: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table and say so."""
    with open_own(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(fields)
        writer.writerows(rows)
    print(f"wrote {path}")


def markdown_table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a table."""
    titles = list(titles)
    return [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}", *(f"| {' | '.join(row)} |" for row in rows)]


def aligned_table(titles: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> list[str]:
    """The lines of a Markdown table that is also read in a terminal: the first `words` columns to the left, numbers
    to the right."""
    lines = [titles, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = ["<" if place < words else ">" for place in range(len(widths))]
    cells = [[f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)] for line in lines]
    rules = ["-" * width if side == "<" else "-" * (width - 1) + ":" for side, width in zip(sides, widths, strict=True)]
    return [f"| {' | '.join(line)} |" for line in (cells[0], rules, *cells[1:])]


def machine() -> str:
    return f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
