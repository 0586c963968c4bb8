"""Drawings that several experiments share: a mean with its interval, and every seed as a dot."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headcode.experiments.mean import Mean
from headcode.report.style import METHOD_COLOURS, PALETTE

_OTHER_COLOURS = tuple(colour for colour in PALETTE if colour not in METHOD_COLOURS.values())


def colour_of(method: str, methods: Sequence[str]) -> str:
    """The method's own colour, or one that no other method of the figure has."""
    if method in METHOD_COLOURS:
        return METHOD_COLOURS[method]
    others = [name for name in methods if name not in METHOD_COLOURS]
    return _OTHER_COLOURS[others.index(method) % len(_OTHER_COLOURS)]


def line(
    axes: Any,
    x: Sequence[float],
    means: Sequence[Mean],
    colour: str,
    label: str,
    style: str = "-",
    *,
    shift: float = 0.0,
) -> None:
    """A line through means, intervals where there are several seeds, and each seed as a faint dot.

    `shift`, in points, moves it sideways, so that the intervals of several lines do not hide each other.
    """
    from matplotlib.transforms import ScaledTranslation

    drawn = axes.plot(x, [mean.value for mean in means], style, marker="o", color=colour, label=label, zorder=3)
    dots = {"markersize": 2.6, "alpha": 0.4, "markeredgewidth": 0, "zorder": 2}
    for at, mean in zip(x, means, strict=True):
        drawn += axes.plot([at] * len(mean.each), mean.each, "o", color=colour, **dots)
        if mean.half_width is not None:
            whisker = axes.errorbar(at, mean.value, mean.half_width, color=colour, linewidth=0.8, capsize=2, zorder=1)
            drawn += whisker.get_children()
    if shift:
        # After the drawing: the range of the axes is then that of the data, not of the shifted picture.
        aside = axes.transData + ScaledTranslation(shift / 72, 0, axes.figure.dpi_scale_trans)
        for artist in drawn:
            artist.set_transform(aside)


def bars(
    axes: Any, groups: Mapping[str, Sequence[Mean]], labels: Sequence[str], colours: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """Bars side by side: one cluster per label, one bar per group, seeds as dots and the interval as a whisker.

    Returns where the bars of each group stand.
    """
    width = 0.8 / max(len(groups), 1)
    places = {}
    for index, (name, means) in enumerate(groups.items()):
        places[name] = at = np.arange(len(means)) + (index - (len(groups) - 1) / 2) * width
        axes.bar(at, [mean.value for mean in means], 0.92 * width, color=colours[name], alpha=0.75, label=name)
        for position, mean in zip(at, means, strict=True):
            axes.scatter([position] * len(mean.each), mean.each, s=6, color="black", linewidths=0, zorder=3)
            if mean.half_width is not None:
                axes.errorbar(position, mean.value, mean.half_width, color="0.35", linewidth=0.8, capsize=2, zorder=2)
    axes.set_xticks(range(len(labels)), labels)
    axes.axhline(0, color="0.7", linewidth=0.6, zorder=0)
    return places


def limits(axes: Any, means: Sequence[Mean], top: float = 1.02) -> None:
    """A vertical range that shows every seed, but not the whole of an interval that reaches far beyond.

    R² has no lower end: below -1 the axis goes on in powers, so that one bad run does not flatten the others.
    """
    lowest = min((value for mean in means for value in mean.each if np.isfinite(value)), default=0.0)
    if lowest >= -1:
        axes.set_ylim(min(lowest - 0.05, 0.0), top)
        return
    axes.set_yscale("symlog", linthresh=1)
    powers = [-(10.0**power) for power in range(int(np.ceil(np.log10(-lowest))), -1, -1)]
    ticks = [tick for tick in (*powers, -0.5, 0, 0.5, 1) if tick > 1.3 * lowest]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(1.3 * lowest, top)
