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
from headcode.experiments.pages import FINDINGS, page, publish
from headcode.experiments.paper import beside_the_paper
from headcode.experiments.records import add_records, commit_of, recorded_rows
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


class NothingRecorded(ValueError):
    """There is no record of any run of an experiment."""


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
    recorded_only: bool = False,
    pages: Path | None = None,
    kept: Path | None = None,
    display: Display | None = None,
    say: Callable[[str], None] = print,
    **engine_options: Any,
) -> Outcome:
    """Train the runs that are missing in OUT, and write OUT/NAME/SCALE: results.csv, findings.json and .md, figure.

    Experiments that share a configuration share the run. Runs whose records are in `records` are not trained again,
    unless the experiment needs their weights; the records of trained runs are added there. With `recorded_only` the
    other runs are not trained, and named in the findings; so are runs that fail, which are left out. `pages` is a
    folder that takes the results over, as a page. The other arguments are those of `run_sweep`.
    """
    if kept is not None:
        warnings.warn("reproduce's argument `kept` is now called `records`.", DeprecationWarning, stacklevel=2)
        records = kept
    pairs = planned_runs(experiment, scale, seeds)
    if pages is not None and scale == "smoke":
        raise ValueError("Results of smoke scale say nothing, so they get no page; take the scale laptop or paper.")
    if recorded_only and (records is None or experiment.needs_weights):
        why = "a folder of records" if records is None else "weights, which records do not have"
        raise ValueError(f"{experiment.name} without training needs {why}.")
    known: dict[str, Row] = {}
    if records is not None and not experiment.needs_weights:
        known = recorded_rows(pairs, records, out / "records")
    if known:
        say(f"{len(known)} of {len(pairs)} runs are taken from kept records in {records}, and not trained again.")
    missing = [(name, config) for name, config in pairs if name not in known]
    if recorded_only and not known:
        raise NothingRecorded(f"{records} has no record of a run of {experiment.name} at {scale} scale.")
    trained: list[Row] = []
    if missing and not recorded_only:
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
    for row, run in zip(trained, runs, strict=True):
        row["commit"] = commit_of(run)
    if records is not None and (added := add_records(runs, records / f"{experiment.name}.jsonl")):
        say(f"The records of {added} runs are now kept in {records}.")
    by_name = known | {row["name"]: row for row in trained}
    rows = [by_name[name] for name in dict(pairs) if name in by_name]
    folder = out / experiment.name / scale
    folder.mkdir(parents=True, exist_ok=True)
    left_out = [name for name, _ in pairs if name not in by_name and name not in failed]
    study = Study(scale, rows, folder, threads, from_records=len(known), failed=failed, missing=left_out)
    start = time.monotonic()
    experiment.analyse(study, say)
    tables = [*experiment.tables(study), *beside_the_paper(experiment, study)]
    verdicts = experiment.verdicts(study)
    figures = experiment.draw(study, folder / experiment.name)
    pictures = [path.name for path in figures if path.suffix == ".png"]
    findings = findings_of(experiment, study, tables, verdicts, pictures)
    as_json, as_text = folder / FINDINGS, folder / "findings.md"
    replace_file(as_json, to_json(findings))
    replace_file(as_text, page(experiment, findings).encode())
    files = [_write_rows(rows, folder / "results.csv"), as_json, as_text, *figures]
    say(f"Analysis and figure of {experiment.name}: {time.monotonic() - start:.0f} s.")
    if pages is not None:
        files += publish(folder, pages, experiment)
    return Outcome(study, tables, verdicts, files)


def _write_rows(rows: Sequence[Row], path: Path) -> Path:
    """The rows without the folders and times of one machine: the same runs give the same bytes."""
    told = [{k: v for k, v in row.items() if k not in ("folder", "seconds", "error", "commit")} for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(k for row in told for k in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: json.dumps(v) if isinstance(v, (list, tuple)) else v for k, v in row.items()} for row in told)
    replace_file(path, text.getvalue().encode())
    return path


def findings_of(
    experiment: Experiment, study: Study, tables: Sequence[Table], verdicts: Sequence[Verdict], figures: Sequence[str]
) -> dict[str, Any]:
    """All that a page tells of a study, as JSON has it."""
    told = {
        "experiment": experiment.name,
        "scale": study.scale,
        "question": experiment.question,
        "paper": experiment.claim,
        "selection": experiment.selection,
        "runs": len(study.rows),
        "taken from kept records": study.from_records,
        "hashes": {row["name"]: row["hash"] for row in study.rows},
        "missing": study.missing,
        "failed": study.failed,
        "commits": sorted({row["commit"] for row in study.rows if row.get("commit")}),
        "seeds": sorted({row["seed"] for row in study.rows}),
        "figures": figures,
        "tables": [{"title": table.title, "rows": [_plain(row) for row in table.rows]} for table in tables],
        "verdicts": [{**dataclasses.asdict(verdict), "word": verdict.word} for verdict in verdicts],
    }
    found = finite(told)
    assert isinstance(found, dict)
    return found


def _plain(row: Row) -> Row:
    """A row for JSON: a mean becomes its parts."""
    return {key: dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value for key, value in row.items()}  # type: ignore[arg-type]
