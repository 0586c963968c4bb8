"""The results of a sweep's folder as files: `results.csv`, and `results.parquet` where pyarrow is installed.

`sweep.json` says which names the runs have. Several sweeps may fill one folder, even at the same time: the tables then
have the finished runs of all of them.
"""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

from headcode.files import locked, read_object, replace_file, to_json
from headcode.sweep.plan import HASH_LENGTH, RUNS, Run
from headcode.sweep.status import Row, is_finished, result_row
from headcode.train.folder import read_run_config

SWEEP_FILE = "sweep.json"
RESULTS_FILE = "results.csv"
PARQUET_FILE = "results.parquet"
LOCK_FILE = ".lock"


class ResultsTable:
    """The tables of a sweep's folder; rows of finished runs are read once."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._rows: dict[tuple[str, str], Row] = {}

    def announce(self, runs: list[Run]) -> None:
        """Add the names of runs to those in the folder.

        A name that was another run's is this one's from now on, and the other one's is then `NAME (HASH)`: a sweep does
        not name the fields that all its runs share, so a second one with other values must not take rows away.
        """
        with locked(self.out / LOCK_FILE):
            names = self._names()
            for name, identity in ((name, run.hash) for run in runs for name in run.names):
                if names.get(f"{name} ({identity})") == identity:
                    del names[f"{name} ({identity})"]
                if (earlier := names.get(name, identity)) != identity:
                    names[f"{name} ({earlier})"] = earlier
                names[name] = identity
            replace_file(self.out / SWEEP_FILE, to_json({"runs": names}))

    def write(self) -> None:
        """Bring the tables up to date with what is finished."""
        with locked(self.out / LOCK_FILE):
            rows = [row for name, identity in self._names().items() if (row := self._row(name, identity))]
            rows = [{**row, "folder": f"{RUNS}/{row['hash']}"} for row in rows]
            replace_file(self.out / RESULTS_FILE, to_csv(rows).encode())
            if (content := _to_parquet(rows)) is not None:
                replace_file(self.out / PARQUET_FILE, content)

    def row(self, name: str, run: Run) -> Row:
        """The result of a finished run."""
        key = (name, run.hash)
        if key not in self._rows:
            self._rows[key] = result_row(name, run.hash, run.folder, run.config)
        return self._rows[key]

    def _row(self, name: str, identity: str) -> Row | None:
        key = (name, identity)
        if key not in self._rows:
            folder = self.out / RUNS / identity
            try:
                config = read_run_config(folder)
            except (ValueError, OSError):
                return None
            if not is_finished(folder, config):
                return None
            self._rows[key] = result_row(name, identity, folder, config)
        return self._rows[key]

    def _names(self) -> dict[str, str]:
        try:
            names = read_object(self.out / SWEEP_FILE).get("runs")
        except (OSError, ValueError):
            return {}
        if not isinstance(names, dict):
            return {}
        # A hash names a folder here: nothing else is taken for one.
        is_hash = re.compile(f"[0-9a-f]{{{HASH_LENGTH}}}").fullmatch
        return {name: hash_ for name, hash_ in names.items() if isinstance(hash_, str) and is_hash(hash_)}


def columns_of(rows: list[Row]) -> list[str]:
    """The columns of all rows, in the order in which they first appear; fields before results."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return [c for c in columns if not _is_result(c)] + [c for c in columns if _is_result(c)]


def to_csv(rows: list[Row]) -> str:
    """Numbers as Python writes them (so they are read back exactly), lists as JSON, nothing for None."""
    text = io.StringIO()
    columns = columns_of(rows)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(row.get(column)) for column in columns] for row in rows)
    return text.getvalue()


def _is_result(column: str) -> bool:
    return "/" in column or column == "seconds"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value)


def _to_parquet(rows: list[Row]) -> bytes | None:
    """The same table as Parquet; None without pyarrow. A column of mixed types holds its values as in the CSV."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        return None
    arrays = {}
    for column in columns_of(rows):
        values = [row.get(column) for row in rows]
        kinds = {type(value) for value in values if value is not None}
        if kinds == {int, float}:
            values = [None if value is None else float(value) for value in values]
        elif len(kinds) > 1 or any(issubclass(kind, (tuple, list, dict)) for kind in kinds):
            values = [None if value is None else _cell(value) for value in values]
        arrays[column] = pyarrow.array(values)
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(arrays), file)
    return file.getvalue()
