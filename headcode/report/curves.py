"""Figures of training: scores along the steps, and by split at the end."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from headcode.report.style import METHOD_COLOURS, PAGE_WIDTH, PALETTE, canvas, legend_below, save
from headcode.train.folder import read_metrics

SPLIT_TITLES = {
    "iid": "seen compositions",
    "compositional": "held-out compositions",
    "novel": "terms never seen",
    "validation": "validation",
}
METRIC_TITLES = {"r2": "R²", "accuracy": "all features right", "feature_accuracy": "accuracy per feature"}


def colours_for(names: Sequence[str]) -> dict[str, str]:
    """A colour per name: a method's own, and distinct ones for the rest."""
    free = [colour for colour in PALETTE if colour not in METHOD_COLOURS.values()]
    found: dict[str, str] = {}
    for name in names:
        method = next((m for m in METHOD_COLOURS if name == m), None)
        found[name] = METHOD_COLOURS[method] if method else free[len(found) % len(free)]
    return found


def training_curves(
    runs: Mapping[str, str | Path], stem: str | Path, metric: str, ceilings: Mapping[str, float] | None = None
) -> list[Path]:
    """The metric of every split along training, a line per run; a dashed line where the best possible is known."""
    curves = {name: evaluations(Path(folder), metric) for name, folder in runs.items()}
    splits = list(dict.fromkeys(split for curve in curves.values() for split in curve))
    colours = colours_for(list(runs))
    with canvas(PAGE_WIDTH, 2.4, 1, max(len(splits), 1), sharey=True, squeeze=False) as (figure, axes):
        lowest = 0.0
        for panel, split in zip(axes[0], splits, strict=True):
            for name, curve in curves.items():
                steps, values = curve.get(split, ([], []))
                panel.plot(steps, values, color=colours[name], label=name, marker="o", markersize=2.5)
                lowest = min([lowest, *values[len(values) // 3 :]])
            if ceilings and split in ceilings:
                panel.axhline(ceilings[split], color="0.4", linestyle="--", linewidth=0.8, label="best possible")
            panel.set(title=SPLIT_TITLES.get(split, split), xlabel="step")
        axes[0, 0].set_ylabel(METRIC_TITLES.get(metric, metric))
        axes[0, 0].set_ylim(max(lowest - 0.05, -0.6), 1.02)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        legend_below(figure, handles, labels)
        return save(figure, stem)


def evaluations(folder: Path, metric: str) -> dict[str, tuple[list[int], list[float]]]:
    """By split: the steps of a run's evaluations and the metric there."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for record in read_metrics(folder):
        if record["kind"] == "eval" and record.get(metric) is not None:
            steps, values = found.setdefault(record["split"], ([], []))
            steps.append(record["step"])
            values.append(record[metric])
    return found


def scores_by_split(
    scores: Mapping[str, Mapping[str, float | None]],
    stem: str | Path,
    metric: str = "r2",
    ceilings: Mapping[str, float] | None = None,
) -> list[Path]:
    """Bars: a cluster per split, a bar per name, its value above; a dashed line where the best possible is known."""
    splits = list(dict.fromkeys(split for values in scores.values() for split in values))
    colours = colours_for(list(scores))
    width = 0.8 / max(len(scores), 1)
    with canvas(PAGE_WIDTH, 2.5) as (figure, axes):
        for index, (name, values) in enumerate(scores.items()):
            at = np.arange(len(splits)) + (index - (len(scores) - 1) / 2) * width
            heights = [np.nan if values.get(split) is None else float(values[split] or 0.0) for split in splits]
            axes.bar(at, heights, 0.92 * width, color=colours[name], label=name)
            for position, height in zip(at, heights, strict=True):
                if np.isfinite(height):
                    axes.text(position, max(height, 0) + 0.02, f"{height:.2f}", ha="center", va="bottom", fontsize=7)
        for index, split in enumerate(splits):
            if ceilings and split in ceilings:
                axes.plot([index - 0.45, index + 0.45], [ceilings[split]] * 2, "--", color="0.4", linewidth=0.8)
        axes.axhline(0, color="0.6", linewidth=0.6)
        axes.set_xticks(range(len(splits)), [SPLIT_TITLES.get(split, split) for split in splits])
        axes.set_ylabel(METRIC_TITLES.get(metric, metric))
        bottom = min([0.0, *(v for values in scores.values() for v in values.values() if v is not None)])
        axes.set_ylim(max(bottom - 0.05, -0.6), 1.1)
        legend_below(figure)
        return save(figure, stem)
