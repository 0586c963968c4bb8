"""A score over seeds: its mean and interval, and what can be concluded from them."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from headcode.report.results import t_half_width


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
        return cls(sum(each) / len(each), t_half_width(each), len(each), each)

    def __str__(self) -> str:
        if not math.isfinite(self.value):
            return "–"
        return f"{self.value:.3f}" if self.half_width is None else f"{self.value:.3f} ± {self.half_width:.3f}"


def merit(mean: Mean, sign: int = 1) -> tuple[int, float]:
    """How good a choice of hyperparameters is: one whose runs failed, on any seed, loses to one whose runs all ended.

    `sign` is -1 where less is better.

    >>> merit(Mean.of([0.5, 0.7])) > merit(Mean.of([0.9])) > merit(Mean.of([None])) == merit(Mean.of([]))
    True
    """
    known = [value for value in mean.each if math.isfinite(value)]
    return len(known), sign * sum(known) / len(known) if known else -math.inf


def per_seed(rows: Sequence[dict[str, Any]], metric: str, **fields: Any) -> dict[int, float]:
    """The metric of the rows with these values, by seed."""
    chosen = [row for row in rows if all(row.get(name) == value for name, value in fields.items())]
    return {row["seed"]: row[metric] for row in chosen if row.get(metric) is not None}


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
