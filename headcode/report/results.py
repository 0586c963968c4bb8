"""The results of sweeps, read from `results.csv`: rows, filters, and groups with intervals.

rows = select(read_results("sweeps/first"), ["method=softmax,hyla", "steps>=1000"])
groups = group_rows(rows, ["method"], ["compositional/r2"])
groups[0].cells["compositional/r2"].mean
"""

import csv
import io
import json
import math
import operator
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from headcode.files import is_number, is_there, parse_json, read_text
from headcode.run import RunConfig
from headcode.suggest import no_such
from headcode.sweep.words import split_values, value_of

Row = dict[str, Any]

RESULTS_FILE = "results.csv"
NOT_SETTINGS = ("name", "hash", "folder", "task_seed", "error")
"""Columns that neither set a run apart nor are results; task_seed follows seed unless it is given."""


def read_results(path: str | Path) -> list[Row]:
    """The rows of a sweep's folder or of its results.csv, with numbers as numbers; folders relative to where we are."""
    path = Path(path)
    file = path / RESULTS_FILE if path.is_dir() else path
    if not is_there(file):
        what = f"it has no {RESULTS_FILE}" if path.is_dir() else "there is no such folder"
        raise ValueError(f"{path} has no results of a sweep: {what}.")
    try:
        table = list(csv.DictReader(io.StringIO(read_text(file), newline=""), strict=True, restkey="…"))
    except csv.Error as error:
        raise ValueError(f"{file} is not a CSV file: {error}.") from None
    if any("…" in row or None in row.values() for row in table):
        raise ValueError(f"{file} is not a table of results: its lines have different lengths.")
    rows = [_with_current_names({column: _value(column, cell) for column, cell in row.items()}) for row in table]
    return [{**row, "folder": str(file.parent / row["folder"])} if row.get("folder") else row for row in rows]


def _with_current_names(row: Row) -> Row:
    """Columns by the names that fields of runs have today; a table to which runs were added since has both."""
    for former, name in RunConfig.former_names.items():
        value = row.pop(former, None)
        if row.get(name) is None and value is not None:
            row[name] = value
    return row


_TEXT = ("name", "hash", "folder")


def _value(column: str, cell: str) -> Any:
    if column in _TEXT:
        return cell
    if cell == "":
        return None
    try:
        return parse_json(cell)
    except ValueError:  # a word
        return cell


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    "=": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}


def select(rows: list[Row], conditions: Sequence[str]) -> list[Row]:
    """The rows that meet every condition: `method=hyla`, `method=hyla,softmax` (any of them), `steps>=1000`.

    >>> select([{"seed": 0}, {"seed": 1}, {"seed": 2}], ["seed!=0", "seed<2"])
    [{'seed': 1}]
    """
    for condition in conditions:
        match = re.fullmatch(r"\s*([\w/]+)\s*(!=|>=|<=|=|>|<)\s*(.*?)\s*", condition)
        if match is None:
            raise ValueError(f"A condition reads like method=hyla or steps>=1000, got {condition!r}.")
        column, sign, text = match.groups()
        column = find_column(rows, column)
        known = {value for row in rows if isinstance(value := row.get(column), str)}
        wanted = [text] if sign in ("<", "<=", ">", ">=") else _alternatives(text, known)
        kept = [any(_compare(row.get(column), sign, value) for value in wanted) for row in rows]
        if sign == "!=":
            kept = [all(_compare(row.get(column), sign, value) for value in wanted) for row in rows]
        rows = [row for row, keep in zip(rows, kept, strict=True) if keep]
    return rows


def _alternatives(text: str, known: set[str]) -> list[str]:
    """The values between commas; one that has commas itself, as names do, is found whole where the column has it."""
    parts, found = split_values(text), []
    while parts:
        joined = [",".join(parts[:count]).strip() for count in range(1, len(parts) + 1)]
        count = max((count for count, value in enumerate(joined, 1) if value in known), default=1)
        found.append(joined[count - 1])
        parts = parts[count:]
    return found


def _compare(value: Any, sign: str, text: str) -> bool:
    wanted = text if isinstance(value, str) else value_of(text)
    if sign in ("=", "!="):
        wanted = None if text == "" and value is None else wanted
        return _COMPARISONS[sign](value, wanted)
    if value is None:
        return False
    if not is_number(wanted) or not is_number(value):
        raise ValueError(f"{sign} compares numbers; got {value!r} and {text!r}.")
    return _COMPARISONS[sign](value, wanted)


def find_column(rows: list[Row], name: str) -> str:
    """The column of that name (a metric's name alone stands for it where only one split has it)."""
    columns = columns_of(rows)
    if name in columns or not rows:
        return name
    ends = [column for column in columns if column.endswith(f"/{name}")]
    if len(ends) == 1:
        return ends[0]
    raise ValueError(no_such("There is no column", name, ends or columns, "there are"))


def columns_of(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row))


def main_columns(rows: list[Row]) -> list[str]:
    """Name, training loss, the main metric of every split (the first that is not its loss) and time."""
    found: dict[str, str] = {}
    for column in columns_of(rows):
        split, slash, metric = column.partition("/")
        if slash and split != "train" and metric != "loss":
            found.setdefault(split, column)
    wanted = ["name", "train/loss", *found.values(), "seconds"]
    return [column for column in wanted if column in columns_of(rows)]


def varying_fields(rows: list[Row]) -> list[str]:
    """The fields of the configuration in which the rows differ."""
    fields = [c for c in columns_of(rows) if "/" not in c and c not in (*NOT_SETTINGS, "seconds")]
    return [field for field in fields if len({json.dumps(row.get(field)) for row in rows}) > 1]


def sort_rows(rows: list[Row], column: str, descending: bool = False) -> list[Row]:
    """Sorted by a column: numbers before words, rows without a value last."""
    column = find_column(rows, column)
    there = [row for row in rows if row.get(column) is not None]

    def key(row: Row) -> tuple[bool, float, str]:
        value = row[column]
        return (not is_number(value), value if is_number(value) else 0.0, "" if is_number(value) else str(value))

    there.sort(key=key, reverse=descending)
    return there + [row for row in rows if row.get(column) is None]


class Estimate(NamedTuple):
    """The mean of a group's values, and half the width of its 95 % interval (None for a single value)."""

    mean: float
    half_width: float | None
    num_values: int


class Group(NamedTuple):
    """Rows that agree in some fields."""

    fields: Row
    rows: list[Row]
    cells: dict[str, Estimate | None]
    """By column; None where no row has a number."""


def group_rows(rows: list[Row], by: Sequence[str], columns: Sequence[str]) -> list[Group]:
    """Groups of rows with the same values in the fields `by`, in order of appearance, with estimates of the columns.

    A run that has several names, and so several rows, counts once in a group.
    """
    by = [find_column(rows, field) for field in by]
    groups: dict[str, dict[Any, Row]] = {}
    for index, row in enumerate(rows):
        group = groups.setdefault(json.dumps([row.get(field) for field in by]), {})
        group.setdefault(row.get("hash") or index, row)
    return [
        Group(
            {field: members[0].get(field) for field in by},
            members,
            {column: estimate([row.get(column) for row in members]) for column in columns},
        )
        for members in (list(group.values()) for group in groups.values())
    ]


def estimate(values: Sequence[Any]) -> Estimate | None:
    """Mean and Student's t interval of the values that are numbers.

    >>> mean, half_width, num_values = estimate([1, 2, 3, None])
    >>> mean, round(half_width, 4), num_values
    (2.0, 2.4841, 3)
    """
    numbers = [float(value) for value in values if is_number(value)]
    if not numbers:
        return None
    return Estimate(fmean(numbers), t_half_width(numbers), len(numbers))


def t_half_width(values: Sequence[float]) -> float | None:
    """Half the width of Student's 95 % interval of the values' mean; None for a single value."""
    count = len(values)
    if count == 1 or not all(map(math.isfinite, values)):
        return None
    from scipy.stats import t

    return float(t.ppf(0.975, count - 1)) * stdev(values) / math.sqrt(count)
