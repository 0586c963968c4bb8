"""Answers without learning: what shortcuts are worth, beside which a trained model's accuracy means something.

SRAVEN (puzzles (N, row, column, position) -> answers (N, position); the last panel is never read):
    most_frequent        the value that stands most often at that position of the visible panels
    copy_left            the panel to the left of the hidden one
    copy_above           the panel above it
    without_permutation  the oracle of each position alone, as if no column were permuted; where no rule fits, copy_left
Fuzzy logic (a batch's x (B, point, variable + 1) -> (B, 1); the hidden value is 0 in x and never used):
    context_mean         the mean of the visible values
    nearest_point        the value of the visible point nearest to the query
    consistent_terms     the function that fits the context best, of all compositions: the solver that knows the task
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from headcode.tasks import oracle
from headcode.tasks.base import Batch
from headcode.tasks.fuzzy_logic import FuzzyLogic
from headcode.tasks.sraven import SRaven


def most_frequent(task: SRaven, puzzles: np.ndarray) -> np.ndarray:
    visible = puzzles.reshape(len(puzzles), -1, task.num_features)[:, :-1]
    counts = (visible[..., None] == np.arange(task.num_values)).sum(axis=1)  # (N, position, value)
    return counts.argmax(axis=-1)


def copy_left(task: SRaven, puzzles: np.ndarray) -> np.ndarray:
    return puzzles[:, -1, -2].astype(np.int64)


def copy_above(task: SRaven, puzzles: np.ndarray) -> np.ndarray:
    return puzzles[:, -2, -1].astype(np.int64)


def without_permutation(task: SRaven, puzzles: np.ndarray) -> np.ndarray:
    alone = np.moveaxis(puzzles, -1, 1).reshape(-1, task.grid, task.grid, 1)
    solutions = oracle.solve(alone, task.num_values, permuted=False, rules=task.rule_ids)
    guess = solutions.best.reshape(-1, task.num_features)
    return np.where(guess >= 0, guess, copy_left(task, puzzles))


def context_mean(task: FuzzyLogic, x: Tensor) -> Tensor:
    return x[:, :-1, -1].mean(dim=1, keepdim=True)


def nearest_point(task: FuzzyLogic, x: Tensor) -> Tensor:
    distance = (x[:, :-1, :-1] - x[:, -1:, :-1]).square().sum(dim=-1)  # (B, point)
    return x[:, :-1, -1].gather(1, distance.argmin(dim=1, keepdim=True))


def consistent_terms(task: FuzzyLogic, x: Tensor) -> Tensor:
    inputs, values = x[..., :-1], x[:, :-1, -1]
    best = torch.full((len(x),), torch.inf)
    guess = torch.zeros(len(x), 1)
    for composition in task.compositions:
        fit = FuzzyLogic.evaluate(torch.from_numpy(task.term_bits(composition)), inputs, task.t_norm)  # (B, point)
        error = (fit[:, :-1] - values).square().sum(dim=1)
        better = error < best
        best = torch.where(better, error, best)
        guess = torch.where(better[:, None], fit[:, -1:], guess)
    return guess


SRAVEN_BASELINES: dict[str, Callable[[SRaven, np.ndarray], np.ndarray]] = {
    "most frequent value": most_frequent,
    "copy the panel to the left": copy_left,
    "copy the panel above": copy_above,
    "oracle without the permutation": without_permutation,
}
LOGIC_BASELINES: dict[str, Callable[[FuzzyLogic, Tensor], Tensor]] = {
    "mean of the context": context_mean,
    "value of the nearest point": nearest_point,
    "best-fitting function": consistent_terms,
}


def score_sraven(task: SRaven, puzzles: np.ndarray, answers: np.ndarray) -> dict[str, float]:
    """`accuracy` and `feature_accuracy` of answers (N, position)."""
    batch = Batch(torch.empty(0), torch.from_numpy(puzzles[:, -1, -1].astype(np.int64)), {})
    return task.metrics(task.score(torch.from_numpy(np.asarray(answers, dtype=np.int64)), batch))
