"""What the op costs: reference, chunked and fused CPU backends beside torch's softmax attention.

Forward plus backward, medians of interleaved runs, so that ratios inside one run mean something. Every kernel is first
held to the float64 reference, and a wrong one is not timed. Writes ops.csv, cost-against-length.png and
how-cost-grows.png.

Example: headcode bench ops --out bench --methods hyla softmax
"""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headcode.bench.measure import (
    OP_METHODS,
    check_repeats,
    check_words,
    medians,
    relative_error,
    torch_threads,
    write_csv,
)
from headcode.ops import METHODS, hyper_attention
from headcode.processes import safe_python

FORWARD_BOUND, GRADIENT_BOUND = 1e-5, 1e-4
BACKENDS = ("reference", "chunked", "cpu")


class Shape(NamedTuple):
    """B, H, T, D: queries and keys are equally many, queries, keys and values equally wide."""

    batch: int
    heads: int
    length: int
    width: int

    def __str__(self) -> str:
        return f"B{self.batch} H{self.heads} T{self.length} D{self.width}"

    @classmethod
    def parse(cls, text: str) -> "Shape":
        numbers = text.split(",")
        if len(numbers) != 4 or not all(number.isdecimal() and int(number) > 0 for number in numbers):
            raise ValueError(f"--shapes must be batch,heads,length,width, such as 128,16,36,4, got {text!r}.")
        return cls(*map(int, numbers))


# The paper's fuzzy logic (N=16 and 96) and SRAVEN, and a longer one.
SHAPES = ("128,8,16,2", "128,16,36,4", "128,8,96,2", "8,16,512,8")
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class Row(NamedTuple):
    """One line of the table and of the CSV file."""

    shape: str
    method: str
    backend: str
    milliseconds: float
    times_faster_than_reference: float | None
    relative_to_torch: float
    peak_megabytes: float | None
    forward_error: float | None
    gradient_error: float | None
    threads: int
    repeats: int


@dataclasses.dataclass(frozen=True)
class Ops:
    """Time, ratio and peak memory of every backend, per shape and method; and how cost grows."""

    out: Path = Path("bench")
    """Folder for ops.csv and the figures."""
    methods: tuple[str, ...] = ("hyla", "softmax", "linear")
    """Which methods: see headcode.METHODS."""
    repeats: int = 7
    """Runs of each backend whose median counts; at least 5."""
    threads: int = 0
    """torch.set_num_threads; 0 leaves torch's choice."""
    memory: bool = True
    """Measure peak memory, each in a fresh process (Linux only)."""
    lengths: tuple[int, ...] = LENGTHS
    """Lengths of the plot, for 4096 tokens of H16 D8 each; none leaves the plot out."""
    reference_up_to: int = 4096
    """Longest T at which the reference is measured, memory permitting: its cost grows with T², in bytes too."""
    growth: bool = True
    """Also draw the cost against length, heads, head width and batch, with the cores' limit: how-cost-grows.png."""
    shapes: tuple[str, ...] = SHAPES
    """batch,heads,length,width of every part of the table; none leaves it out."""
    device: str = "cpu"
    """`cpu`, or `cuda` for the Triton kernels; `headcode bench gpu` is the same with more dtypes."""

    def run(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"--device must be cpu or cuda, got {self.device!r}.")
        check_repeats(self.repeats)
        check_words("methods", self.methods, OP_METHODS)
        shapes = [Shape.parse(text) for text in self.shapes]
        if self.device == "cuda":
            from headcode.bench.gpu import Gpu

            Gpu(self.out, self.methods, self.shapes, ("float32",), self.repeats).run()
            return
        with torch_threads(self.threads):
            self._run(shapes)

    def _run(self, shapes: list[Shape]) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; forward plus backward, float32")
        rows = []
        if shapes or self.lengths:
            print(HEADER)
        for shape in shapes:
            for method in self.methods:
                rows += self._measure(shape, method, memory=self.memory)
        if self.lengths:
            print("cost against length (4096 tokens, H16 D8)")
            by_length = []
            for length in self.lengths:
                by_length += self._measure(Shape(max(1, 4096 // length), 16, length, 8), "hyla", memory=self.memory)
            plot(by_length, self.out / "cost-against-length.png")
            print(f"wrote {self.out / 'cost-against-length.png'}")
            rows += by_length
        if self.growth:
            from headcode.bench import growth  # which measures with this module

            print("how cost grows (one size changes at a time)")
            grown = growth.measure(self.methods, self.repeats)
            growth.draw(grown, self.out / "how-cost-grows.png")
            print(f"wrote {self.out / 'how-cost-grows.png'}")
            rows += grown
        write_csv(self.out / "ops.csv", Row._fields, rows)

    def _measure(self, shape: Shape, method: str, memory: bool) -> list[Row]:
        with_reference = shape.length <= self.reference_up_to and _reference_fits(shape)
        backends = [name for name in BACKENDS if name != "reference" or with_reference]
        errors: dict[str, tuple[float | None, float | None]]
        errors = {backend: check(shape, method, backend) for backend in backends if backend != "reference"}
        runs = {backend: step(shape, method, backend) for backend in (*backends, "torch")}
        times = medians(runs, self.repeats)
        rows = []
        for backend, seconds in times.items():
            faster = times["reference"] / seconds if "reference" in times and backend != "torch" else None
            forward_error, gradient_error = errors.get(backend, (None, None))
            row = Row(
                shape=str(shape),
                method="softmax" if backend == "torch" else method,
                backend=backend,
                milliseconds=1e3 * seconds,
                times_faster_than_reference=faster,
                relative_to_torch=seconds / times["torch"],
                peak_megabytes=peak_memory(shape, method, backend) if memory else None,
                forward_error=forward_error,
                gradient_error=gradient_error,
                threads=torch.get_num_threads(),
                repeats=self.repeats,
            )
            print(_line(row), flush=True)
            rows.append(row)
        return rows


def _reference_fits(shape: Shape) -> bool:
    """Whether the plain op, which holds several numbers per pair and head, leaves half of the free memory alone."""
    per_pair = 6 * shape.heads + 4 * shape.width
    needed = 4 * shape.batch * shape.length**2 * per_pair
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        free = 4 * 2**30
    return needed < free / 2


def inputs(shape: Shape, queries: int | None = None) -> tuple[Tensor, Tensor]:
    """A fused projection (B, T, 3·H·D), of which q, k, v are views as in a layer; and a gradient for the output."""
    batch, heads, length, width = shape
    generator = torch.Generator().manual_seed(0)
    projection = torch.randn(batch, length, 3 * heads * width, generator=generator)
    grad = torch.randn(batch, queries or length, heads, width, generator=generator).transpose(1, 2)
    return projection.requires_grad_(), grad


def split(projection: Tensor, shape: Shape) -> list[Tensor]:
    return [part.unflatten(-1, (shape.heads, shape.width)).transpose(1, 2) for part in projection.chunk(3, -1)]


def step(shape: Shape, method: str, backend: str, causal: bool = False) -> Callable[[], None]:
    """One forward and backward pass; backend `torch` is softmax attention, whatever the method."""
    projection, grad = inputs(shape)
    norm, value_net = METHODS[method].norm, METHODS[method].value_net

    def run() -> None:
        q, k, v = split(projection, shape)
        if backend == "torch":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        else:
            out = hyper_attention(q, k, v, causal=causal, norm=norm, value_net=value_net, backend=backend)
        out.backward(grad)
        projection.grad = None

    return run


def check(shape: Shape, method: str, backend: str) -> tuple[float, float]:
    """Relative RMS errors of output and worst gradient against the float64 reference; a wrong kernel is an error.

    Two batch entries, and the last 64 queries where there are more: enough to see every block of keys.
    """
    small = shape._replace(batch=min(shape.batch, 2))
    queries = min(shape.length, 64)
    projection, grad = inputs(small, queries)
    results = []
    for name, dtype in ((backend, torch.float32), ("reference", torch.float64)):
        q, k, v = (t.detach().to(dtype).requires_grad_() for t in split(projection, small))
        norm, value_net = METHODS[method].norm, METHODS[method].value_net
        out = hyper_attention(q[:, :, -queries:], k, v, norm=norm, value_net=value_net, backend=name)
        out.backward(grad.to(dtype))
        results.append([out.detach(), q.grad, k.grad, v.grad])
    errors = [relative_error(*pair) for pair in zip(*results, strict=True)]
    forward, gradient = errors[0], max(errors[1:])
    if not (forward <= FORWARD_BOUND and gradient <= GRADIENT_BOUND):
        raise ValueError(
            f"The {backend} backend is wrong for {method} at {shape} and is not timed: relative error {forward:.1e} "
            f"of the output (at most {FORWARD_BOUND:.0e}), {gradient:.1e} of a gradient (at most {GRADIENT_BOUND:.0e})."
        )
    return forward, gradient


def peak_memory(shape: Shape, method: str, backend: str) -> float | None:
    """Megabytes by which one forward and backward pass raises a process's memory at its highest, inputs not counted.

    The kernel's own high-water mark of a fresh process (VmHWM, reset just before), after a small run has loaded and
    compiled all there is to load. It counts what the allocator takes, not what is asked of it. None where there is
    no such mark.
    """
    if not Path("/proc/self/clear_refs").exists():
        return None
    arguments = [*map(str, shape), method, backend, str(torch.get_num_threads())]
    command = [*safe_python(), "-m", "headcode.bench.ops", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"The memory measurement of {backend} at {shape} failed: {done.stderr.strip()[-300:]}")
    return float(done.stdout)


def _probe_memory(batch: str, heads: str, length: str, width: str, method: str, backend: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    shape = Shape(int(batch), int(heads), int(length), int(width))
    step(shape._replace(batch=2, length=16), method, backend)()
    run = step(shape, method, backend)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status("VmHWM")
    run()
    print((_status("VmHWM") - before) / 1e3)


def _status(field: str) -> int:
    """Kilobytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field + ":")))


HEADER = (
    f"{'shape':<20}{'method':<14}{'backend':<11}{'ms':>10}{'× reference':>13}{'of torch':>10}{'peak MB':>10}"
    f"{'error':>10}{'grad error':>12}"
)


def _line(row: Row) -> str:
    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return (
        f"{row.shape:<20}{row.method:<14}{row.backend:<11}{row.milliseconds:>10.2f}"
        f"{number(row.times_faster_than_reference, '.1f'):>13}{row.relative_to_torch:>10.2f}"
        f"{number(row.peak_megabytes, '.1f'):>10}{number(row.forward_error, '.0e'):>10}"
        f"{number(row.gradient_error, '.0e'):>12}"
    )


def plot(rows: list[Row], path: Path) -> None:
    """Milliseconds, and megabytes where measured, against length, for a fixed number of tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = {
        "reference": ("HYLA, plain PyTorch", "#b23a48"),
        "chunked": ("HYLA, chunked", "#e09f3e"),
        "cpu": ("HYLA, fused", "#1b6ca8"),
        "torch": ("softmax, torch's fused", "#6c757d"),
    }
    measured = {"milliseconds": "forward plus backward (ms)", "peak_megabytes": "peak memory (MB)"}
    fields = [(field, label) for field, label in measured.items() if getattr(rows[0], field) is not None]
    figure, axes = pyplot.subplots(1, len(fields), figsize=(5.2 * len(fields), 3.8), squeeze=False)
    for axis, (field, label) in zip(axes[0], fields, strict=True):
        for backend, (name, colour) in names.items():
            points = {
                _length(row.shape): getattr(row, field)
                for row in rows
                if row.backend == backend and getattr(row, field) is not None
            }
            lengths = sorted(points)
            axis.plot(lengths, [points[length] for length in lengths], "o-", color=colour, label=name, markersize=4)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("length T (4096 tokens, H16 D8)")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)


def _length(shape: str) -> int:
    return int(shape.split()[2][1:])


if __name__ == "__main__":
    _probe_memory(*sys.argv[1:])
