"""What every experiment is: runs for each scale, tables and a figure of their results, what they say of the paper.

    class Heads(Experiment):                         one file, one experiment
        name, title, question, claim, selection      in words
        def runs(self, scale): …                     the (name, RunConfig) pairs of a scale
        def tables(self, study): …                   what was measured
        def verdicts(self, study): …                 what agrees with the paper and what does not
        def draw(self, study, stem): …               the figure

An experiment that needs more than its runs' metrics (codes, other models) does that work in `analyse`.
"""

import dataclasses
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from headcode.experiments.mean import Mean, judge, merit
from headcode.files import replace_file
from headcode.run import RunConfig

Scale = Literal["smoke", "laptop", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "laptop", "paper")
Row = dict[str, Any]
NamedConfigs = Iterable[tuple[str, RunConfig]]
NO_SEED = "no seed has both"
"""What is measured where the runs of one side are missing."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A titled table; every row has the same columns."""

    title: str
    rows: Sequence[Row]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One statement, whether the measured numbers support it (None: they do not decide), and those numbers in words."""

    statement: str
    holds: bool | None
    evidence: str

    @property
    def word(self) -> str:
        return {True: "supports", False: "disagrees", None: "inconclusive"}[self.holds]


@dataclasses.dataclass
class Study:
    """The results of an experiment's runs at one scale."""

    scale: Scale
    rows: Sequence[Row]
    """One per run: its configuration's flat fields and its last metrics, as `run_sweep` gives them. Without runs, one
    per measurement."""
    folder: Path
    """Where the experiment's files go."""
    threads: int | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What `analyse` found."""
    from_records: int = 0
    """How many of the rows come from records of earlier runs."""
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By name: why a run ended without results. It has no row."""
    missing: Sequence[str] = ()
    """The names of the runs that were neither trained nor recorded."""

    def where(self, **fields: Any) -> list[Row]:
        """The rows with these values."""
        return [row for row in self.rows if all(row.get(name) == value for name, value in fields.items())]

    def mean(self, metric: str, **fields: Any) -> Mean:
        """A metric over the runs (the seeds) with these values."""
        return Mean.of(row[metric] for row in self.where(**fields))

    def values(self, field: str) -> list[Any]:
        """The distinct values of a field, in the order of the runs."""
        return list(dict.fromkeys(row[field] for row in self.rows))


class Experiment(ABC):
    """One figure or table. Subclasses state what they ask and how they choose."""

    name: ClassVar[str]
    title: ClassVar[str]
    question: ClassVar[str]
    claim: ClassVar[str]
    """What the paper says, or that it says nothing."""
    selection: ClassVar[str]
    """How hyperparameters and checkpoints are chosen, so that no held-out number chooses itself."""

    trains: ClassVar[bool] = True
    """Whether it has training runs. If not, `analyse` measures, and puts what it found into `study.rows`."""
    needs_weights: ClassVar[bool] = False
    """Whether `analyse` loads the trained models: records of metrics are then not enough."""

    @abstractmethod
    def runs(self, scale: Scale) -> NamedConfigs:
        """The training runs of a scale."""

    def plan(self, scale: Scale) -> NamedConfigs:
        """The same runs for those who only count them: nothing that training reads has to be there yet."""
        return self.runs(scale)

    def analyse(self, study: Study, say: Callable[[str], None]) -> None:  # noqa: B027 - most need nothing more
        """Work on the trained runs that their metrics do not show; findings go into `study.extra`."""

    @abstractmethod
    def tables(self, study: Study) -> list[Table]:
        """What was measured."""

    @abstractmethod
    def verdicts(self, study: Study) -> list[Verdict]:
        """Statement by statement, what supports the paper and what does not."""

    @abstractmethod
    def draw(self, study: Study, stem: Path) -> list[Path]:
        """The figure, as STEM.svg and STEM.png."""


def write_json(path: Path, values: Any) -> None:
    """Put a JSON file in place in one move."""
    replace_file(path, (json.dumps(finite(values), indent=1, allow_nan=False) + "\n").encode())


def finite(value: Any) -> Any:
    """The value with null for every number in it that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def select(study: Study, groups: Sequence[str], searched: Sequence[str], metric: str) -> list[Row]:
    """The runs at the searched fields' values with the best mean metric, within every group of equal fields."""
    chosen: list[Row] = []
    for key in dict.fromkeys(tuple(row[field] for field in groups) for row in study.rows):
        fields = dict(zip(groups, key, strict=True))
        tried = [
            dict(zip(searched, values, strict=True))
            for values in dict.fromkeys(tuple(row[field] for field in searched) for row in study.where(**fields))
        ]
        best = max(tried, key=lambda choice: merit(study.mean(metric, **fields, **choice)))
        chosen += study.where(**fields, **best)
    return chosen


def compare(statement: str, better: Mapping[int, float], worse: Mapping[int, float]) -> Verdict:
    """Whether one group beats another, by their differences on the seeds that both have.

    Paired, because a seed also draws which compositions are held out, which is easier or harder for both groups alike.
    If some seed has one group's run and not the other's, the result is inconclusive: why a run is missing may have to
    do with how good it would have been. See `judge`.
    """
    seeds, alone = sorted(set(better) & set(worse)), sorted(set(better) ^ set(worse))
    if not seeds:
        return Verdict(statement, None, NO_SEED)
    differences = {seed: better[seed] - worse[seed] for seed in seeds}
    listed = ", ".join(f"{difference:+.3f} (seed {seed})" for seed, difference in differences.items())
    mean = Mean.of(differences.values())
    if mean.half_width is None:
        return Verdict(statement, None, f"difference {listed}; one seed only")
    evidence = f"difference {mean.value:+.3f} ± {mean.half_width:.3f}: {listed}"
    if alone:
        return Verdict(statement, None, f"{evidence}; only one of the two on seed {', '.join(map(str, alone))}")
    return Verdict(statement, judge(mean), evidence)
