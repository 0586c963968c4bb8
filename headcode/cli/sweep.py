"""Train many runs, each once: those of a sweep file, or all combinations of fields' values.

The same command again goes on where it stopped.

Example: headcode sweep logic --preset logic-small --set method=softmax,linear,hyla --set seed=0,1,2 --jobs 2

A sweep file is Python with a function sweep() that yields (name, config) pairs: headcode sweep heads.py --jobs 2
"""

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from headcode.cli._training import Switch, print_json
from headcode.suggest import no_such

Values = Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="FIELD=A,B,…"), tyro.conf.UseAppendAction]
Option = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE"), tyro.conf.UseAppendAction]
Jobs = Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: 1, on a cluster no limit)")]
Threads = Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: cores/jobs, on a cluster 1)")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """Arguments of `headcode sweep`."""

    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE|TASK")]
    """A sweep file, or a task (logic, sraven, …) whose fields --set varies."""
    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: the task's)")] = None
    """With a task: the configuration to start from."""
    values: Values = ()
    """With a task: a field and its values; of several fields, every combination is trained. One value just sets it."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: sweeps/NAME)")] = None
    """The sweep's folder."""
    jobs: Jobs = None
    """Runs at a time."""
    threads: Threads = None
    """CPU threads of each run."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda, mps."""
    compile: Switch = False
    """torch.compile the models."""
    engine: str = "local"
    """local (processes), ray (a Ray cluster, extra headcode[ray]) or slurm (extra headcode[slurm])."""
    option: Option = ()
    """Of the engine: address=… or num_gpus=… (ray); partition=… or timeout_minutes=… (slurm), see docs/sweeps.md."""
    dry_run: Switch = False
    """Print the names, hashes and states of the runs, and train nothing."""
    json: Switch = False
    """Print the results as JSON."""

    def run(self) -> None:
        from headcode.sweep.runner import run_sweep

        configs, options = self._configs(), options_of(self.option, self.engine, run_sweep)
        _refuse_incomplete(configs)
        out = Path("sweeps") / Path(self.what).stem if self.out is None else self.out
        if self.dry_run:
            _show_plan(configs, out)
            return
        with plain_endings():
            rows = run_sweep(
                configs,
                out,
                jobs=self.jobs,
                threads=self.threads,
                engine=self.engine,
                device=self.device,
                compile=self.compile,
                **options,
            )
        if self.json:
            print_json({"rows": rows})
        else:
            print(f"{out / 'results.csv'}  (look at it with: headcode results {out})")

    def _configs(self) -> list[tuple[str, Any]]:
        from headcode.presets import DEFAULT_PRESETS, preset_of
        from headcode.sweep.file import read_sweep

        if self.what not in DEFAULT_PRESETS:
            if not self.what.endswith(".py") and not Path(self.what).exists():
                raise ValueError(no_such("There is no task or sweep file", self.what, DEFAULT_PRESETS, "the tasks are"))
            if self.values or self.preset:
                raise ValueError("A sweep file says everything itself: leave out --set and --preset.")
            return read_sweep(self.what)
        return configs_of(preset_of(self.what, self.preset or DEFAULT_PRESETS[self.what]), self.values)


@contextlib.contextmanager
def plain_endings() -> Iterator[None]:
    """A sweep that ends early in a sentence for each reason: 1 after failed runs, 128 + signal after a signal."""
    from headcode.sweep.runner import SweepFailed, SweepInterrupted

    try:
        yield
    except SweepInterrupted as stopped:
        _complain(str(stopped))
        raise SystemExit(128 + stopped.signal_number) from None
    except SweepFailed as failed:
        say_failures(failed.failures)
        raise SystemExit(1) from None


def say_failures(failures: Mapping[str, str]) -> None:
    """A sentence for each run that failed."""
    for name, message in failures.items():
        _complain(f"{name} failed: {message}")


def _complain(sentence: str) -> None:
    with contextlib.suppress(OSError):  # who closed our output still gets the exit code
        print(f"headcode: {sentence}", file=sys.stderr)


def options_of(words: Sequence[str], engine: str, function: Callable[..., Any]) -> dict[str, Any]:
    """The engine's options in `name=value` words. An argument of `function` itself is not an option of the engine."""
    from headcode.sweep.runner import run_sweep
    from headcode.sweep.words import value_of

    own = {*inspect.signature(function).parameters, *inspect.signature(run_sweep).parameters}
    options = {}
    for name, text in (_pair(word, "--option") for word in words):
        if name in own:
            flags = ("jobs", "threads", "out")
            instead = f"use --{name}" if name in flags else "see docs/sweeps.md for those that there are"
            raise ValueError(f"The engine {engine} has no option {name!r}; {instead}.")
        options[name] = value_of(text)
    return options


def _refuse_incomplete(configs: list[tuple[str, Any]]) -> None:
    """A run without its text would fail as soon as it starts: better now, before any other is trained."""
    for name, config in configs:
        if missing := config.task.missing():
            raise ValueError(
                f"The run {name!r} {missing}, and sweep has no flag for one; write a sweep file that gives it with "
                "task.with_text(prepare(…)), as docs/sweeps.md shows."
            )


def configs_of(base: Any, words: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Every combination of the values in `field=a,b` words; fields with one value are set and not named."""
    from headcode.run import override
    from headcode.sweep.grid import grid
    from headcode.sweep.words import split_values, value_of

    if not words:
        raise ValueError(
            "The sweep of a task needs values to try, for example --set method=softmax,hyla --set seed=0,1,2."
        )
    values: dict[str, list[Any]] = {}
    for word in words:
        field, text = _pair(word, "--set")
        if field in values:
            raise ValueError(f"--set {field} is given twice; write all its values after one.")
        values[field] = [value_of(piece.strip()) for piece in split_values(text)]
    varied = {field: column for field, column in values.items() if len(column) > 1}
    fixed = {field: column[0] for field, column in values.items() if len(column) == 1}
    if not varied:
        # One run is a sweep too; it is named after what was set.
        varied, fixed = values, {}
    return list(grid(override(base, **fixed), **varied))


def _pair(word: str, flag: str) -> tuple[str, str]:
    name, sign, text = word.partition("=")
    name = name.strip().replace("-", "_")
    if not sign or not name or not text.strip():
        raise ValueError(f"{flag} takes NAME=VALUE, for example {_EXAMPLES[flag]}; got {word!r}.")
    return name, text


_EXAMPLES = {"--set": "seed=0,1,2", "--option": "num_gpus=1"}


def _show_plan(configs: list[tuple[str, Any]], out: Path) -> None:
    from headcode.sweep.plan import plan
    from headcode.sweep.status import is_finished, read_progress

    for run in plan(configs, out):
        done = "finished" if is_finished(run.folder, run.config) else f"step {read_progress(run.folder).step}"
        print(f"{run.hash}  {done:<10} {' = '.join(run.names)}")
