"""Tasks to look at: SRAVEN as a matrix that people can solve, fuzzy logic as a surface, and both in a terminal."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headcode.files import replace_file
from headcode.tasks import _glyphs
from headcode.tasks.fuzzy_logic import FuzzyLogic

DPI = 200
HEIGHT: Any = {"cmap": "viridis", "vmin": 0, "vmax": 1}
CENTRED: Any = {"ha": "center", "va": "center"}
ANSI_COLOURS = (31, 32, 33, 34, 35, 36, 91, 92, 93, 94, 95, 96)


def draw_puzzle(
    puzzle: np.ndarray,
    num_values: int = 8,
    show_answer: bool = False,
    title: str | None = None,
    caption: str | None = None,
    numbers: bool = True,
) -> Any:
    """A SRAVEN puzzle (row, column, position) as a matplotlib Figure.

    Up to 4 features of up to 8 values become shape, colour, number and pointer, with a legend of their order; anything
    larger, and a puzzle with blank features, becomes tiles with numbers. `numbers` writes the values under each panel.
    """
    from matplotlib.figure import Figure

    cells = np.asarray(puzzle)
    if cells.ndim != 3 or cells.shape[0] != cells.shape[1]:
        raise ValueError(f"A puzzle has the shape (row, column, position) with a square grid, got {cells.shape}.")
    figures = (
        cells.shape[2] <= len(_glyphs.ATTRIBUTES) and num_values <= _glyphs.MAX_VALUES and bool((cells >= 0).all())
    )
    grid, num_features = cells.shape[0], cells.shape[2]
    panel = 1.45 if figures else max(1.0, 0.42 * int(np.ceil(np.sqrt(num_features))) + 0.3)
    under = 0.32 if numbers and figures else 0.1
    legend = 0.36 * num_features + 0.3 if figures else 0.0
    head, foot = (0.42 if title else 0.1), (0.34 if caption else 0.08)
    width = max(grid * panel + 0.3, 4.65 if figures else 3.4)
    height = head + grid * (panel + under) + legend + foot
    figure = Figure(figsize=(width, height), facecolor=_glyphs.PAPER)
    left = (width - grid * panel) / 2
    if title:
        figure.text(0.5, 1 - 0.22 / height, title, **CENTRED, fontsize=11, weight="bold", color=_glyphs.INK)
    for row in range(grid):
        for column in range(grid):
            bottom = height - head - row * (panel + under) - panel
            axes = figure.add_axes(((left + column * panel) / width, bottom / height, panel / width, panel / height))
            axes.set(xlim=(0, 1), ylim=(0, 1))
            axes.axis("off")
            hidden = row == column == grid - 1
            if hidden and not show_answer:
                _draw_question(axes)
                label = "?  " * num_features
            else:
                frame, paper = ("#1a7f37", "#effaf1") if hidden else (_glyphs.FRAME, _glyphs.PAPER)
                if figures:
                    _glyphs.draw_panel(axes, cells[row, column], frame, paper)
                else:
                    _draw_tiles(axes, cells[row, column], num_values, frame, paper)
                label = "  ".join(str(value) for value in cells[row, column])
            if numbers and figures:
                axes.text(0.5, -0.075, label.strip(), **CENTRED, fontsize=8.5, color="#5b6270")
    if figures:
        _draw_legend(figure, num_features, num_values, foot, legend)
    if caption:
        figure.text(0.5, 0.17 / height, caption, **CENTRED, fontsize=8.5, color="#5b6270")
    return figure


def _draw_question(axes: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.05"
    box = FancyBboxPatch((0.06, 0.06), 0.88, 0.88, boxstyle=style, facecolor="#f1f3f6", edgecolor=_glyphs.INK)
    box.set(linestyle=(0, (4, 3)), linewidth=1.4)
    axes.add_patch(box)
    axes.text(0.5, 0.48, "?", **CENTRED, fontsize=34, weight="bold", color="#5b6270")


def _draw_tiles(axes: Any, values: np.ndarray, num_values: int, colour: str, background: str) -> None:
    """A panel of any size: one tile with a number for each feature, coloured around the circle of values."""
    import matplotlib
    from matplotlib.patches import FancyBboxPatch, Rectangle

    wheel = matplotlib.colormaps["hsv"]
    side = int(np.ceil(np.sqrt(len(values))))
    style = "round,pad=0,rounding_size=0.04"
    axes.add_patch(
        FancyBboxPatch((0.05, 0.05), 0.9, 0.9, boxstyle=style, facecolor=background, edgecolor=colour, linewidth=1.4)
    )
    rows = int(np.ceil(len(values) / side))
    width, height = 0.82 / side, 0.82 / rows
    for k, value in enumerate(values):
        if value < 0:  # a blank feature
            continue
        x, y = 0.09 + width * (k % side), 0.91 - height * (1 + k // side)
        tint = 0.55 + 0.45 * np.array(wheel(int(value) / num_values)[:3])
        axes.add_patch(Rectangle((x + 0.02, y + 0.02), width - 0.04, height - 0.04, facecolor=tint, edgecolor="none"))
        axes.text(x + width / 2, y + height / 2, str(value), **CENTRED, fontsize=9, color=_glyphs.INK)


def _draw_legend(figure: Any, num_features: int, num_values: int, bottom: float, height: float) -> None:
    """The order of the values of each attribute: without it nobody can tell +1 from +2."""
    width_inches, height_inches = figure.get_size_inches()
    axes = figure.add_axes((0, bottom / height_inches, 1, height / height_inches))
    axes.set(xlim=(0, width_inches), ylim=(0, height))
    axes.set_aspect("equal")
    axes.axis("off")
    step, first = 0.4, (width_inches - 4.0) / 2 + 0.95
    for value in range(num_values):
        axes.text(first + step * value, height - 0.17, str(value), **CENTRED, fontsize=8, color="#5b6270")
    for k in range(num_features):
        y = height - 0.46 - 0.36 * k
        name = _glyphs.ATTRIBUTES[k]
        axes.text(first - 0.34, y, name, ha="right", va="center", fontsize=8.5, color=_glyphs.INK)
        for value in range(num_values):
            centre = (first + step * value, y)
            if name == "shape":
                _glyphs.draw_things(axes, value, "#c9ced6", 0, centre, 0.1)
            elif name == "colour":
                _glyphs.draw_things(axes, 0, _glyphs.COLOURS[value], 0, centre, 0.1)
            elif name == "number":
                _glyphs.draw_things(axes, 0, "#c9ced6", value, centre, 0.105)
            else:
                _draw_small_pointer(axes, value, centre)


def _draw_small_pointer(axes: Any, value: int, centre: tuple[float, float]) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle((centre[0] - 0.12, centre[1] - 0.12), 0.24, 0.24, facecolor=_glyphs.PAPER, edgecolor=_glyphs.FRAME)
    )
    _glyphs.draw_pointer(axes, value, centre, 0.135, 0.05)


def formula(terms: np.ndarray) -> str:
    """A function in words of logic.

    >>> formula(np.array([[1, 0], [0, 1]]))
    '(x1 ∧ ¬x2) ∨ (¬x1 ∧ x2)'
    """
    literal = [[("" if bit else "¬") + f"x{v + 1}" for v, bit in enumerate(term)] for term in np.asarray(terms)]
    return " ∨ ".join("(" + " ∧ ".join(term) + ")" for term in literal)


def draw_function(
    terms: np.ndarray,
    variables: tuple[int, int] | None = None,
    others: Sequence[float] | None = None,
    points: np.ndarray | None = None,
    t_norm: str = "zadeh",
    title: str | None = None,
) -> Any:
    """A fuzzy-logic function over two of its variables, as a surface and, with `points`, as the sequence a model sees.

    terms (term, variable). By default `variables` are the first two in which the terms differ, and `others` fixes the
    rest where the literals are true, or at 0.5 where the terms disagree. points (point, variable + 1) are [x, f(x)],
    the last one is the hidden one.
    """
    from matplotlib.figure import Figure

    terms = np.asarray(terms)
    num_variables = terms.shape[1]
    agree = (terms == terms[0]).all(axis=0)
    if variables is None and num_variables > 1:
        order = np.argsort(agree, kind="stable")
        variables = (int(min(order[:2])), int(max(order[:2])))
    if variables is None or len({*variables}) != 2 or not {*variables} <= {*range(num_variables)}:
        raise ValueError(f"Drawing takes two different variables out of 0..{num_variables - 1}, got {variables}.")
    first, second = variables
    fixed = np.array(np.where(agree, terms[0], 0.5) if others is None else others, dtype=float)
    if fixed.shape != (num_variables,):
        raise ValueError(f"others gives one value for each of the {num_variables} variables, got {len(fixed)}.")
    axis = np.linspace(0, 1, 61)
    inputs = np.tile(fixed, (61, 61, 1))
    inputs[..., first], inputs[..., second] = np.meshgrid(axis, axis, indexing="ij")
    surface = FuzzyLogic.evaluate(terms, inputs.reshape(-1, num_variables), t_norm).reshape(61, 61)

    figure = Figure(figsize=(8.6 if points is not None else 4.6, 4.4), facecolor="white")
    columns = 2 if points is not None else 1
    axes: Any = figure.add_subplot(1, columns, 1, projection="3d")
    smooth = {"rcount": 61, "ccount": 61, "linewidth": 0, "antialiased": True}
    axes.plot_surface(inputs[..., first], inputs[..., second], surface, **HEIGHT, **smooth)
    axes.set(zlim=(0, 1), xlabel=f"x{first + 1}", ylabel=f"x{second + 1}", zlabel="f")
    # Stand at the low side, so that nothing hides behind a ridge.
    centred = inputs[..., (first, second)] - 0.5
    downhill = -((surface - surface.mean())[..., None] * centred).mean(axis=(0, 1))
    if np.abs(downhill).max() < 1e-9:
        downhill = min((surface[-i, -j], (i - 0.5, j - 0.5)) for i in (0, 1) for j in (0, 1))[1]
    axes.view_init(elev=32, azim=float(np.degrees(np.arctan2(downhill[1], downhill[0]))) + 25)
    rest = [f"x{v + 1} = {fixed[v]:g}" for v in range(num_variables) if v not in variables]
    axes.set_title(f"where {', '.join(rest)}" if rest else "", fontsize=9.5)
    if points is not None:
        _scatter(figure, np.asarray(points), first, second)
    figure.suptitle((f"{title}\n" if title else "") + f"f = {formula(terms)}", fontsize=10.5, y=0.98)
    figure.subplots_adjust(left=0.04, right=0.93, bottom=0.12, top=0.82, wspace=0.22)
    return figure


def _scatter(figure: Any, points: np.ndarray, first: int, second: int) -> None:
    axes = figure.add_subplot(1, 2, 2)
    x, y, values = points[:-1, (first, second, -1)].T
    shown = axes.scatter(x, y, c=values, **HEIGHT, s=60, edgecolor=_glyphs.INK, linewidth=0.6)
    x, y = points[-1, first], points[-1, second]
    axes.scatter([x], [y], s=190, color="white", edgecolor="#d55e00", linewidth=2, zorder=4)
    axes.text(x, y - 0.004, "?", **CENTRED, fontsize=11, weight="bold", color="#d55e00", zorder=5)
    axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), xlabel=f"x{first + 1}", ylabel=f"x{second + 1}", aspect="equal")
    axes.set_title("the points in context, and the hidden one", fontsize=9.5)
    figure.colorbar(shown, ax=axes, label="f(x)", fraction=0.046, pad=0.04)


def save(figure: Any, path: str | Path) -> Path:
    """Writes a figure as PNG or SVG, by the name's ending; the same figure gives the same file."""
    import matplotlib

    path = Path(path)
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"A picture's name ends in .png or .svg, got {path.name!r}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    kind, picture = path.suffix.lower()[1:], io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "headcode"}):
        figure.savefig(picture, format=kind, dpi=DPI, metadata={"Date": None} if kind == "svg" else None)
    replace_file(path, picture.getvalue())
    return path


def puzzle_text(puzzle: np.ndarray, show_answer: bool = False, colour: bool = False) -> str:
    """A puzzle for the terminal: each panel's values in position order, in a frame.

    >>> print(puzzle_text(np.array([[[3, 1], [5, 4]], [[7, 2], [2, 0]]])))
    ┌─────┬─────┐
    │ 3 1 │ 5 4 │
    ├─────┼─────┤
    │ 7 2 │ ? ? │
    └─────┴─────┘
    """
    cells = np.asarray(puzzle)
    grid = len(cells)
    shown = cells.reshape(-1, cells.shape[2])
    width = len(str(int((shown if show_answer else shown[:-1]).max())))

    def word(value: Any) -> str:
        if value == "?":
            return f"{value:>{width}}"
        text = f"{'·' if value < 0 else value:>{width}}"
        return f"\x1b[1;{ANSI_COLOURS[int(value) % len(ANSI_COLOURS)]}m{text}\x1b[0m" if colour and value >= 0 else text

    bar = "─" * (cells.shape[2] * (width + 1) + 1)
    lines = ["┌" + "┬".join([bar] * grid) + "┐"]
    for row in range(grid):
        panels = []
        for column in range(grid):
            hidden = row == column == grid - 1 and not show_answer
            panels.append(" ".join(word("?" if hidden else value) for value in cells[row, column]))
        lines.append("│ " + " │ ".join(panels) + " │")
        lines.append("├" + "┼".join([bar] * grid) + "┤")
    lines[-1] = "└" + "┴".join([bar] * grid) + "┘"
    return "\n".join(lines)


def function_text(terms: np.ndarray, points: np.ndarray, show_answer: bool = False, target: float = 0.0) -> str:
    """A fuzzy-logic sequence for the terminal: points (point, variable + 1), the last value hidden."""
    names = "  ".join(f"{f'x{v + 1}':>5}" for v in range(points.shape[1] - 1))
    lines = [f"{names}   f(x)"]
    for n, point in enumerate(points):
        value = f"{point[-1]:.3f}" if n < len(points) - 1 else (f"{target:.3f}" if show_answer else "    ?")
        lines.append("  ".join(f"{x:.3f}" for x in point[:-1]) + f"  {value}")
    if show_answer:
        lines.append(f"f = {formula(terms)}")
    return "\n".join(lines)
