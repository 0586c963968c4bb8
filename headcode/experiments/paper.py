"""Our scores beside those of the paper's Table A1, and whether the two agree."""

from collections.abc import Mapping, Sequence

from headcode.experiments import _logic, _sraven
from headcode.experiments._table_a1 import TABLE_A1, is_comparable, with_models
from headcode.experiments.base import Experiment, Row, Study, Table, Verdict
from headcode.experiments.mean import Mean, judge, merit

COLUMNS = {"logic-ablation": "logic", "sraven-ablation": "sraven"}
"""The column of Table A1 that an experiment fills."""
METRICS = {"logic": "r2", "sraven": "accuracy"}
STANDARD_ERRORS = 1.96


def agree(ours: Mean, reported: tuple[float, float]) -> bool | None:
    """Whether our 95 % interval and the paper's mean ± 1.96 standard errors overlap; one seed has no interval.

    >>> agree(Mean.of([0.5, 0.6, 0.7]), (0.9, 0.05)), agree(Mean.of([0.5, 0.6, 0.7]), (0.95, 0.05))
    (True, False)
    >>> agree(Mean.of([0.5]), (0.5, 0.1)) is None
    True
    """
    if ours.half_width is None:
        return None
    mean, error = reported
    return abs(ours.value - mean) <= ours.half_width + STANDARD_ERRORS * error


def no_model_solves(novel: Mapping[str, Mean]) -> Verdict:
    """Fig. A3, from the models' R² on functions of terms that training never had.

    A model solves them with a mean of 0.5 or more and an interval above 0.25, and does not with an interval below 0.5.
    """
    solved = any(mean.value >= 0.5 and judge(mean, 0.25) for mean in novel.values())
    unsolved = all(judge(mean, 0.5) is False for mean in novel.values())
    highest = sorted(novel, key=lambda name: merit(novel[name]), reverse=True)[:3]
    return Verdict(
        "No model solves functions of terms that training never had.",
        False if solved else True if unsolved else None,
        f"R² on novel, the highest three: {', '.join(f'{name} {novel[name]}' for name in highest)}",
    )


def beside_the_paper(experiment: Experiment, study: Study) -> list[Table]:
    """Table A1's rows, as reported, beside ours, for an experiment that fills one of its columns."""
    if (task := COLUMNS.get(experiment.name)) is None or study.scale == "smoke":
        return []
    select = _logic.select if task == "logic" else _sraven.select
    comparable = is_comparable(task, study.scale)
    named = with_models(study.rows)
    rows: list[Row] = []
    for name, model in TABLE_A1.items():
        mine = [row for row in named if row["model"] == name]
        chosen = select(Study(study.scale, mine, study.folder), ()) if mine else []
        mean = Mean.of(row[f"compositional/{METRICS[task]}"] for row in chosen)
        row: Row = {"model": model.words, "here": name}
        row |= {"paper, as reported": model.reported_words(task), "ours": mean if mine else None}
        if comparable:
            row["intervals"] = {True: "overlap", False: "apart", None: None}[agree(mean, model.reported(task))]
        rows.append(row)
    return [Table(_title(task, study.rows, comparable), rows)]


def _title(task: str, rows: Sequence[Row], comparable: bool) -> str:
    steps = ", ".join(f"{steps:,}" for steps in sorted({row["steps"] for row in rows}))
    title = f"Table A1: {'R²' if task == 'logic' else 'accuracy'} on held-out compositions, as reported (mean ± "
    title += f"standard error, 3 seeds) and ours ({steps} steps; mean and 95 % interval over seeds)"
    if comparable:
        return f"{title}. Intervals: ours and the paper's mean ± {STANDARD_ERRORS} standard errors"
    return f"{title}. Ours is another, easier setting: the numbers are not to be compared"
