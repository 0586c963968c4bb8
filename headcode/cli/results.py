"""Look at the results of a sweep: filter, choose columns, sort, and group with intervals over seeds.

Example: headcode results sweeps/logic --where method=softmax,hyla --group-by method --columns compositional/r2
"""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import tyro

from headcode.cli._tables import aligned_table
from headcode.cli._training import Switch

Where = Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIELD=VALUE"), tyro.conf.UseAppendAction]
Names = Annotated[str | None, tyro.conf.arg(metavar="A,B,…", help_behavior_hint="(optional)")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """Arguments of `headcode results`."""

    folder: Annotated[Path, tyro.conf.Positional]
    """The sweep's folder, or a results.csv."""
    where: Where = ()
    """Only rows that meet this: method=hyla, method=hyla,softmax (any of them), seed!=0, steps>=1000."""
    columns: Names = None
    """Which columns; name and the main scores unless given. "all" means all."""
    group_by: Names = None
    """One line per group of rows that agree in these fields: mean ± 95 % interval of the columns."""
    sort: Annotated[str | None, tyro.conf.arg(metavar="COLUMN", help_behavior_hint="(optional)")] = None
    """Sort by a column (of a grouped table, by its mean)."""
    descending: Switch = False
    """Sort from high to low."""
    json: Switch = False
    """Print JSON."""

    def run(self) -> None:
        from headcode.report import results

        rows = results.select(results.read_results(self.folder), self.where)
        if not rows:
            if self.json:
                print("[]")
            else:
                print(
                    f"no finished run of {self.folder} meets this" if self.where else f"{self.folder} has no rows yet"
                )
            return
        columns = self._columns(rows)
        if self.group_by is None:
            if self.sort is not None:
                rows = results.sort_rows(rows, self.sort, self.descending)
            found = [{column: row.get(column) for column in columns} for row in rows]
            self._show(found, {column: [_cell(row[column]) for row in found] for column in columns})
            return
        self._show_groups(rows, columns)

    def _columns(self, rows: list[dict[str, Any]]) -> list[str]:
        from headcode.report.results import columns_of, find_column, main_columns

        if self.columns is None:
            return main_columns(rows)
        if self.columns == "all":
            return columns_of(rows)
        return [find_column(rows, name.strip()) for name in self.columns.split(",")]

    def _show_groups(self, rows: list[dict[str, Any]], columns: list[str]) -> None:
        from headcode.report.results import find_column, group_rows, sort_rows, varying_fields

        assert self.group_by is not None
        by = [find_column(rows, name.strip()) for name in self.group_by.split(",")]
        measured = [column for column in columns if column not in ("name", *by)]
        groups = group_rows(rows, by, measured)
        if self.sort is not None:
            means = [
                {**group.fields, **{c: cell and cell.mean for c, cell in group.cells.items()}, "": group}
                for group in groups
            ]
            groups = [row[""] for row in sort_rows(means, self.sort, self.descending)]
        found = [
            {
                **group.fields,
                "runs": len(group.rows),
                **{column: cell and cell._asdict() for column, cell in group.cells.items()},
            }
            for group in groups
        ]
        table = {field: [_cell(group.fields[field]) for group in groups] for field in by}
        table["runs"] = [str(len(group.rows)) for group in groups]
        table |= {column: [_estimate(group.cells[column]) for group in groups] for column in measured}
        self._show(found, table)
        mixed = [name for name in varying_fields(rows) if any(name in varying_fields(group.rows) for group in groups)]
        if not self.json and mixed:
            print(f"mean ± half a 95 % interval; the runs of a group differ in: {', '.join(mixed)}")

    def _show(self, found: list[dict[str, Any]], table: dict[str, list[str]]) -> None:
        if self.json:
            print(json.dumps(found, indent=2, allow_nan=False))
            return
        print(aligned_table(table))


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def _estimate(cell: Any) -> str:
    if cell is None:
        return "–"
    return f"{cell.mean:.4g}" if cell.half_width is None else f"{cell.mean:.4g} ± {cell.half_width:.2g}"
