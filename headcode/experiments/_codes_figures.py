"""The figures of the codes experiments that are drawn from decoders' scores."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headcode.experiments._drawing import bars, line
from headcode.experiments.base import Row, Study
from headcode.experiments.mean import Mean
from headcode.report.style import COLUMN_WIDTH, PAGE_WIDTH, PALETTE, canvas, legend_below, save

SPLITS = {"seen": PALETTE[5], "held out": PALETTE[0]}
WAYS = {"ours": PALETTE[0], "authors": PALETTE[1]}
PANELS_IN_A_ROW = 3


def decoded(study: Study, model: str, way: str, layer: int, source: str, split: str) -> list[Row]:
    """The decoders' scores, a row for each seed."""
    wanted = {"model": model, "way": way, "layer": layer, "source": source, "split": split}
    return [row for row in study.extra["decoded"] if all(row[name] == value for name, value in wanted.items())]


def controls(
    study: Study, way: str, models: Mapping[str, int], sources: Mapping[str, str], parts: str, stem: Path
) -> list[Path]:
    """Macro F1 in the last layer, codes beside their controls; a panel for each model."""
    with _panels(models) as (figure, panels):
        for panel, (model, last) in zip(panels, models.items(), strict=False):
            scores = {
                split: [decoded(study, model, way, last, source, split) for source in sources] for split in SPLITS
            }
            groups = {
                split: [Mean.of(row["macro_f1"] for row in rows) for rows in found] for split, found in scores.items()
            }
            bars(panel, groups, list(sources.values()), SPLITS)
            for index, found in enumerate(scores.values()):
                for place, rows in enumerate(found):
                    if len(rows) == 1:  # a single seed: the bootstrap interval over compositions
                        at, low, high = place + (index - 0.5) * 0.4, rows[0]["macro_f1_low"], rows[0]["macro_f1_high"]
                        panel.vlines(at, low, high, color="0.35", linewidth=0.8, zorder=4)
            panel.tick_params(axis="x", labelsize=5)
            panel.set(title=model, ylim=(0, 1))
        panels[0].set_ylabel(f"macro F1 of the {parts}, last layer")
        handles, labels = panels[0].get_legend_handles_labels()
        legend_below(figure, handles, [f"{label.replace(' ', '-')} compositions" for label in labels])
        return save(figure, stem)


def layers(study: Study, ways: Mapping[str, str], models: Mapping[str, int], parts: str, stem: Path) -> list[Path]:
    """Macro F1 on held-out compositions by layer, for each way of taking codes; dotted: the untrained network."""
    with _panels(models) as (figure, panels):
        for panel, model in zip(panels, models, strict=False):
            numbers = sorted({row["layer"] for row in study.extra["decoded"] if row["model"] == model})
            for way, words in ways.items():
                for source, style in (("codes", "-"), ("untrained", ":")):
                    found = [decoded(study, model, way, layer, source, "held out") for layer in numbers]
                    means = [Mean.of(row["macro_f1"] for row in rows) for rows in found]
                    label = words if source == "codes" else f"{words}, untrained"
                    line(panel, numbers, means, WAYS[way], label, style)
            panel.set(title=model, xlabel="layer", ylim=(0, 1))
            panel.set_xticks(numbers, [str(number) for number in numbers])
        panels[0].set_ylabel(f"macro F1 of the {parts},\nheld-out compositions")
        legend_below(figure, *panels[0].get_legend_handles_labels())
        return save(figure, stem)


@contextmanager
def _panels(models: Mapping[str, int]) -> Iterator[tuple[Any, list[Any]]]:
    """A figure with a panel for each model, three in a row."""
    columns = min(len(models), PANELS_IN_A_ROW)
    rows = -(-len(models) // columns)
    width = PAGE_WIDTH if columns > 1 else COLUMN_WIDTH
    with canvas(width, 2.6 * rows, rows, columns, sharey=True, squeeze=False) as (figure, axes):
        for empty in axes.flat[len(models) :]:
            empty.set_axis_off()
        yield figure, list(axes.flat)
