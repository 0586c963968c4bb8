"""Tasks as text: prompts with answers, for evaluating language models on the same instances.

>>> from headcode.tasks import SRaven
>>> task = SRaven(num_features=2)
>>> prompt, answer = prompts(task, task.sample("iid", 0, 1))[0]
>>> print(prompt.splitlines()[-4])
Row 1: [6 2] [5 1] [5 5]
"""

from collections.abc import Sequence

import numpy as np

from headcode.tasks.base import Batch, Task
from headcode.tasks.fuzzy_logic import FuzzyLogic
from headcode.tasks.sraven import SRaven
from headcode.tasks.variants import variant_names

DECIMALS = 3


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
    grid, modulus = task.grid, task.num_values
    symbols = "numbers" if names is None else "letters"
    written = f"numbers from 0 to {modulus - 1}"
    if names is not None:
        written = "letters, each of which stands for a number: " + ", ".join(f"{n} = {i}" for i, n in enumerate(names))
    lines = [
        f"The {grid}×{grid} grid below has panels of {task.num_features} {written}. "
        f"The panels show {task.num_features} features, and each feature follows one rule along every row, "
        f"all arithmetic modulo {modulus}:",
        *(f"- {sentence}" for sentence in _rule_sentences(task)),
    ]
    if task.permute:
        lines.append(
            "Which position of a panel shows which feature may differ from column to column, "
            "but it is the same in all rows of a column."
        )
    lines.append(f"Give the {task.num_features} {symbols} of the last panel in order, separated by spaces.")
    lines.append("")
    for row in range(grid):
        panels = [
            "[?]" if row == column == grid - 1 else f"[{sraven_answer(puzzle[row, column], names)}]"
            for column in range(grid)
        ]
        lines.append(f"Row {row + 1}: " + " ".join(panels))
    lines.append("Answer:")
    return "\n".join(lines)


def _rule_sentences(task: SRaven) -> list[str]:
    rules = set(task.rule_ids)
    sentences = []
    if 0 in rules:
        sentences.append("constant: the value stays the same")
    steps = [name for rule, name in ((1, "+1"), (2, "+2"), (3, "-1"), (4, "-2")) if rule in rules]
    if steps:
        sentences.append(f"progression: the value changes by {' or '.join(steps)} from panel to panel")
    if 5 in rules:
        sentences.append("sum: the last value is the sum of the others")
    if 6 in rules:
        sentences.append("difference: the last value is the first minus the others")
    if 7 in rules:
        sentences.append(f"distribute: the same {task.grid} distinct values stand in every row, in any order")
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
