"""What HYLA costs against torch's softmax attention (SDPA), by head width and length, full and causal.

Forward plus backward of the op, float32. Both take turns in one process, and what counts is the median of the time that
the process had a processor, so that other work on the machine counts little. HYLA's arithmetic is 1.5 times SDPA's.

Example: headcode bench widths --lengths 36 512 --widths 8 64
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from headcode.bench.measure import aligned_table, check_repeats, check_words, torch_threads, write_csv
from headcode.bench.ops import Shape, check, step

LENGTHS = (36, 100, 256, 512, 1024, 2048)
WIDTHS = (2, 4, 8, 16, 32, 64)


class Row(NamedTuple):
    """One line of the CSV file."""

    shape: str
    causal: bool
    milliseconds: float
    sdpa_milliseconds: float
    of_sdpa: float
    repeats: int


@dataclasses.dataclass(frozen=True)
class Widths:
    """Cost of one method relative to SDPA of the same shape, at every head width and length."""

    out: Path = Path("bench")
    """Folder for widths.csv."""
    method: str = "hyla"
    """Which method: see headcode.METHODS."""
    widths: tuple[int, ...] = WIDTHS
    """Head widths D."""
    lengths: tuple[int, ...] = LENGTHS
    """Lengths T, of queries and keys."""
    heads: int = 8
    """Heads H."""
    tokens: int = 2048
    """Tokens in all: the batch is as many sequences as have so many, at least one."""
    repeats: int = 7
    """Runs whose median counts; at least 5."""
    threads: int = 1
    """torch.set_num_threads; 0 leaves torch's choice."""

    def run(self) -> None:
        check_repeats(self.repeats)
        check_words("method", [self.method])
        if min(self.heads, self.tokens, *self.widths, *self.lengths) < 1:
            raise ValueError("--widths, --lengths, --heads and --tokens must be at least 1.")
        self.out.mkdir(parents=True, exist_ok=True)
        rows: list[Row] = []
        lines: list[list[str]] = []
        with torch_threads(self.threads):
            print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {self.method} of SDPA, H{self.heads}")
            for length in self.lengths:
                shapes = [Shape(max(1, self.tokens // length), self.heads, length, width) for width in self.widths]
                found = [self._measure(shape, causal) for shape in shapes for causal in (False, True)]
                cells = [f"{a.of_sdpa:.2f}, {b.of_sdpa:.2f}" for a, b in zip(found[::2], found[1::2], strict=True)]
                lines.append([f"B{shapes[0].batch} T{length}", *cells])
                print("  ".join(lines[-1]), flush=True)
                rows += found
        print("\n" + "\n".join(aligned_table(["full, causal", *(f"D {width}" for width in self.widths)], lines)) + "\n")
        write_csv(self.out / "widths.csv", Row._fields, rows)

    def _measure(self, shape: Shape, causal: bool) -> Row:
        if not causal:  # the same kernel serves both
            check(shape, self.method, "cpu")
        runs = {name: step(shape, self.method, name, causal=causal) for name in ("cpu", "torch")}
        seconds = processor_medians(runs, self.repeats)
        ratio = seconds["cpu"] / seconds["torch"]
        return Row(str(shape), causal, 1e3 * seconds["cpu"], 1e3 * seconds["torch"], ratio, self.repeats)


def processor_medians(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Seconds of processor time by name; the runs take turns, and the first turn does not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if turn:
                times[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}
