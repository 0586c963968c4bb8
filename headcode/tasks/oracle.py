"""The exact solver of SRAVEN: which answers a puzzle allows, and how probable each of them is.

An explanation of a puzzle is a matching of the feature positions across the columns (which position of each column
shows the same feature) and a rule for each matched feature that fits all visible cells. It says what the hidden panel
shows. The posterior of an answer is the share of its explanations, each weighted by the generator's probability of it:

    P(explanation | cells)  ∝  P(multiset) / (number of its arrangements) · Π over features P(visible cells | rule)

Multisets are uniform over the prior (all of them, or a split's own list: `compositions`), a multiset's rules are laid
on the features in a uniformly random arrangement, and matchings are uniform, so they cancel. A rule gives the visible
cells a probability that depends on the rule alone (V values, G×G grid, the hidden cell is always determined):

    constant, progressions   (1/V)**G              one free value in each row
    sum, difference          (1/V)**(G·(G-1))      all visible cells of a row but the last of a full one are free
    distribute               1/C(V, G) · (1/G!)**G one set of values, an order in each row

The mean posterior of the most probable answer is therefore the **ceiling** of a split: the best accuracy that any
solver can reach, exactly, when the prior is the split's own.

>>> import numpy as np
>>> puzzle = np.array([[[3], [4], [5]], [[7], [0], [1]], [[6], [7], [-1]]])       # 3 4 5 / 7 0 1 / 6 7 ?
>>> solutions = solve(puzzle[None])
>>> solutions.answers[0].tolist(), solutions.rules[0].tolist(), solutions.unique[0].item()
([[0]], [1], True)
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from headcode.tasks.base import Batch
from headcode.tasks.sraven import SRaven
from headcode.tasks.sraven_rules import DISTRIBUTE, RULE_NAMES, check_rules

MAX_CHAINS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Solutions:
    """What the visible cells of N puzzles say. A puzzle that no explanation fits has no answers and rules of -1."""

    offsets: np.ndarray
    """(N+1,): the answers of puzzle n are rows offsets[n] … offsets[n+1]-1 of the flat arrays."""
    flat_answers: np.ndarray
    """(answer, position): all answers of all puzzles, each puzzle's most probable first (ties in ascending order)."""
    flat_probabilities: np.ndarray
    """(answer,): the posterior of each, 0 for one that only compositions outside the prior explain."""
    explanations: np.ndarray
    """(N,): number of (matching, rules) that fit the visible cells, whatever the prior."""
    rules: np.ndarray
    """(N, position): the rules of the most probable explanation, by position in the last column; -1 if the prior
    allows none."""

    @functools.cached_property
    def answers(self) -> list[np.ndarray]:
        """Per puzzle the distinct answers, (n, position), most probable first."""
        return np.split(self.flat_answers, self.offsets[1:-1]) if len(self.explanations) else []

    @functools.cached_property
    def probabilities(self) -> list[np.ndarray]:
        """Per puzzle the posterior of each answer, (n,)."""
        return np.split(self.flat_probabilities, self.offsets[1:-1]) if len(self.explanations) else []

    @property
    def num_answers(self) -> np.ndarray:
        """(N,)"""
        return np.diff(self.offsets)

    @property
    def unique(self) -> np.ndarray:
        """(N,): whether there is exactly one answer."""
        return self.num_answers == 1

    @functools.cached_property
    def best(self) -> np.ndarray:
        """(N, position): the most probable answer, -1 where there is none."""
        best = np.full((len(self.explanations), self.flat_answers.shape[1]), -1, dtype=np.int64)
        solvable = self.num_answers > 0
        best[solvable] = self.flat_answers[self.offsets[:-1][solvable]]
        return best

    @functools.cached_property
    def best_probability(self) -> np.ndarray:
        """(N,): the posterior of the most probable answer, 0 where there is none."""
        best = np.zeros(len(self.explanations))
        solvable = self.num_answers > 0
        best[solvable] = self.flat_probabilities[self.offsets[:-1][solvable]]
        return best

    @property
    def ceiling(self) -> float:
        """The mean posterior of the most probable answer."""
        return float(self.best_probability.mean())

    @property
    def ambiguous(self) -> float:
        """The share of puzzles with more than one answer."""
        return float((self.num_answers > 1).mean())

    @property
    def random_choice(self) -> float:
        """The accuracy of a uniformly random choice among the answers: the mean of 1 / number of answers."""
        return float(np.divide(1.0, self.num_answers, where=self.num_answers > 0, out=np.zeros(len(self.rules))).mean())

    def supports(self, answers: np.ndarray) -> np.ndarray:
        """(N,): whether each given answer (N, position) is among the puzzle's answers."""
        return self._hits(answers, np.ones(len(self.flat_answers))) > 0

    def probability_of(self, answers: np.ndarray) -> np.ndarray:
        """(N,): the posterior of each given answer (N, position), 0 for one that nothing supports."""
        return self._hits(answers, self.flat_probabilities)

    def _hits(self, answers: np.ndarray, values: np.ndarray) -> np.ndarray:
        answers = np.asarray(answers)
        if answers.shape != (len(self.explanations), self.flat_answers.shape[1]):
            raise ValueError(
                f"answers must have shape {(len(self.explanations), self.flat_answers.shape[1])} (puzzle, position), "
                f"got {answers.shape}."
            )
        owner = np.repeat(np.arange(len(self.explanations)), self.num_answers)
        hit = (self.flat_answers == answers[owner]).all(axis=1)
        return np.bincount(owner[hit], weights=values[hit], minlength=len(self.explanations))


@dataclasses.dataclass(frozen=True)
class Explanation:
    """One way to read a puzzle, told by the positions of the last column."""

    positions: np.ndarray
    """(column, position): where the feature of each last-column position stands in every column."""
    rules: np.ndarray
    """(position,): its rule."""
    answer: np.ndarray
    """(position,): the hidden panel."""
    probability: float
    """Its posterior."""


def solve(
    puzzles: np.ndarray | Tensor,
    num_values: int = 8,
    permuted: bool = True,
    rules: Sequence[int] | None = None,
    compositions: np.ndarray | None = None,
) -> Solutions:
    """All answers of puzzles (N, row, column, position) with their posteriors; the last panel is never read.

    `permuted=False` takes the positions as matched. `rules` is the generator's rule subset, None for all eight.
    `compositions` (composition, feature) is the prior's list of rule multisets, such as
    `task.compositions[task.split_compositions["iid"]]`; None means all multisets of the rules.
    """
    from headcode.tasks import _oracle_kernels as kernels

    cells, rule_ids = _checked(puzzles, num_values, permuted, rules)
    states, weights = _prior(num_values, cells.shape[1], cells.shape[3], rule_ids, _as_tuples(compositions))
    return Solutions(*kernels.solve(cells, np.array(rule_ids), permuted, num_values, states, weights))


def solve_split(task: SRaven, split: str, puzzles: np.ndarray | Tensor) -> Solutions:
    """`solve` with all that a task tells of the puzzles of a split: its sizes, its rules, its compositions."""
    if split == "train" and task.blank != 0.0:
        raise ValueError(
            "Training puzzles with blank features are no whole puzzles; ask about another split, or use blank=0."
        )
    if split == "train" and task.aligned != 0.0:
        raise ValueError(
            "Aligned training puzzles do not match their columns uniformly, so their posteriors would be wrong; "
            "ask about another split, or use aligned=0."
        )
    prior = task.compositions[task.split_compositions[split]]
    return solve(puzzles, task.num_values, task.permute, task.rule_ids, prior)


def remarks(task: SRaven, batch: Batch, split: str, answer: bool) -> list[str]:
    """Lines about the first puzzle of a batch: with `answer` its answer, rules and permutations; what is possible."""
    puzzle, lines = batch.info["puzzles"][0].numpy(), []
    if answer:
        rules = batch.info["token_rules"][0, -task.num_features :].tolist()
        lines += ["answer:       " + " ".join(map(str, puzzle[-1, -1].tolist()))]
        lines += ["rules:        " + ", ".join(RULE_NAMES[rule] for rule in rules)]
        for column, permutation in enumerate(batch.info["permutations"][0].tolist()):
            lines.append(f"column {column + 1}:     features {' '.join(str(feature + 1) for feature in permutation)}")
    try:
        solutions = solve_split(task, split, puzzle[None])
    except ValueError as reason:
        return [*lines, f"Not solved exactly: {reason}"]
    answers, probabilities = solutions.answers[0], solutions.probabilities[0]
    if len(answers) == 1:
        lines.append("The visible panels allow exactly one answer.")
    else:
        best = f"the best guess is right with {probabilities[0]:.1%}"
        lines.append(f"The visible panels allow {len(answers)} answers; {best}.")
    if answer:
        lines.append(f"explanations: {solutions.explanations[0]}")
        for found, probability in zip(answers.tolist(), probabilities.tolist(), strict=True):
            lines.append(f"  {' '.join(map(str, found))}  with probability {probability:.4f}")
    return lines


def explain(
    puzzle: np.ndarray | Tensor,
    num_values: int = 8,
    permuted: bool = True,
    rules: Sequence[int] | None = None,
    compositions: np.ndarray | None = None,
) -> list[Explanation]:
    """Every explanation of one puzzle (row, column, position), most probable first."""
    from headcode.tasks import _oracle_kernels as kernels

    cells, rule_ids = _checked(puzzle[None], num_values, permuted, rules)
    grid, num_features = cells.shape[1], cells.shape[3]
    states, weights = _prior(num_values, grid, num_features, rule_ids, _as_tuples(compositions))
    room = (num_features**grid if permuted else num_features) * len(rule_ids)
    starts = np.zeros(num_features + 1, dtype=np.int64)
    chains = np.empty((room, grid), dtype=np.int64)
    chain_rules, answers = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64)
    kernels.find_candidates(cells[0], np.array(rule_ids), permuted, num_values, starts, chains, chain_rules, answers)
    buffers = np.empty((16, num_features), dtype=np.int64), np.empty((16, 1)), np.empty((16, num_features), np.int64)
    count, *_, paths = kernels.cover(
        starts, chains, chain_rules, states, weights, buffers[2], True, answers, buffers[0], buffers[1]
    )
    masses = []
    for path in paths[:count]:
        state = 0
        for candidate in path:
            state = states[state, chain_rules[candidate]]
        masses.append(weights[state])
    total = math.fsum(masses)
    found = [
        Explanation(chains[path].T.copy(), chain_rules[path], answers[path], float(mass / total) if total else 0.0)
        for path, mass in zip(paths[:count], masses, strict=True)
    ]
    return sorted(found, key=lambda explanation: -explanation.probability)


def rule_likelihood(rule: int, num_values: int, grid: int) -> float:
    """The probability that a rule gives a feature's visible cells, whichever they are, if they fit it at all."""
    if rule == DISTRIBUTE:
        return 1.0 / (math.comb(num_values, grid) * math.factorial(grid) ** grid)
    free = 1 if rule < 5 else grid - 1
    return float(num_values) ** (-free * grid)


def _checked(
    puzzles: Any, num_values: int, permuted: bool, rules: Sequence[int] | None
) -> tuple[np.ndarray, tuple[int, ...]]:
    cells = puzzles.detach().cpu().numpy() if isinstance(puzzles, Tensor) else np.asarray(puzzles)
    if cells.ndim != 4 or cells.shape[1] != cells.shape[2] or cells.shape[1] < 2 or cells.shape[3] < 1:
        raise ValueError(f"Puzzles have the shape (N, row, column, position) with a square grid, got {cells.shape}.")
    if cells.dtype.kind not in "iu":
        raise ValueError(f"Puzzles hold whole numbers, got {cells.dtype}.")
    cells = cells.astype(np.int64)
    cells[:, -1, -1] = 0  # the hidden panel cannot be read by mistake
    if cells.size and not (cells.min() >= 0 and cells.max() < num_values):
        raise ValueError(f"The visible cells must lie in 0..{num_values - 1}, got {cells.min()}..{cells.max()}.")
    if permuted and cells.shape[3] ** cells.shape[1] > MAX_CHAINS:
        raise ValueError(
            f"{cells.shape[3]} features on a grid of {cells.shape[1]} have more than {MAX_CHAINS:,} chains, "
            "too many to search: use fewer features, or permuted=False."
        )
    return cells, check_rules(None if rules is None else tuple(rules), num_values, cells.shape[1])


def _as_tuples(compositions: np.ndarray | None) -> tuple[tuple[int, ...], ...] | None:
    """Hashable, and without regard to the order of a multiset's rules."""
    if compositions is None:
        return None
    array = np.asarray(compositions)
    if array.ndim != 2 or len(array) == 0 or array.dtype.kind not in "iu":
        raise ValueError(f"compositions must be whole numbers (composition, feature), at least one, got {array.shape}.")
    return tuple(sorted({tuple(sorted(int(rule) for rule in multiset)) for multiset in array}))


@functools.lru_cache(maxsize=64)
def _prior(
    num_values: int,
    grid: int,
    num_features: int,
    rules: tuple[int, ...],
    compositions: tuple[tuple[int, ...], ...] | None,
) -> tuple[np.ndarray, np.ndarray]:
    """next_state (state, rule) of the states that count rules, and the weight of one explanation (0: not allowed)."""
    if compositions is not None and not all(len(m) == num_features and set(m) <= set(rules) for m in compositions):
        raise ValueError(f"compositions must be multisets of {num_features} rules out of {rules}.")
    allowed = None if compositions is None else set(compositions)
    index: dict[tuple[int, ...], int] = {(): 0}
    queue: list[tuple[int, ...]] = [()]
    rows: list[list[int]] = []
    logarithms: list[float] = []
    for multiset in queue:  # grows while we walk: all multisets up to num_features rules, smallest first
        row = [0] * 8
        if len(multiset) < num_features:
            for rule in rules:
                following = tuple(sorted((*multiset, rule)))
                if following not in index:
                    index[following] = len(queue)
                    queue.append(following)
                row[rule] = index[following]
        rows.append(row)
        if len(multiset) < num_features or (allowed is not None and multiset not in allowed):
            logarithms.append(-math.inf)
            continue
        # 1 / (number of arrangements) = Π (multiplicity!) / F!; the F! is common to all.
        arrangements = sum(math.lgamma(multiset.count(rule) + 1) for rule in set(multiset))
        likelihood = sum(math.log(rule_likelihood(rule, num_values, grid)) for rule in multiset)
        logarithms.append(arrangements + likelihood)
    peak = max(logarithms)
    weights = np.array([math.exp(value - peak) for value in logarithms])
    if any(weight == 0.0 and value > -math.inf for weight, value in zip(weights, logarithms, strict=True)):
        raise ValueError(
            f"{num_features} features of {num_values} values on a grid of {grid}: the rules' likelihoods differ by "
            "more than double precision holds; use a smaller task."
        )
    return np.array(rows, dtype=np.int64), weights
