"""A model of the zoo against unseen puzzles and the exact solver, for the demo."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headcode import zoo
from headcode.tasks import RULE_NAMES, oracle, render
from headcode.train.folder import read_run_config

SPLIT = "compositional"
RULE = "the zoo's model for the hardest puzzles (most features, then permuted ones); of several, the best on iid"
"""How the demo chooses its model: no held-out score takes part."""
CHUNK = 500
"""Puzzles at a time."""


@dataclasses.dataclass(frozen=True)
class Solved:
    """What the demo tells about the puzzles, in its three forms: terminal, table, picture."""

    words: str
    summary: str
    scores: list[dict[str, Any]]
    picture: str
    caption: str


def choose_model() -> str:
    """The name of the model that `RULE` says."""
    found = {}
    for name in zoo.names():
        task: Any = read_run_config(zoo.folder(name)).task
        card = zoo.card(name)
        if task.view == "puzzle":
            found[name] = (task.num_features, task.permute, card["scores"]["iid"][card["metric"]])
    if not found:
        raise ValueError("The zoo has no SRAVEN model, which the demo needs to solve puzzles.")
    return max(found, key=lambda name: found[name])


def solve_puzzles(name: str, count: int, figures: Path) -> Solved:
    """Let `zoo/NAME` solve the first `count` puzzles of the held-out compositions, and show one of them."""
    from headcode.analysis.runs import open_run

    run = open_run(f"zoo/{name}")
    task: Any = run.task
    batch = task.sample(SPLIT, 0, count)
    with torch.no_grad():
        logits = torch.cat([run.model(part, queries=task.queries) for part in batch.x.split(CHUNK)])
    chances = logits.double().softmax(-1).numpy()  # (puzzle, feature, value)
    answers, truth = chances.argmax(-1), batch.y.numpy()
    puzzles = batch.info["puzzles"].numpy()
    solutions = oracle.solve_split(task, SPLIT, puzzles)
    right = (answers == truth).all(1)
    scores = [
        {
            "who": f"zoo/{name}",
            "all features right": float(right.mean()),
            "per feature": float((answers == truth).mean()),
        },
        {
            "who": "the best possible (exact solver)",
            "all features right": float(solutions.ceiling),
            "per feature": None,
        },
        {
            "who": "guessing",
            "all features right": task.num_values**-task.num_features,
            "per feature": 1 / task.num_values,
        },
    ]
    summary = (
        f"{count} puzzles of {task.num_features} features whose combination of rules was not in training: zoo/{name} "
        f"gets {right.mean():.1%} of them right, all {task.num_features} features; no solver can get more than "
        f"{solutions.ceiling:.1%} on average, "
        f"because some puzzles have several answers; guessing gets {task.num_values**-task.num_features:.2%}."
    )
    solved = right & np.array(solutions.unique)
    shown = int(np.argmax(solved))  # number 0 if there is none
    choice = "the first with a single answer that the model gets right" if solved[shown] else "the first of them"
    path = figures / "puzzle.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    verdict = "right" if right[shown] else "wrong"
    caption = (
        f"Puzzle {shown} of the held-out compositions with its answer: {choice}. The model says "
        f"{_numbers(answers[shown])} ({verdict}), the truth is {_numbers(truth[shown])}."
    )
    render.save(render.draw_puzzle(puzzles[shown], task.num_values, True, f"SRAVEN · puzzle {shown}"), path)
    rules = ", ".join(RULE_NAMES[rule] for rule in batch.info["token_rules"][shown, -task.num_features :].tolist())
    sure = " ".join(f"{chances[shown, feature, value]:.2f}" for feature, value in enumerate(answers[shown]))
    words = "\n".join(
        [
            f"The model: zoo/{name}, {RULE}.",
            summary,
            "",
            f"Puzzle {shown}, {choice}:",
            render.puzzle_text(puzzles[shown]),
            f"the model's answer: {_numbers(answers[shown])}   (probabilities {sure})",
            f"the answer:         {_numbers(truth[shown])}   (rules: {rules})",
        ]
    )
    return Solved(words, summary, scores, str(path), caption)


def _numbers(values: np.ndarray) -> str:
    return " ".join(str(int(value)) for value in values)
