"""Look at one instance of a task: in the terminal, and as a PNG or SVG picture.

Example: headcode puzzle --instance 7 --answer --out puzzle.png

Example: headcode puzzle logic --split novel --out function.svg

What trained models say to it: headcode puzzle --model zoo/sraven-4-hyla zoo/sraven-4-softmax --answer
"""

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from headcode.cli._task_options import Count, TaskOptions, with_task_flags

if TYPE_CHECKING:
    from headcode.analysis.runs import OpenRun


@dataclasses.dataclass(frozen=True, kw_only=True)
class Puzzle(TaskOptions):
    split: str = "compositional"
    """train, iid, compositional, or novel (fuzzy logic)."""
    instance: Count = 0
    """Number of the instance in its split."""
    answer: bool = False
    """Show the answer, the rules and what the exact solver says."""
    out: tuple[Path, ...] = ()
    """Pictures to write; the name's ending says PNG or SVG."""
    variables: Annotated[tuple[int, int] | None, tyro.conf.arg(metavar="N N", help_behavior_hint="(optional)")] = None
    """Fuzzy logic: the two variables of the picture, counted from 1."""

    model: Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN …", help_behavior_hint="(optional)")] = ()
    """Runs, or models of the zoo (zoo/NAME), that answer it too; the instance is of the task that they learned."""

    def run(self) -> None:
        runs = self._open_models()
        task = runs[0].task if runs else self.make_task()
        if self.instance < 0:
            raise ValueError(f"--instance counts from 0, got {self.instance}.")
        for path in self.out:
            if path.suffix.lower() not in (".png", ".svg"):
                raise ValueError(f"A picture's name ends in .png or .svg, got {path.name!r}.")
        if self.variables is not None:
            count = getattr(task, "num_variables", None)
            if count is None:
                raise ValueError("--variables is for fuzzy logic: headcode puzzle logic --variables 1 3.")
            if len(set(self.variables)) < 2 or not set(self.variables) <= set(range(1, count + 1)):
                raise ValueError(f"--variables are two different ones of 1..{count}, got {self.variables}.")
        from rich.console import Console

        from headcode.tasks import render

        with Console(stderr=True).status("making it (the very first time compiles, some seconds)"):
            batch = task.instances(self.split, [self.instance])
        print(task.as_text(batch, self.answer, colour=sys.stdout.isatty()))
        title = f"{self.split} · instance {self.instance}" + (f" · seed {self.seed}" if self.seed else "")
        for path in self.out:
            print(f"wrote {render.save(task.draw(batch, title, self.answer, self.variables), path)}")
        for name, run in zip(self.model, runs, strict=True):
            print(f"{name} says {_said(run, batch, self.answer)}")
        for line in task.remarks(batch, self.split, self.answer):
            print(line)

    def _open_models(self) -> list["OpenRun"]:
        from headcode.analysis.runs import open_run

        runs = [open_run(name) for name in self.model]
        if runs and (given := [*self.given_flags(), *["seed"] * (self.seed != 0)]):
            raise ValueError(f"With --model the task is the model's own: leave out --{given[0].replace('_', '-')}.")
        for name, run in zip(self.model, runs, strict=True):
            if run.task.reads_text:
                raise ValueError(f"{name} is a run on {run.task.name}; text goes on with headcode generate.")
            if run.task != runs[0].task:
                raise ValueError(f"{name} and {self.model[0]} were trained on different tasks; show one of them.")
        return runs


def _said(run: "OpenRun", batch: Any, judged: bool) -> str:
    """A model's answer to the first instance, and whether it is right."""
    from headcode.analysis.runs import predict

    found = run.task.judge(predict(run, batch), batch)
    values = found["predictions"][0].ravel()
    words = " ".join(f"{value:.3f}" if values.dtype.kind == "f" else str(value) for value in values)
    return words + (f": {'right' if found['correct'][0] else 'wrong'}" if judged else "")


Command = with_task_flags(Puzzle)
