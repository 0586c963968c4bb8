"""One panel of a SRAVEN puzzle as a small SVG picture, in the same signs as `headcode puzzle` draws."""

import base64
import functools
import math

import numpy as np

from headcode.tasks import _glyphs

SIDE = 100
FRAMES = {"plain": ("#aab1bd", "#ffffff"), "answer": ("#1a7f37", "#effaf1"), "hidden": ("#7c8593", "#f1f3f6")}


@functools.lru_cache(maxsize=4096)
def panel(values: tuple[int, ...], num_values: int, look: str = "plain") -> str:
    """A panel as a data address for an <img>; an empty tuple is the hidden panel."""
    edge, paper = FRAMES[look]
    dash = ' stroke-dasharray="6 5"' if look == "hidden" else ""
    frame = f'<rect x="5" y="5" width="90" height="90" rx="9" fill="{paper}" stroke="{edge}" stroke-width="2"{dash}/>'
    if not values:
        style = 'font-family="system-ui,sans-serif" font-size="44" font-weight="700" text-anchor="middle"'
        inside = f'<text x="50" y="66" {style} fill="#7c8593">?</text>'
    elif named(len(values), num_values):
        inside = _things(values)
    else:
        inside = _numbers(values, num_values)
    picture = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIDE} {SIDE}">{frame}{inside}</svg>'
    return "data:image/svg+xml;base64," + base64.b64encode(picture.encode()).decode()


def named(num_features: int, num_values: int) -> bool:
    """Whether features can be shown as shape, colour, number and pointer."""
    return num_features <= len(_glyphs.ATTRIBUTES) and num_values <= _glyphs.MAX_VALUES


def position_names(num_features: int, num_values: int) -> list[str]:
    """What each position of a panel is called."""
    if named(num_features, num_values):
        return list(_glyphs.ATTRIBUTES[:num_features])
    return [f"place {place + 1}" for place in range(num_features)]


def _things(values: tuple[int, ...]) -> str:
    shape, fill, number = (
        values[k] if k < len(values) else default for k, default in enumerate((0, _glyphs.MAX_VALUES - 1, 0))
    )
    drawn = ""
    spread = _glyphs.STEP * SIDE
    for x, y in _glyphs.PLACES[number]:
        corners = _glyphs.outline(shape) * _glyphs.SIZES[number] * spread + [50 + spread * x, 50 + spread * y]
        drawn += _polygon(corners, _glyphs.COLOURS[fill], _glyphs.INK, 0.9)
    if len(values) > 3:
        drawn += _pointer(values[3])
    return drawn


def _pointer(value: int) -> str:
    angle = 2 * math.pi * value / _glyphs.MAX_VALUES
    direction = np.array([math.sin(angle), math.cos(angle)])
    across = np.array([direction[1], -direction[0]])
    foot = 50 + 48.5 * direction * (1.34 if value % 2 else 1.0)
    return _polygon(np.stack([foot + 7 * across, foot - 7 * across, foot - 10.5 * direction]), "#6b7585", "#fff", 1)


def _polygon(corners: np.ndarray, fill: str, edge: str, width: float) -> str:
    # The signs are drawn with y upwards, SVG has it downwards.
    points = " ".join(f"{x:.1f},{SIDE - y:.1f}" for x, y in corners)
    return f'<polygon points="{points}" fill="{fill}" stroke="{edge}" stroke-width="{width}"/>'


def _numbers(values: tuple[int, ...], num_values: int) -> str:
    side = math.ceil(math.sqrt(len(values)))
    step = 84 / side
    drawn = ""
    for k, value in enumerate(values):
        x, y = 8 + step * (k % side), 8 + step * (k // side)
        hue = round(360 * value / num_values)
        drawn += f'<rect x="{x + 1:.1f}" y="{y + 1:.1f}" width="{step - 2:.1f}" height="{step - 2:.1f}" rx="3" '
        drawn += f'fill="hsl({hue} 60% 82%)"/><text x="{x + step / 2:.1f}" y="{y + step * 0.66:.1f}" '
        drawn += f'font-family="system-ui,sans-serif" font-size="{step * 0.46:.1f}" text-anchor="middle">{value}</text>'
    return drawn
