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

from headcode.files import replace_file
from headcode.run import RunConfig

Scale = Literal["smoke", "laptop", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "laptop", "paper")
Row = dict[str, Any]
NamedConfigs = Iterable[tuple[str, RunConfig]]


@dataclasses.dataclass(frozen=True)
class Table:
    """A titled table; every row has the same columns."""

    title: str
    rows: Sequence[Row]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One statement, whether the measured numbers support it (None: they cannot tell), and those numbers in words."""

    statement: str
    holds: bool | None
    evidence: str

    @property
    def word(self) -> str:
        return {True: "supports", False: "disagrees", None: "cannot tell"}[self.holds]


@dataclasses.dataclass
class Study:
    """The results of an experiment's runs at one scale."""

    scale: Scale
    rows: Sequence[Row]
    """One per run: its configuration's flat fields and its last metrics, as `run_sweep` gives them."""
    folder: Path
    """Where the experiment's files go."""
    threads: int | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What `analyse` found."""
    kept: int = 0
    """How many of the rows come from kept records."""
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By name: why a run ended without results. It has no row."""

    def where(self, **fields: Any) -> list[Row]:
        """The rows with these values."""
        return [row for row in self.rows if all(row.get(name) == value for name, value in fields.items())]

    def mean(self, metric: str, **fields: Any) -> "Mean":
        """A metric over the runs (the seeds) with these values."""
        return Mean.of(row[metric] for row in self.where(**fields))

    def values(self, field: str) -> list[Any]:
        """The distinct values of a field, in the order of the runs."""
        return list(dict.fromkeys(row[field] for row in self.rows))


@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean over seeds with its 95 % interval by Student's t; without one when there is a single seed."""

    value: float
    half_width: float | None
    count: int
    each: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Mean":
        each = tuple(math.nan if value is None else float(value) for value in values)
        if not each:
            return cls(math.nan, None, 0, each)
        mean = sum(each) / len(each)
        if len(each) == 1 or not math.isfinite(mean):
            return cls(mean, None, len(each), each)
        from scipy.stats import t

        deviation = math.sqrt(sum((value - mean) ** 2 for value in each) / (len(each) - 1))
        return cls(mean, float(t.ppf(0.975, len(each) - 1)) * deviation / math.sqrt(len(each)), len(each), each)

    def __str__(self) -> str:
        if not math.isfinite(self.value):
            return "–"
        return f"{self.value:.3f}" if self.half_width is None else f"{self.value:.3f} ± {self.half_width:.3f}"


class Experiment(ABC):
    """One figure or table. Subclasses state what they ask and how they choose."""

    name: ClassVar[str]
    title: ClassVar[str]
    question: ClassVar[str]
    claim: ClassVar[str]
    """What the paper says, or that it says nothing."""
    selection: ClassVar[str]
    """How hyperparameters and checkpoints are chosen, so that no held-out number chooses itself."""

    needs_weights: ClassVar[bool] = False
    """Whether `analyse` loads the trained models; metrics alone can be kept without them."""

    @abstractmethod
    def runs(self, scale: Scale) -> NamedConfigs:
        """The trainings of a scale."""

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


def merit(mean: Mean, sign: int = 1) -> tuple[int, float]:
    """How good a choice of hyperparameters is: one whose runs failed, on any seed, loses to one whose runs all ended.

    `sign` is -1 where less is better.

    >>> merit(Mean.of([0.5, 0.7])) > merit(Mean.of([0.9])) > merit(Mean.of([None])) == merit(Mean.of([]))
    True
    """
    known = [value for value in mean.each if math.isfinite(value)]
    return len(known), sign * sum(known) / len(known) if known else -math.inf


def select(study: Study, groups: Sequence[str], searched: Sequence[str], metric: str) -> list[Row]:
    """The runs at the searched fields' values with the best mean metric, within every group of equal fields."""
    kept: list[Row] = []
    for key in dict.fromkeys(tuple(row[field] for field in groups) for row in study.rows):
        fields = dict(zip(groups, key, strict=True))
        tried = [
            dict(zip(searched, values, strict=True))
            for values in dict.fromkeys(tuple(row[field] for field in searched) for row in study.where(**fields))
        ]
        best = max(tried, key=lambda choice: merit(study.mean(metric, **fields, **choice)))
        kept += study.where(**fields, **best)
    return kept


def per_seed(rows: Sequence[Row], metric: str, **fields: Any) -> dict[int, float]:
    """The metric of the rows with these values, by seed."""
    chosen = [row for row in rows if all(row.get(name) == value for name, value in fields.items())]
    return {row["seed"]: row[metric] for row in chosen if row.get(metric) is not None}


def compare(statement: str, better: Mapping[int, float], worse: Mapping[int, float]) -> Verdict:
    """Whether one group beats another, by their differences on the seeds that both have.

    Paired, because a seed also draws which compositions are held out: what they have in common says nothing about
    either group. See `judge`. Where seeds have only one of the two, because the other failed or was not run, nobody can
    tell: those that are left may be left for a reason.
    """
    seeds, alone = sorted(set(better) & set(worse)), sorted(set(better) ^ set(worse))
    if not seeds:
        return Verdict(statement, None, "no seed has both")
    differences = {seed: better[seed] - worse[seed] for seed in seeds}
    listed = ", ".join(f"{difference:+.3f} (seed {seed})" for seed, difference in differences.items())
    mean = Mean.of(differences.values())
    if mean.half_width is None:
        return Verdict(statement, None, f"difference {listed}; one seed only")
    evidence = f"difference {mean.value:+.3f} ± {mean.half_width:.3f}: {listed}"
    if alone:
        return Verdict(statement, None, f"{evidence}; only one of the two on seed {', '.join(map(str, alone))}")
    return Verdict(statement, judge(mean), evidence)


def judge(mean: Mean, bound: float = 0.0) -> bool | None:
    """Whether the whole 95 % interval over seeds is above a bound, or below it; a single seed cannot tell.

    >>> judge(Mean.of([0.1, 0.2, 0.15])), judge(Mean.of([0.1, 0.5, -0.2])), judge(Mean.of([0.3]))
    (True, None, None)
    """
    if mean.half_width is None:
        return None
    if mean.value - mean.half_width > bound:
        return True
    return False if mean.value + mean.half_width < bound else None
