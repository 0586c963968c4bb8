"""The readings of one SRAVEN puzzle side by side, so that a reader can check them with a pencil."""

from pathlib import Path
from typing import Any

import numpy as np

from headcode.report.style import PAGE_WIDTH, PALETTE, canvas, save
from headcode.tasks.oracle import Explanation
from headcode.tasks.sraven_rules import RULE_NAMES

INK, FRAME, RIGHT = "#22262e", "#8a919e", "#1a7f37"
CENTRED: Any = {"ha": "center", "va": "center"}


def draw_readings(
    name: str, puzzle: np.ndarray, readings: list[Explanation], what: str, stem: str | Path
) -> list[Path]:
    """The puzzle once for each reading, that of its own answer first: tiles of one colour are one feature, and below
    stand its rows and its rule, bold where the readings differ."""
    num_features, own = puzzle.shape[2], readings[0]
    lines = -(-len(readings) // 2)
    with canvas(PAGE_WIDTH, lines * (2.2 + 0.2 * num_features) + 0.2, lines, 2, squeeze=False) as (figure, axes):
        for panel, reading in zip(axes.flat, readings, strict=False):
            panel.set(xlim=(0, 3.3), ylim=(0.1 - 0.3 * num_features, 2.8))
            changes = int((reading.answer != own.answer).sum())
            whose = f"a rival: {changes} of {num_features} changed" if changes else "the puzzle's own answer"
            answer = " ".join(map(str, reading.answer))
            heading = f"{answer}, posterior {_in_words(reading.probability)}\n{whose}"
            panel.set_title(heading, color=INK if changes else RIGHT)
            _draw_grid(panel, puzzle, reading, own.answer)
            for feature in range(num_features):
                y = -0.12 - 0.3 * feature
                others = [other.rules[feature] != reading.rules[feature] for other in readings]
                others += [(other.positions[:, feature] != reading.positions[:, feature]).any() for other in readings]
                weight = "bold" if any(others) else "normal"
                panel.add_patch(_box(0.1, y - 0.09, 0.18, 0.18, PALETTE[feature % len(PALETTE)], "none"))
                panel.text(0.4, y, _rows(puzzle, reading, feature), va="center", fontsize=8, family="monospace",
                           weight=weight, color=INK)  # fmt: skip
                rule = RULE_NAMES[reading.rules[feature]]
                panel.text(2.3, y, rule, va="center", fontsize=8, weight=weight, color=INK)
        for panel in axes.flat:
            panel.axis("off")
        figure.suptitle(f"SRAVEN, {name} (seed 0): {what}", fontsize=8, color="0.35")
        return save(figure, stem)


def _in_words(probability: float) -> str:
    """Three decimals, but never a 0 or a 1 that is not exact."""
    if 0.0 < probability < 0.0005:
        return "below 0.001"
    return "above 0.999" if 0.9995 <= probability < 1.0 else f"{probability:.3f}"


def _rows(puzzle: np.ndarray, reading: Explanation, feature: int) -> str:
    """The feature's cells row by row, the hidden one as the reading has it."""
    cells = np.take_along_axis(puzzle, np.broadcast_to(reading.positions[:, [feature]], (*puzzle.shape[:2], 1)), 2)
    words = [" ".join(map(str, row)) for row in cells[..., 0]]
    words[-1] = " ".join(map(str, cells[-1, :-1, 0])) + f" → {reading.answer[feature]}"
    return "   ".join(words)


def _draw_grid(panel: Any, puzzle: np.ndarray, reading: Explanation, own: np.ndarray) -> None:
    """The panels, the hidden one as the reading has it; values other than the puzzle's own answer are framed."""
    grid, num_features = puzzle.shape[1:]
    feature_at = np.argsort(reading.positions, axis=1)  # (column, position) -> feature
    width = 0.92 / num_features
    for row in range(grid):
        for column in range(grid):
            left, bottom = 0.1 + 1.06 * column, 2.9 - 0.95 * (row + 1) + 0.1
            hidden = row == column == grid - 1
            values = reading.answer if hidden else puzzle[row, column]
            edge = (RIGHT if (values == own).all() else INK) if hidden else FRAME
            panel.add_patch(_box(left, bottom, 0.98, 0.7, "white", edge, linewidth=1.4 if hidden else 0.8))
            for position, value in enumerate(values):
                colour = PALETTE[feature_at[column, position] % len(PALETTE)]
                x = left + 0.03 + width * position
                panel.add_patch(_box(x + 0.01, bottom + 0.12, width - 0.02, 0.46, colour, "none", alpha=0.3))
                other = hidden and value != own[position]
                if other:
                    panel.add_patch(_box(x + 0.01, bottom + 0.12, width - 0.02, 0.46, "none", INK))
                weight = "bold" if other else "normal"
                panel.text(x + width / 2, bottom + 0.34, str(value), **CENTRED, fontsize=9, color=INK, weight=weight)


def _box(left: float, bottom: float, width: float, height: float, colour: str, edge: str, **options: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((left, bottom), width, height, facecolor=colour, edgecolor=edge, **options)
