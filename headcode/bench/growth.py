"""How the op's cost grows with length, heads, head width and batch, beside torch's softmax attention and the limit.

One of the four sizes changes at a time. The limit is the arithmetic that forward and backward need at least, at the
speed of the cores' matrix products: the roofline of a machine whose memory keeps up.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from headcode.bench.measure import medians
from headcode.bench.ops import Row, Shape, check, step
from headcode.bench.peaks import measured_peaks
from headcode.ops import METHODS

BASE = Shape(batch=16, heads=8, length=64, width=16)
AXES: dict[str, tuple[int, ...]] = {
    "length": (8, 16, 32, 64, 128, 256, 512),
    "heads": (1, 2, 4, 8, 16, 32),
    "width": (2, 4, 8, 16, 32, 64),
    "batch": (1, 2, 4, 8, 16, 32, 64),
}
LABELS = {"length": "length T", "heads": "heads H", "width": "head width D", "batch": "batch B"}
COLOURS = {"hyla": "#1b6ca8", "softmax": "#b23a48", "linear": "#e09f3e"}
MARKERS = {"hyla": "o", "softmax": "s", "linear": "^"}


def measure(methods: Sequence[str], repeats: int) -> list[Row]:
    """The fused kernels of each method and torch's softmax attention at every shape of the figure, in turns."""
    shapes = dict.fromkeys(BASE._replace(**{axis: size}) for axis, sizes in AXES.items() for size in sizes)
    rows: list[Row] = []
    for shape in shapes:
        errors = {method: check(shape, method, "cpu") for method in methods}
        runs = {method: step(shape, method, "cpu") for method in methods}
        times = medians({**runs, "torch": step(shape, "softmax", "torch")}, repeats)
        for name, seconds in times.items():
            forward_error, gradient_error = errors.get(name, (None, None))
            row = Row(
                shape=str(shape),
                method="softmax" if name == "torch" else name,
                backend="torch" if name == "torch" else "cpu",
                milliseconds=1e3 * seconds,
                times_faster_than_reference=None,
                relative_to_torch=seconds / times["torch"],
                peak_megabytes=None,
                forward_error=forward_error,
                gradient_error=gradient_error,
                threads=torch.get_num_threads(),
                repeats=repeats,
            )
            rows.append(row)
        print(
            f"{shape!s:<20}" + "  ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in times.items()),
            flush=True,
        )
    return rows


def needed_flops(shape: Shape, method: str) -> int:
    """FLOPs of forward and backward that no algorithm over pairs can avoid: backward costs twice the forward."""
    return 3 * 2 * _products(method) * shape.batch * shape.heads * shape.length**2 * shape.width


def _products(method: str) -> int:
    """Of the forward pass: scores, sums over keys, and the first layer of a value net that has two."""
    return 2 if METHODS[method].value_net == "linear" else 3


def draw(rows: Sequence[Row], path: Path) -> None:
    """Four panels of milliseconds, one for each size, with the limit that the cores' products set."""
    flops_per_second = measured_peaks()["float32"]
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    methods = list(dict.fromkeys(row.method for row in rows if row.backend == "cpu"))
    times = {(row.shape, row.method, row.backend): row.milliseconds for row in rows}
    figure, panels = pyplot.subplots(2, 2, figsize=(9.6, 7.2), sharey=True, facecolor="white")
    for (axis, sizes), panel in zip(AXES.items(), panels.flat, strict=True):
        shapes = [BASE._replace(**{axis: size}) for size in sizes]
        for method in methods:
            measured = [times[str(shape), method, "cpu"] for shape in shapes]
            style = {"color": COLOURS.get(method), "marker": MARKERS.get(method, "v"), "markersize": 5}
            panel.plot(sizes, measured, label=f"{method}, fused", **style)
        measured = [times[str(shape), "softmax", "torch"] for shape in shapes]
        panel.plot(sizes, measured, "D-", color="#6c757d", markersize=4, label="softmax, torch's SDPA")
        for products, line in ((3, "--"), (2, ":")):
            alike = [method for method in methods if _products(method) == products]
            if alike:
                bound = limits(shapes, alike[0], flops_per_second)
                panel.plot(sizes, bound, line, color="black", linewidth=1.2, label=f"limit of {', '.join(alike)}")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.set_xlabel(f"{LABELS[axis]}   ({_others(axis)})")
        panel.grid(alpha=0.3)
    for panel in panels[:, 0]:
        panel.set_ylabel("forward plus backward (ms)")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="upper center", ncols=-(-len(labels) // 2))
    limit = f"limit: the multiplications and additions of these products at {flops_per_second / 1e9:.0f} GFLOP/s, "
    limit += "the speed of a large float32 product on the same cores"
    figure.text(0.5, 0.005, limit, ha="center", va="bottom", fontsize=9)
    figure.tight_layout(rect=(0, 0.02, 1, 0.925))
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)


def limits(shapes: Sequence[Shape], method: str, flops_per_second: float) -> list[float]:
    """Milliseconds."""
    return [1e3 * needed_flops(shape, method) / flops_per_second for shape in shapes]


def _others(axis: str) -> str:
    letters = {"batch": "B", "heads": "H", "length": "T", "width": "D"}
    return " ".join(f"{letters[name]}{size}" for name, size in BASE._asdict().items() if name != axis)
