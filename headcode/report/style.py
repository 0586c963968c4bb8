"""How every figure looks: colour-blind-safe, legible in one column, vector and bitmap from the same drawing."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headcode.files import replace_file

COLUMN_WIDTH = 3.4
"""Inches of one column of a two-column page."""
PAGE_WIDTH = 7.0
# Okabe and Ito's palette: distinct under every common form of colour blindness.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F5B3A", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
METHOD_COLOURS = {"softmax": PALETTE[0], "linear": PALETTE[4], "hyla": PALETTE[1]}
GREY = "#8A8A8A"
_SETTINGS = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "figure.dpi": 100,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    # The same drawing gives the same bytes.
    "svg.hashsalt": "headcode",
}


@contextmanager
def canvas(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes in the house style, drawn without a display."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure, figure.subplots(rows, columns, **options)


def legend_below(figure: Any, *handles_and_labels: Any) -> Any:
    """A legend under the axes, in as few lines as the figure is wide enough for.

    Without handles and labels it has those of all axes.
    """
    renderer = figure.canvas.get_renderer()
    for columns in range(12, 0, -1):
        legend = figure.legend(*handles_and_labels, loc="outside lower center", ncols=columns)
        if columns == 1 or legend.get_window_extent(renderer).width <= figure.bbox.width:
            break
        legend.remove()
    return legend


def save(figure: Any, stem: str | Path, formats: Sequence[str] = ("svg", "png")) -> list[Path]:
    """Write the figure as STEM.svg and STEM.png (or pdf), and return the paths."""
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for ending in formats:
        path = stem.with_name(f"{stem.name}.{ending}")
        metadata = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[ending]
        picture = io.BytesIO()
        figure.savefig(picture, format=ending, dpi=250, metadata=metadata)
        replace_file(path, picture.getvalue())
        paths.append(path)
    return paths
