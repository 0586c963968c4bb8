"""Look at one instance of a task: in the terminal, and as a PNG or SVG picture.

Example: headcode puzzle --instance 7 --answer --out puzzle.png

Example: headcode puzzle logic --split novel --out function.svg
"""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import tyro

from headcode.cli._task_options import Count, TaskOptions, with_task_flags


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

    def run(self) -> None:
        task = self.make_task()
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
        for line in task.remarks(batch, self.split, self.answer):
            print(line)


Command = with_task_flags(Puzzle)
