"""What the ablations of both tasks share: the models of Table A1 against each other, in statements and as bars."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headcode.experiments._drawing import bars, limits
from headcode.experiments._table_a1 import TABLE_A1, is_comparable, with_models
from headcode.experiments.base import NamedConfigs, Row, Study, Verdict, compare
from headcode.experiments.mean import per_seed
from headcode.nn.checks import resolve_method
from headcode.report.style import PAGE_WIDTH, canvas, save
from headcode.run import RunConfig
from headcode.sweep import grid
from headcode.train.folder import read_run_config

# Statements, each with the model that it says is better and the other one.
HYLA_IS_AHEAD = {
    "HYLA is ahead of softmax attention.": ("hyla", "softmax"),
    "HYLA is ahead of linear attention.": ("hyla", "linear"),
}
PARTS_HELP = {
    "The norm across heads helps HYLA.": ("hyla", "hyla_unnormed"),
    "The nonlinearity helps beyond a second layer.": ("hyla", "hyla_deep_linear"),
    "The norm across heads helps linear attention.": ("linear_rms", "linear"),
}
MORE_PARAMETERS = {
    "A deeper generated network helps HYLA.": ("hyla_deeper", "hyla"),
    "A mixture of experts helps softmax attention.": ("softmax_experts", "softmax"),
    "A mixture of experts helps linear attention.": ("linear_experts", "linear"),
    "A mixture of experts helps HYLA.": ("hyla_experts", "hyla"),
}
ERRORS_OF_AN_INTERVAL = 1.96
"""Standard errors to each side of the paper's mean."""


def models_runs(base: RunConfig, seeds: Sequence[int], models: Sequence[str], **search: Sequence[Any]) -> NamedConfigs:
    """The runs of these models of Table A1, seed by seed."""
    for seed in seeds:
        for name in models:
            for words, config in grid(TABLE_A1[name].run(base), seed=(seed,), **search):
                yield f"{name},{words}", config


def chosen_models(study: Study, select: Callable[[Study, Sequence[str]], list[Row]]) -> Study:
    """The runs that `select` chooses for each model of Table A1, whose name is in `model`."""
    named = Study(study.scale, with_models(study.rows), study.folder)
    return Study(study.scale, select(named, ("model",)), study.folder, extra=study.extra)


def model_columns(chosen: Study, model: str, scores: Mapping[str, Any]) -> Row:
    """A row of the table: what the model is, and its scores."""
    first = chosen.where(model=model)[0]
    norm, value_net = resolve_method(first["method"], first["norm"], first["value_net"])
    row: Row = {"model": model, "norm": norm, "value net": value_net}
    row["parameters"] = read_run_config(Path(first["folder"])).model.num_parameters
    row["seeds"] = len(chosen.where(model=model))
    return {**row, **scores}


def compare_models(chosen: Study, metric: str, statements: Mapping[str, tuple[str, str]]) -> list[Verdict]:
    score = {model: per_seed(chosen.rows, f"compositional/{metric}", model=model) for model in TABLE_A1}
    return [compare(statement, score[better], score[worse]) for statement, (better, worse) in statements.items()]


def draw_models(
    chosen: Study, task: str, metric: str, label: str, colours: Mapping[str, str], stem: Path
) -> list[Path]:
    """Bars of the models' metric, a group for every split in `colours`, with the paper's numbers as reported where ours
    may stand beside them, and the ceilings that `analyse` noted."""
    order = [model for model in TABLE_A1 if chosen.where(model=model)]
    groups = {split: [chosen.mean(f"{split}/{metric}", model=model) for model in order] for split in colours}
    ceilings = chosen.extra.get("ceilings", {})
    with canvas(PAGE_WIDTH, 3.2) as (figure, axes):
        places = bars(axes, groups, [model.replace("_", "\n") for model in order], colours)
        if is_comparable(task, chosen.scale):
            reported = [TABLE_A1[model].reported(task) for model in order]
            axes.errorbar(
                places["compositional"] + 0.25 / len(groups),  # beside our own interval
                [mean for mean, _ in reported],
                [ERRORS_OF_AN_INTERVAL * error for _, error in reported],
                fmt="_",
                color="black",
                linewidth=0.8,
                label="the paper, compositional, at its own length (± 1.96 s.e.)",
                zorder=5,
            )
        for split, found in ceilings.items():
            words = f"ceiling, {split}"
            axes.axhline(found["ceiling"], color=colours[split], linestyle="--", linewidth=1, label=words)
        axes.tick_params(axis="x", labelsize=6)
        axes.set_ylabel(label)
        limits(axes, [mean for means in groups.values() for mean in means])
        figure.legend(loc="outside lower center", ncols=3)
        return save(figure, stem)
