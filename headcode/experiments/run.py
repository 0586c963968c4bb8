"""An experiment from its configurations to its figure: train what is missing, analyse, write findings, draw."""

import csv
import dataclasses
import io
import json
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headcode.experiments.base import Experiment, Row, Scale, Study, Table, Verdict, finite
from headcode.experiments.records import add_records, recorded_rows
from headcode.files import replace_file, to_json
from headcode.run import RunConfig, override
from headcode.sweep import Display, SweepFailed, run_sweep
from headcode.train import Runtime, Trainer
from headcode.train.cost import step_flops
from headcode.train.progress import duration

PROBE_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class Cost:
    """What the runs of an experiment will cost."""

    runs: int
    steps: int
    flops: float
    seconds: float
    """On this machine, one run after the other, at the speed that a short probe of the largest run reached."""

    def __str__(self) -> str:
        return (
            f"{self.runs} runs, {self.steps:,} steps, {self.flops:.2e} FLOPs: about {duration(self.seconds)} "
            f"on this machine, one run after the other"
        )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The files and findings of an experiment."""

    study: Study
    tables: Sequence[Table]
    verdicts: Sequence[Verdict]
    files: Sequence[Path]


def planned_runs(experiment: Experiment, scale: Scale, seeds: int | None = None) -> list[tuple[str, RunConfig]]:
    """The runs of a scale, named after the experiment; `seeds` limits them to so many seeds, the first ones."""
    pairs = list(experiment.runs(scale))
    if seeds is not None:
        if seeds < 1:
            raise ValueError(f"seeds must be 1 or more, got {seeds}.")
        first = sorted({config.seed for _, config in pairs})[:seeds]
        pairs = [(name, config) for name, config in pairs if config.seed in first]
    return [(f"{experiment.name}: {name}", config) for name, config in pairs]


def estimate(configs: Sequence[RunConfig], runtime: Runtime) -> Cost:
    """FLOPs by count, time by a three-second probe of the run with the largest step."""
    if not configs:
        return Cost(0, 0, 0.0, 0.0)
    largest = max(configs, key=step_flops)
    probe = Trainer(override(largest, eval_size=0), Path("."), runtime=runtime, reporters=[])
    speed = probe.probe(PROBE_SECONDS) * step_flops(largest)
    flops = sum(step_flops(config) * config.steps for config in configs)
    return Cost(len(configs), sum(config.steps for config in configs), flops, flops / speed)


def reproduce(
    experiment: Experiment,
    scale: Scale,
    out: Path,
    *,
    jobs: int | None = None,
    threads: int | None = None,
    engine: str = "local",
    seeds: int | None = None,
    records: Path | None = None,
    kept: Path | None = None,
    display: Display | None = None,
    say: Callable[[str], None] = print,
    **engine_options: Any,
) -> Outcome:
    """Train the runs that are missing in OUT, and write OUT/NAME/SCALE: results.csv, findings.json and .md, figure.

    Experiments that share a configuration share the run. Runs whose records are in `records` are not trained again,
    unless the experiment needs their weights; the records of trained runs are added there. Runs that fail are left out,
    and named in the findings. The other arguments are those of `run_sweep`.
    """
    if kept is not None:
        warnings.warn("reproduce's argument `kept` is now called `records`.", DeprecationWarning, stacklevel=2)
        records = kept
    pairs = planned_runs(experiment, scale, seeds)
    known: dict[str, Row] = {}
    if records is not None and not experiment.needs_weights:
        known = recorded_rows(pairs, records, out / "records")
    if known:
        say(f"{len(known)} of {len(pairs)} runs are taken from kept records in {records}, and not trained again.")
    missing = [(name, config) for name, config in pairs if name not in known]
    trained: list[Row] = []
    if missing:
        # A run that diverges does so each time it is tried: the experiment goes on without it, and says so.
        trained = run_sweep(
            missing,
            out,
            jobs=jobs,
            threads=threads,
            engine=engine,
            allow_failures=True,
            display=display,
            **engine_options,
        )
    failed = {row["name"]: row["error"] for row in trained if row["error"] is not None}
    if failed and len(failed) == len(pairs):
        raise SweepFailed(failed, trained, out)
    trained = [row for row in trained if row["error"] is None]
    runs = [Path(row["folder"]) for row in trained]
    if records is not None and (added := add_records(runs, records / f"{experiment.name}.jsonl")):
        say(f"The records of {added} runs are now kept in {records}.")
    by_name = known | {row["name"]: row for row in trained}
    rows = [by_name[name] for name in dict(pairs) if name in by_name]
    folder = out / experiment.name / scale
    folder.mkdir(parents=True, exist_ok=True)
    study = Study(scale, rows, folder, threads, from_records=len(known), failed=failed)
    start = time.monotonic()
    experiment.analyse(study, say)
    tables, verdicts = experiment.tables(study), experiment.verdicts(study)
    figures = experiment.draw(study, folder / experiment.name)
    rows_file = _write_rows(study.rows, folder / "results.csv")
    files = [rows_file, *_write_findings(experiment, study, tables, verdicts, folder)]
    say(f"Analysis and figure of {experiment.name}: {time.monotonic() - start:.0f} s.")
    return Outcome(study, tables, verdicts, [*files, *figures])


def _write_rows(rows: Sequence[Row], path: Path) -> Path:
    """The rows without the folders and times of one machine: the same runs give the same bytes."""
    told = [{k: v for k, v in row.items() if k not in ("folder", "seconds", "error")} for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(k for row in told for k in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: json.dumps(v) if isinstance(v, (list, tuple)) else v for k, v in row.items()} for row in told)
    replace_file(path, text.getvalue().encode())
    return path


def _write_findings(
    experiment: Experiment, study: Study, tables: Sequence[Table], verdicts: Sequence[Verdict], folder: Path
) -> list[Path]:
    told = {
        "experiment": experiment.name,
        "scale": study.scale,
        "question": experiment.question,
        "paper": experiment.claim,
        "selection": experiment.selection,
        "runs": len(study.rows) if experiment.trains else 0,
        "taken from kept records": study.from_records,
        "failed": study.failed,
        "seeds": sorted({row["seed"] for row in study.rows}),
        "tables": [{"title": table.title, "rows": [_plain(row) for row in table.rows]} for table in tables],
        "verdicts": [{**dataclasses.asdict(verdict), "word": verdict.word} for verdict in verdicts],
    }
    as_json, as_text = folder / "findings.json", folder / "findings.md"
    replace_file(as_json, to_json(finite(told)))
    replace_file(as_text, in_markdown(experiment, study, tables, verdicts).encode())
    return [as_json, as_text]


def in_markdown(
    experiment: Experiment, study: Study, tables: Sequence[Table], verdicts: Sequence[Verdict], level: int = 1
) -> str:
    """Question, figure, tables and verdicts as a Markdown page."""
    lines = [f"{'#' * level} {experiment.title}", "", experiment.question, ""]
    lines += [f"**The paper:** {experiment.claim}", "", f"**Selection:** {experiment.selection}", ""]
    lines += [f"![{experiment.title}]({experiment.name}.png)", ""]
    for table in tables:
        lines += [f"{table.title}", "", markdown_table(table.rows), ""]
    for verdict in verdicts:
        lines.append(f"- **{verdict.word.capitalize()}**: {verdict.statement} {verdict.evidence}.")
    lines += [f"- **Failed, and left out**: {name}: {message}" for name, message in study.failed.items()]
    command = f"headcode reproduce {experiment.name} --scale {study.scale}"
    recorded = f", {study.from_records} of them taken from kept records" if study.from_records else ""
    runs = f"{len(study.rows)} runs{recorded}" if experiment.trains else "without a training run"
    return "\n".join([*lines, "", f"Made by `{command}`, {runs}.", ""])


def table_cells(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The columns of a table, each cell as it is shown."""
    return {column: [_cell(row.get(column)) for row in rows] for column in rows[0]} if rows else {}


def markdown_table(rows: Sequence[Row]) -> str:
    if not rows:
        return "(no rows)"
    columns = table_cells(rows)
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(line) + " |" for line in zip(*columns.values(), strict=True)]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _plain(row: Row) -> Row:
    """A row for JSON: a mean becomes its parts."""
    return {key: dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value for key, value in row.items()}  # type: ignore[arg-type]
