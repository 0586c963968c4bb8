"""Make a figure of the paper, or of ours: train what it needs, analyse, draw, and say what agrees with the paper.

Scales: smoke (seconds: shows that it works, no result), laptop (two cores, what docs/results.md tells), paper (the
paper's own grid; the cost is printed first).

Example: headcode reproduce heads --scale smoke
         headcode reproduce logic-ablation --scale laptop --jobs 2
         headcode reproduce logic-generalisation --scale paper --dry-run
         headcode reproduce all --scale laptop --kept docs/results/records --recorded --pages docs/results
"""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from headcode.cli import drop_output
from headcode.cli._tables import aligned_table
from headcode.cli._training import Switch
from headcode.cli.sweep import Jobs, Option, Threads, options_of, plain_endings, say_failures
from headcode.experiments import EXPERIMENTS, SCALES, Experiment, Outcome, estimate, experiment, planned_runs, reproduce
from headcode.experiments.base import Scale
from headcode.experiments.pages import FINDINGS, table_cells, write_pages
from headcode.experiments.records import recorded_names
from headcode.experiments.run import NothingRecorded
from headcode.sweep import SweepFailed
from headcode.train import Runtime

ALL = "all"


@dataclasses.dataclass(frozen=True)
class Command:
    """Arguments of `headcode reproduce`."""

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]", help_behavior_hint="")] = None
    """The experiment, or all; without one, the experiments are listed (or with --pages, all pages written again)."""
    scale: Scale = "smoke"
    """smoke, laptop or paper."""
    out: Path = Path("experiments")
    """Folder for the runs, tables and figures; experiments in one folder share runs."""
    jobs: Jobs = None
    """Runs at a time."""
    threads: Threads = None
    """CPU threads of each run."""
    engine: str = "local"
    """local, ray or slurm."""
    option: Option = ()
    """Of the engine, as for `headcode sweep`: num_gpus=…, partition=…, timeout_minutes=…, see docs/sweeps.md."""
    seeds: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: its own)")] = None
    """So many seeds of every setting, 0 to N-1: fewer or more than the experiment has."""
    kept: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(optional)")] = None
    """Records of finished runs without weights: runs that are there are not trained again, others are added."""
    recorded: Switch = False
    """Train nothing: the results of those runs alone that have records; the others are named as not run yet."""
    pages: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(optional)")] = None
    """Take the results over into DIR/NAME, and write the page DIR/NAME.md and the tables of claims in DIR.md."""
    dry_run: Switch = False
    """Print the runs and their cost, and stop."""

    def run(self) -> None:
        if self.name is None and self.pages is not None:
            say(f"{len(write_pages(self.pages, [experiment(name) for name in EXPERIMENTS]))} pages were written.")
            return
        if self.name is None:
            print("Experiments:")
            for name in EXPERIMENTS:
                print(f"  {name:<22} {experiment(name).title}")
            print(f"Scales: {', '.join(SCALES)}. Example: headcode reproduce {EXPERIMENTS[0]} --scale smoke")
            return
        names = EXPERIMENTS if self.name == ALL else (self.name,)
        if self.name == ALL and self.recorded:
            # New results are made one by one: runs that experiments share would else begin pages of single runs.
            made = [name for name in names if self.pages is None or (self.pages / name / FINDINGS).is_file()]
            names = tuple(name for name in made if not experiment(name).needs_weights)
        if not all([self._one(experiment(name)) for name in names]):
            raise SystemExit(1)

    def _one(self, chosen: Experiment) -> bool:
        """Whether none of its runs failed."""
        say(f"{chosen.title}\n{chosen.question}\nPaper: {chosen.claim}\nSelection: {chosen.selection}")
        if self.dry_run or self.scale == "paper":
            runs = planned_runs(chosen, self.scale, self.seeds, dry=self.dry_run)
            known: set[str] = set()
            if self.kept is not None and not chosen.needs_weights:
                known = recorded_names(runs, self.kept)
                say(f"{len(known)} of {len(runs)} runs have records in {self.kept}, and are not trained again.")
            missing = [config for name, config in runs if name not in known]
            say(f"Cost: {estimate(missing, Runtime(device='auto', threads=self.threads))}.")
            if self.dry_run:
                for run_name, _ in runs:
                    say(f"  {run_name}{' (has a record)' if run_name in known else ''}")
                return True
        with plain_endings():
            try:
                outcome = reproduce(
                    chosen,
                    self.scale,
                    self.out,
                    jobs=self.jobs,
                    threads=self.threads,
                    engine=self.engine,
                    seeds=self.seeds,
                    records=self.kept,
                    recorded_only=self.recorded,
                    pages=self.pages,
                    say=say,
                    **options_of(self.option, self.engine, reproduce),
                )
            except NothingRecorded as nothing:
                if self.name != ALL:
                    raise
                say(str(nothing))
                return True
            except SweepFailed as nothing:  # not one run finished; other experiments may do better
                say_failures(nothing.failures)
                return False
        self._tell(outcome)
        say_failures(outcome.study.failed)
        return not outcome.study.failed

    def _tell(self, outcome: Outcome) -> None:
        for table in outcome.tables:
            say(f"\n{table.title}\n{aligned_table(table_cells(table.rows))}")
        say("")
        for verdict in outcome.verdicts:
            say(f"[{verdict.word}] {verdict.statement} {verdict.evidence}")
        if self.scale == "smoke":
            say("(smoke scale: these numbers show that it runs, and say nothing about the paper)")
        say("\nFiles:")
        for path in outcome.files:
            say(f"  {path}")


def say(words: str) -> None:
    """Print; who closes our output (as head does) still gets the files and the exit code."""
    try:
        print(words, flush=True)
    except BrokenPipeError:
        drop_output()
