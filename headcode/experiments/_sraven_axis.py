"""SRAVEN along one axis: accuracy of each method against one field of the run, all else equal (Figs. 5C, 5D and A5).

A subclass names the field and its values for each scale, and states in words what the paper shows.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from headcode.experiments._drawing import colour_of, line
from headcode.experiments._sraven import (
    ABLATION_INSTANCES,
    ceilings_by,
    searched,
    select,
    sraven_base,
    with_instances,
)
from headcode.experiments.base import Experiment, NamedConfigs, Row, Scale, Study, Table, write_json
from headcode.experiments.mean import per_seed
from headcode.report.style import COLUMN_WIDTH, canvas, save
from headcode.run import RunConfig

Values = Mapping[Scale, Sequence[Any]]
SPLITS = {"iid": "seen", "compositional": "held out"}
AXIS_SELECTION = (
    "At paper scale the learning rate (1e-3, 3e-4) and decay (0.1, 0.3) with the best mean accuracy on seen "
    "compositions (iid), per method and value, of runs as long as those of Table A1 (20 million instances, warm-up "
    "1,000); how long the figure's own runs were is not known to us. At laptop scale one setting for all, "
    "whose runs of 2 features took about four minutes of one core. The last checkpoint counts. No held-out score "
    "chooses anything."
)


def axis_base(scale: Scale) -> RunConfig:
    """The run that is changed in one field: at paper scale that of the SRAVEN column of Table A1."""
    base = sraven_base(scale)
    return with_instances(base, ABLATION_INSTANCES) if scale == "paper" else base


class SRavenAxis(Experiment):
    """Accuracy on seen and held-out compositions against one field."""

    field: ClassVar[str]
    label: ClassVar[str]
    """What stands under the figure."""
    values: ClassVar[Values]
    methods: ClassVar[Values]

    def shown(self, value: Any) -> str:
        """A value of the field in words."""
        return str(value)

    def runs(self, scale: Scale) -> NamedConfigs:
        yield from searched(axis_base(scale), scale, method=self.methods[scale], **{self.field: self.values[scale]})

    def analyse(self, study: Study, say: Callable[[str], None]) -> None:
        study.extra["ceilings"] = ceilings_by(study, self.field, say)
        told = {self.shown(value): found for value, found in study.extra["ceilings"].items()}
        write_json(study.folder / "ceilings.json", told)

    def tables(self, study: Study) -> list[Table]:
        chosen = self._chosen(study)
        rows: list[Row] = []
        for method in chosen.values("method"):
            for value in self._values(study):
                where = {"method": method, self.field: value}
                if not chosen.where(**where):
                    continue
                row: Row = {"method": method, self.label: self.shown(value), "seeds": len(chosen.where(**where))}
                for split, words in SPLITS.items():
                    row[words] = chosen.mean(f"{split}/accuracy", **where)
                    row[f"{words}, per feature"] = chosen.mean(f"{split}/feature_accuracy", **where)
                row["ceiling, held out"] = study.extra["ceilings"][value]["compositional"]["ceiling"]
                rows.append(row)
        return [Table("Share of puzzles with all features right, and of features; mean and 95 % interval", rows)]

    def draw(self, study: Study, stem: Path) -> list[Path]:
        chosen, values = self._chosen(study), self._values(study)
        methods = chosen.values("method")
        places = range(len(values))
        with canvas(COLUMN_WIDTH, 3.0) as (figure, axes):
            for number, method in enumerate(methods):
                colour, aside = colour_of(method, methods), 5.0 * (number - (len(methods) - 1) / 2)
                for split, style in (("compositional", "-"), ("iid", ":")):
                    means = [chosen.mean(f"{split}/accuracy", method=method, **{self.field: value}) for value in values]
                    line(axes, places, means, colour, f"{method}, {SPLITS[split]}", style, shift=aside)
            limits = [study.extra["ceilings"][value]["compositional"]["ceiling"] for value in values]
            axes.plot(places, limits, "--", color="0.3", linewidth=1, label="ceiling, held out")
            axes.set_xticks(places, [self.shown(value) for value in values])
            axes.margins(x=0.08)
            axes.set(xlabel=self.label, ylabel="all features right", ylim=(0, 1.02))
            figure.legend(loc="outside lower center", ncols=2)
            return save(figure, stem)

    def scores(self, study: Study, method: str) -> dict[Any, dict[int, float]]:
        """By value of the field (also one whose runs failed) and by seed: the accuracy on held-out compositions."""
        rows = self._chosen(study).rows
        return {
            value: per_seed(rows, "compositional/accuracy", method=method, **{self.field: value})
            for value in sorted(self.values[study.scale])
        }

    def _chosen(self, study: Study) -> Study:
        return Study(study.scale, select(study, ("method", self.field)), study.folder)

    def _values(self, study: Study) -> list[Any]:
        return sorted(study.values(self.field))
