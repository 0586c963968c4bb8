"""Tasks as text: prompts with answers, for evaluating language models on the same instances.

>>> from headcode.tasks import SRaven
>>> task = SRaven(num_features=2)
>>> prompt, answer = prompts(task, task.sample("iid", 0, 1))[0]
>>> print(prompt.splitlines()[-3])
Row 1: [6 2] [5 1] [5 5]
"""

from collections.abc import Sequence

import numpy as np

from headcode.tasks.base import Batch, Task
from headcode.tasks.fuzzy_logic import FuzzyLogic
from headcode.tasks.sraven import SRaven
from headcode.tasks.variants import variant_names

DECIMALS = 3
PROMPT_VERSION = 2
"""Raised whenever the words of a prompt change: scores of different versions are not compared."""


def prompts(task: Task, batch: Batch, variant: int = 0) -> list[tuple[str, str]]:
    """(prompt, answer) of every instance of a batch; see `variants` for those of SRAVEN."""
    if isinstance(task, SRaven):
        puzzles, instances = batch.info["puzzles"].numpy(), batch.info["instance"].tolist()
        names = [variant_names(task, instance, variant) for instance in instances]
        return [
            (sraven_prompt(task, puzzle, given), sraven_answer(puzzle[-1, -1], given))
            for puzzle, given in zip(puzzles, names, strict=True)
        ]
    if isinstance(task, FuzzyLogic):
        inputs, targets = batch.x[..., :-1].numpy(), batch.info["targets"].numpy()
        return [
            (logic_prompt(task, inputs[n], targets[n]), f"{targets[n, -1]:.{DECIMALS}f}") for n in range(len(inputs))
        ]
    raise ValueError(f"There is no text form of {type(task).__name__}; it exists for FuzzyLogic and SRaven.")


def sraven_answer(values: Sequence[int] | np.ndarray, names: Sequence[str] | None = None) -> str:
    """The hidden panel as it stands in a prompt, without brackets; `names` are those of the values 0, 1, …"""
    return " ".join(str(int(value)) if names is None else names[value] for value in values)


def sraven_prompt(task: SRaven, puzzle: np.ndarray, names: Sequence[str] | None = None) -> str:
    """A puzzle as text, the last panel hidden, with the rules of the game; values may have other names than numbers."""
    grid, count, modulus = task.grid, task.num_features, task.num_values
    symbols = "numbers" if names is None else "letters"
    written = ""
    if names is not None:
        written = " It is written as a letter: " + ", ".join(f"{name} = {n}" for n, name in enumerate(names)) + "."
    asked = f"{count} {symbols}" if count > 1 else symbols[:-1]
    lines = [
        f"The {grid}×{grid} grid below has panels; the last one is hidden. Each panel shows {count} features, each by "
        f"a number from 0 to {modulus - 1}.{written} Every feature follows one of these rules along each row, from "
        f"left to right, the same rule in all rows. All arithmetic is modulo {modulus}: after {modulus - 1} comes 0.",
        *(f"- {sentence}" for sentence in _rule_sentences(task)),
        "Different features may follow the same rule.",
    ]
    if task.permute and count > 1:
        lines.append(
            "The features do not keep their positions: each column shows them in an order of its own, which is the "
            "same in all rows. What stands first in one column may go on as the last of the next."
        )
    else:
        lines.append("Each feature has the same position in all panels.")
    lines.append(
        f"Which {asked} does the hidden panel show, in the order in which the last column shows the features? If "
        "several answers fit, give the most probable one, where every combination of rules is equally likely."
    )
    lines.append(f'End with one line: "Answer:" and the {asked}, separated by spaces.')
    lines.append("")
    for row in range(grid):
        panels = [
            "[?]" if row == column == grid - 1 else f"[{sraven_answer(puzzle[row, column], names)}]"
            for column in range(grid)
        ]
        lines.append(f"Row {row + 1}: " + " ".join(panels))
    return "\n".join(lines)


def _rule_sentences(task: SRaven) -> list[str]:
    rules = set(task.rule_ids)
    sentences = []
    if 0 in rules:
        sentences.append("constant: the number stays the same along a row.")
    steps = [name for rule, name in ((1, "+1"), (2, "+2"), (3, "-1"), (4, "-2")) if rule in rules]
    if steps:
        sentences.append(
            "progression: from panel to panel the number changes by one step, the same in all rows: "
            f"{' or '.join(steps)}."
        )
    if 5 in rules:
        sentences.append("sum: the last number of a row is the sum of the others.")
    if 6 in rules:
        others = "the second" if task.grid == 3 else "all the others"
        sentences.append(f"difference: the last number of a row is the first minus {others}.")
    if 7 in rules:
        sentences.append(f"distribute: every row has the same {task.grid} different numbers, each row in any order.")
    return sentences


def logic_prompt(task: FuzzyLogic, inputs: np.ndarray, targets: np.ndarray) -> str:
    """A sequence as text: inputs (point, variable) and all targets (point,), of which the last is not told."""
    conjunction, disjunction = ("minimum", "maximum") if task.t_norm == "zadeh" else ("product", "probabilistic sum")
    names = " ".join(f"x{v + 1}" for v in range(task.num_variables))
    lines = [
        f"An unknown function f({names.replace(' ', ', ')}) is a fuzzy-logic OR of {task.num_terms} terms. "
        f"Each term is an AND of all variables, each as it is or negated. NOT x is 1 - x, AND is the {conjunction}, "
        f"OR is the {disjunction}. From the examples, give the last value of f with {DECIMALS} decimals.",
        "",
    ]
    for point, target in zip(inputs[:-1], targets[:-1], strict=True):
        lines.append(f"f({_numbers(point)}) = {target:.{DECIMALS}f}")
    lines.append(f"f({_numbers(inputs[-1])}) =")
    return "\n".join(lines)


def _numbers(values: np.ndarray) -> str:
    return ", ".join(f"{value:.{DECIMALS}f}" for value in values)
