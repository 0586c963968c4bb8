"""Look at one instance of a task: in the terminal, and as a PNG or SVG picture.

Example: headcode puzzle --instance 7 --answer --out puzzle.png

Example: headcode puzzle logic --split novel --out function.svg
"""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from headcode.cli._task_options import Count, TaskOptions
from headcode.tasks import RULE_NAMES, Batch, FuzzyLogic, SRaven, oracle, render


@dataclasses.dataclass(frozen=True)
class Command(TaskOptions):
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
            if not isinstance(task, FuzzyLogic):
                raise ValueError("--variables is for fuzzy logic: headcode puzzle logic --variables 1 3.")
            if len(set(self.variables)) < 2 or not set(self.variables) <= set(range(1, task.num_variables + 1)):
                raise ValueError(
                    f"--variables are two different ones of 1..{task.num_variables}, got {self.variables}."
                )
        from rich.console import Console

        with Console(stderr=True).status("making it (the very first time compiles, some seconds)"):
            batch = task.instances(self.split, [self.instance])
        if isinstance(task, SRaven):
            self._show_puzzle(task, batch)
        elif isinstance(task, FuzzyLogic):
            self._show_function(task, batch)

    def _show_puzzle(self, task: SRaven, batch: Batch) -> None:
        puzzle = batch.info["puzzles"][0].numpy()
        print(render.puzzle_text(puzzle, self.answer, colour=sys.stdout.isatty()))
        caption = "In each column the attributes may have swapped roles." if task.permute else None
        for path in self.out:
            figure = render.draw_puzzle(puzzle, task.num_values, self.answer, self._title("SRAVEN"), caption)
            print(f"wrote {render.save(figure, path)}")
        if self.answer:
            rules = batch.info["token_rules"][0, -task.num_features :].tolist()
            print("answer:       " + " ".join(map(str, puzzle[-1, -1].tolist())))
            print("rules:        " + ", ".join(RULE_NAMES[rule] for rule in rules))
            for column, permutation in enumerate(batch.info["permutations"][0].tolist()):
                print(f"column {column + 1}:     features {' '.join(str(feature + 1) for feature in permutation)}")
        self._tell_solutions(task, puzzle)

    def _tell_solutions(self, task: SRaven, puzzle: np.ndarray) -> None:
        try:
            solutions = oracle.solve_split(task, self.split, puzzle[None])
        except ValueError as reason:
            print(f"Not solved exactly: {reason}")
            return
        answers, probabilities = solutions.answers[0], solutions.probabilities[0]
        if len(answers) == 1:
            print("The visible panels allow exactly one answer.")
        else:
            print(
                f"The visible panels allow {len(answers)} answers; the best guess is right with {probabilities[0]:.1%}."
            )
        if self.answer:
            print(f"explanations: {solutions.explanations[0]}")
            for found, probability in zip(answers.tolist(), probabilities.tolist(), strict=True):
                print(f"  {' '.join(map(str, found))}  with probability {probability:.4f}")

    def _show_function(self, task: FuzzyLogic, batch: Batch) -> None:
        terms, targets = batch.info["terms"][0].numpy(), batch.info["targets"][0].numpy()
        print(render.function_text(terms, batch.x[0].numpy(), self.answer, float(targets[-1])))
        points = np.concatenate([batch.x[0, :, :-1].numpy(), targets[:, None]], axis=-1)
        chosen = None if self.variables is None else (self.variables[0] - 1, self.variables[1] - 1)
        for path in self.out:
            figure = render.draw_function(
                terms, chosen, points=points, t_norm=task.t_norm, title=self._title("Fuzzy logic")
            )
            print(f"wrote {render.save(figure, path)}")

    def _title(self, name: str) -> str:
        return f"{name} · {self.split} · instance {self.instance}" + (f" · seed {self.seed}" if self.seed else "")
