"""What one panel looks like: up to four attributes of up to eight values, each told apart at a glance.

Attribute 1 is the shape, 2 the colour, 3 how many, 4 the side at which the pointer on the frame stands (clockwise from
the top). Values wrap: after the eighth comes the first again, as in the rules.
"""

import math
from typing import Any

import numpy as np

ATTRIBUTES = ("shape", "colour", "number", "pointer")
MAX_VALUES = 8
INK = "#22262e"
PAPER = "#ffffff"
FRAME = "#8a919e"
# Okabe and Ito's colours for all kinds of sight, yellow darkened to stand on white, grey for black.
COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#e6d400", "#0072b2", "#d55e00", "#cc79a7", "#4d4d4d")
# Centres of 1 … 8 things in a panel, on a 3×3 lattice of -1, 0, 1.
PLACES: tuple[tuple[tuple[float, float], ...], ...] = (
    ((0, 0),),
    ((-0.62, 0), (0.62, 0)),
    ((0, 0.62), (-0.68, -0.55), (0.68, -0.55)),
    ((-0.62, 0.62), (0.62, 0.62), (-0.62, -0.62), (0.62, -0.62)),
    ((-0.9, 0.9), (0.9, 0.9), (0, 0), (-0.9, -0.9), (0.9, -0.9)),
    ((-0.62, 1), (0.62, 1), (-0.62, 0), (0.62, 0), (-0.62, -1), (0.62, -1)),
    ((-0.55, 1), (0.55, 1), (-1.05, 0), (0, 0), (1.05, 0), (-0.55, -1), (0.55, -1)),
    ((-1.05, 1), (0, 1), (1.05, 1), (-0.55, 0), (0.55, 0), (-1.05, -1), (0, -1), (1.05, -1)),
)
# Radius of each of 1 … 8 things, in lattice steps: as large as they can be without touching.
SIZES = (0.98, 0.5, 0.48, 0.48, 0.44, 0.41, 0.4, 0.4)
STEP = 0.25


def outline(shape: int) -> np.ndarray:
    """Corners (n, 2) of a shape of about radius 1 around the origin."""
    turn = np.linspace(0, 2 * math.pi, 60, endpoint=False)
    if shape == 0:  # disc
        return 0.92 * np.stack([np.sin(turn), np.cos(turn)], axis=1)
    if shape == 1:  # triangle
        return polygon(3, 1.12) - [0, 0.15]
    if shape == 2:  # square
        return polygon(4, 1.16, math.pi / 4)
    if shape == 3:  # star
        return star(5, 1.15, 0.46)
    if shape == 4:  # plus
        arm, width = 1.0, 0.36
        quarter = np.array([[width, arm], [width, width], [arm, width]])
        corners = [quarter @ np.array([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]]) for a in RIGHT_ANGLES]
        return np.concatenate(corners)
    if shape == 5:  # slim diamond
        return np.array([[0, 1.2], [0.66, 0], [0, -1.2], [-0.66, 0]])
    if shape == 6:  # half disc
        half = np.linspace(-math.pi / 2, math.pi / 2, 40)
        return np.stack([1.1 * np.sin(half), 1.1 * np.cos(half) - 0.5], axis=1)
    # heart
    x = 16 * np.sin(turn) ** 3
    y = 13 * np.cos(turn) - 5 * np.cos(2 * turn) - 2 * np.cos(3 * turn) - np.cos(4 * turn)
    return np.stack([x / 16.5, (y + 2.5) / 15.5], axis=1)


RIGHT_ANGLES = (0.0, math.pi / 2, math.pi, 3 * math.pi / 2)


def polygon(corners: int, radius: float, turn: float = 0.0) -> np.ndarray:
    angle = 2 * math.pi * np.arange(corners) / corners + turn
    return radius * np.stack([np.sin(angle), np.cos(angle)], axis=1)


def star(points: int, outer: float, inner: float) -> np.ndarray:
    corners = polygon(2 * points, 1.0)
    return corners * np.where(np.arange(2 * points) % 2 == 0, outer, inner)[:, None]


def draw_panel(axes: Any, values: Any, colour: str = FRAME, background: str = PAPER) -> None:
    """One panel of up to four values on axes that span 0..1."""
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.05"
    axes.add_patch(
        FancyBboxPatch((0.06, 0.06), 0.88, 0.88, boxstyle=style, facecolor=background, edgecolor=colour, linewidth=1.4)
    )
    shape, fill, number = (
        int(values[k]) if k < len(values) else default for k, default in enumerate((0, MAX_VALUES - 1, 0))
    )
    draw_things(axes, shape, COLOURS[fill], number, (0.5, 0.5), STEP)
    if len(values) > 3:
        draw_pointer(axes, int(values[3]), (0.5, 0.5), 0.485, 0.07)


def draw_things(axes: Any, shape: int, colour: str, number: int, centre: tuple[float, float], spread: float) -> None:
    from matplotlib.patches import Polygon

    corners = outline(shape)
    for x, y in PLACES[number]:
        size = SIZES[number] * spread
        place = np.array([centre[0] + spread * x, centre[1] + spread * y])
        axes.add_patch(Polygon(corners * size + place, closed=True, facecolor=colour, edgecolor=INK, linewidth=0.6))


def draw_pointer(axes: Any, value: int, centre: tuple[float, float], reach: float, size: float) -> None:
    """A triangle on the frame that points inwards from one of eight sides."""
    from matplotlib.patches import Polygon

    angle = 2 * math.pi * value / MAX_VALUES
    direction = np.array([math.sin(angle), math.cos(angle)])
    across = np.array([direction[1], -direction[0]])
    # The frame is a square with round corners: on the diagonals it is farther away, but not by the full 1.41.
    foot = np.array(centre) + reach * direction * (1.34 if value % 2 else 1.0)
    corners = np.stack([foot + size * across, foot - size * across, foot - 1.5 * size * direction])
    axes.add_patch(Polygon(corners, closed=True, facecolor=INK, edgecolor=PAPER, linewidth=0.8, zorder=5))
