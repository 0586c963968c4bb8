"""An experiment from its configurations to its figure: train what is missing, analyse, write findings, draw."""

import csv
import dataclasses
import io
import json
import re
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
from headcode.sweep import Display, SweepFailed, config_hash, run_sweep
from headcode.train import Runtime, Trainer
from headcode.train.cost import product_speed, run_flops, step_flops
from headcode.train.progress import duration

PROBE_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class Cost:
    """What the runs of an experiment will cost."""

    runs: int
    steps: int
    instances: int
    """Of training, all runs together."""
    flops: float
    """Counted from the configurations: training steps and evaluations, matrix products alone."""
    seconds: float
    """On this machine, one run after the other, if every run has the same speed."""
    speed: str
    """At which FLOP/s, in words."""

    def __str__(self) -> str:
        if not self.runs:
            return "nothing, there are no runs"
        return (
            f"{self.runs:,} runs, {self.steps:,} steps, {self.instances:,} training instances, {self.flops:.2e} FLOPs "
            f"of training and evaluation by count; about {duration(self.seconds)} on this machine, one run after the "
            f"other, at {self.speed}"
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


def planned_runs(
    experiment: Experiment, scale: Scale, seeds: int | None = None, *, dry: bool = False
) -> list[tuple[str, RunConfig]]:
    """The runs of a scale, named after the experiment; `seeds` gives every setting that many seeds, from 0 on.

    `dry` is for those who do not train: the text of language models need not be there.
    """
    pairs = list(experiment.plan(scale) if dry else experiment.runs(scale))
    if seeds is not None:
        if seeds < 1:
            raise ValueError(f"seeds must be 1 or more, got {seeds}.")
        pairs = _with_seeds(pairs, seeds)
    return [(f"{experiment.name}: {name}", config) for name, config in pairs]


def _with_seeds(pairs: Sequence[tuple[str, RunConfig]], count: int) -> list[tuple[str, RunConfig]]:
    """Every setting with the seeds 0 … count-1, fewer or more than it had."""
    settings: dict[str, tuple[str, RunConfig]] = {}
    for name, config in pairs:
        settings.setdefault(config_hash(_at_seed(config, 0)), (name, config))
    found = []
    for seed in range(count):
        for name, config in settings.values():
            renamed, times = re.subn(r"\bseed=\d+", f"seed={seed}", name)
            found.append((renamed if times or seed == 0 else f"{name},seed={seed}", _at_seed(config, seed)))
    return found


def _at_seed(config: RunConfig, seed: int) -> RunConfig:
    """The run with another seed; a task with a seed of its own keeps it."""
    own = {} if config.task.seed == config.seed else {"task_seed": config.task.seed}
    return override(config, seed=seed, **own)


def estimate(configs: Sequence[RunConfig], runtime: Runtime) -> Cost:
    """FLOPs by count; time by a three-second probe of the run with the largest step, or where its text is not there
    yet, by a plain matrix product."""
    if not configs:
        return Cost(0, 0, 0, 0.0, 0.0, "no speed")
    largest = max(configs, key=step_flops)
    if largest.task.reads_text:
        speed = product_speed()
        words = f"the {speed / 1e9:.0f} GFLOP/s of a plain matrix product on this CPU, which no run reaches"
    else:
        probe = Trainer(override(largest, eval_size=0), Path("."), runtime=runtime, reporters=[])
        speed = probe.probe(PROBE_SECONDS) * step_flops(largest)
        words = f"the {speed / 1e9:.0f} GFLOP/s of a probe of the largest step (other models may be faster or slower)"
    flops = sum(map(run_flops, configs))
    steps, instances = sum(c.steps for c in configs), sum(c.steps * c.batch_size for c in configs)
    return Cost(len(configs), steps, instances, flops, flops / speed, words)


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
    files = [_write_rows(study.rows, folder / "results.csv"), as_json, as_text, *figures]
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
        "runs": len(study.rows) if experiment.trains else 0,
        "taken from kept records": study.from_records,
        "hashes": {row["name"]: row["hash"] for row in study.rows} if experiment.trains else {},
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
