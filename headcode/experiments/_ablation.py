"""What the ablations of both tasks share: the methods of Table A1 against each other, in statements and as bars."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from headcode.experiments._drawing import bars, limits, method_labels
from headcode.experiments.base import Row, Study, Verdict, compare
from headcode.experiments.mean import per_seed
from headcode.ops import METHODS
from headcode.report.style import PAGE_WIDTH, canvas, save

# Statements, each with the method that it says is better and the other one.
HYLA_IS_AHEAD = {
    "HYLA is ahead of softmax attention.": ("hyla", "softmax"),
    "HYLA is ahead of linear attention.": ("hyla", "linear"),
}
PARTS_HELP = {
    "The norm across heads helps HYLA.": ("hyla", "hyla_unnormed"),
    "The nonlinearity helps beyond a second layer.": ("hyla", "hyla_deep_linear"),
    "The norm across heads helps linear attention.": ("linear_rms", "linear"),
}


def compare_methods(rows: Sequence[Row], metric: str, statements: Mapping[str, tuple[str, str]]) -> list[Verdict]:
    score = {method: per_seed(rows, f"compositional/{metric}", method=method) for method in METHODS}
    return [compare(statement, score[better], score[worse]) for statement, (better, worse) in statements.items()]


def draw_methods(
    study: Study, rows: Sequence[Row], metric: str, label: str, colours: Mapping[str, str], stem: Path
) -> list[Path]:
    """Bars of the chosen rows' metric, a group for every split in `colours`, with the ceilings that `analyse` noted."""
    chosen = Study(study.scale, rows, study.folder)
    order = [method for method in METHODS if chosen.where(method=method)]
    groups = {split: [chosen.mean(f"{split}/{metric}", method=method) for method in order] for split in colours}
    ceilings = study.extra.get("ceilings", {})
    with canvas(PAGE_WIDTH, 3.0) as (figure, axes):
        bars(axes, groups, method_labels(order), colours)
        for split, found in ceilings.items():
            words = f"ceiling, {split}"
            axes.axhline(found["ceiling"], color=colours[split], linestyle="--", linewidth=1, label=words)
        axes.tick_params(axis="x", labelsize=6)
        axes.set_ylabel(label)
        limits(axes, [mean for means in groups.values() for mean in means])
        figure.legend(loc="outside lower center", ncols=len(groups) + len(ceilings))
        return save(figure, stem)
