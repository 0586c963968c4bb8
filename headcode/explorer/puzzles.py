"""SRAVEN in the explorer: puzzles of a split, drawn ones, cells set by hand, the exact solver's word, and donors."""

import dataclasses
from typing import Any

import numpy as np

from headcode.explorer.state import State
from headcode.tasks import RULE_NAMES, SRaven, oracle
from headcode.tasks.sraven_rules import DISTRIBUTE, STEPS, apply_rule

MAX_EXPLANATIONS = 2000


@dataclasses.dataclass(frozen=True)
class Puzzle:
    """A puzzle with all that is known about it."""

    task: SRaven
    cells: np.ndarray
    """(row, column, position), the answer of the unedited puzzle in the last panel."""
    rules: tuple[int, ...]
    """Of each feature."""
    permutations: np.ndarray
    """(column, position): position j of column c shows feature permutations[c, j]."""
    edited: bool = False

    @property
    def answer(self) -> np.ndarray:
        return self.cells[-1, -1]

    @property
    def x(self) -> np.ndarray:
        return self.task.encode(self.cells[None])[0].numpy()

    def place(self, token: int) -> tuple[int, int, int]:
        """Row, column and position of a token."""
        panel, position = divmod(token, self.task.num_features)
        row, column = divmod(panel, self.task.grid)
        return row, column, position

    def feature(self, token: int) -> int:
        _, column, position = self.place(token)
        return int(self.permutations[column, position])

    def rule(self, token: int) -> int:
        return self.rules[self.feature(token)]

    def where(self, feature: int) -> list[int]:
        """The position of a feature in every column."""
        return [int(np.flatnonzero(column == feature)[0]) for column in self.permutations]

    def token_rules(self) -> list[int]:
        return [self.rule(token) for token in range(self.task.sequence_length)]


def puzzle_of(task: SRaven, state: State) -> Puzzle:
    """The puzzle that a state shows, edits included."""
    puzzle = draw(task, state.rules, state.seed, state.shuffle) if state.rules else sample(task, state.split, state.n)
    if not state.edits:
        return puzzle
    cells = puzzle.cells.copy()
    for token, value in state.edits:
        cells[puzzle.place(token)] = value
    return dataclasses.replace(puzzle, cells=cells, edited=bool((cells != puzzle.cells).any()))


def sample(task: SRaven, split: str, instance: int) -> Puzzle:
    raw = task.raw(split, np.array([instance]))
    return Puzzle(task, raw["puzzles"][0], tuple(raw["rules"][0].tolist()), raw["permutations"][0])


def draw(task: SRaven, rules: tuple[int, ...], seed: int, shuffle: bool) -> Puzzle:
    """A puzzle with the given rule for each feature; the same seed draws the same cells."""
    rng = np.random.default_rng(seed)
    grid, values = task.grid, task.num_values
    features = np.empty((grid, grid, task.num_features), dtype=np.int8)
    for feature, rule in enumerate(rules):
        # Each feature has its own draws, so that another rule for one leaves the others as they are.
        own = np.random.default_rng([seed, feature])
        free, threes = own.integers(values, size=(grid, grid)), own.permutation(values)[:grid]
        for row in range(grid):
            if rule == DISTRIBUTE:
                features[row, :, feature] = own.permutation(threes)
                continue
            line = free[row].tolist()
            if rule < len(STEPS):
                line = [(line[0] + STEPS[rule] * column) % values for column in range(grid)]
            line[-1] = apply_rule(line[:-1], rule, values)
            features[row, :, feature] = line
    hide = task.permute and shuffle
    order = [rng.permutation(task.num_features) if hide else np.arange(task.num_features) for _ in range(grid)]
    permutations = np.stack(order)
    cells = np.stack([features[:, column, permutations[column]] for column in range(grid)], axis=1)
    return Puzzle(task, np.ascontiguousarray(cells), rules, permutations)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the visible cells say, by the exact solver."""

    answers: list[list[int]]
    probabilities: list[float]
    readings: list[tuple[list[int], float]]
    """The most probable (rules by position of the last column, probability) that explain the cells."""
    explanations: int

    @property
    def headline(self) -> str:
        if not self.answers:
            return "No rules explain these cells."
        if len(self.answers) == 1:
            return "Unique: the visible panels allow exactly one answer."
        best = f"the best guess is right with {self.probabilities[0]:.0%}"
        return f"Ambiguous: {len(self.answers)} answers fit; {best}."


def judge_puzzle(puzzle: Puzzle, state: State) -> Verdict | str:
    """The exact solver's verdict, or why there is none. A split's puzzles are judged with the split's own prior."""
    task = puzzle.task
    options: dict[str, Any] = {"num_values": task.num_values, "permuted": task.permute, "rules": task.rule_ids}
    if not state.rules and not puzzle.edited:
        options["compositions"] = task.compositions[task.split_compositions[state.split]]
    try:
        solutions = oracle.solve(puzzle.cells[None], **options)
    except ValueError as reason:
        return str(reason)
    count = int(solutions.explanations[0])
    readings: dict[tuple[int, ...], float] = {}
    if count <= MAX_EXPLANATIONS:
        for found in oracle.explain(puzzle.cells, **options):
            if found.probability > 0:
                rules = tuple(found.rules.tolist())
                readings[rules] = readings.get(rules, 0.0) + found.probability
    elif solutions.rules[0].min() >= 0:
        readings[tuple(solutions.rules[0].tolist())] = float(solutions.probabilities[0][0])
    best = sorted(readings.items(), key=lambda each: -each[1])[:3]
    answers, probabilities = solutions.answers[0].tolist(), solutions.probabilities[0].tolist()
    return Verdict(answers, probabilities, [(list(rules), share) for rules, share in best], count)


def rewritten(puzzle: Puzzle, token: int, rule: int) -> Puzzle:
    """The same puzzle with the rows above the last one telling another rule for a token's feature."""
    where = puzzle.where(puzzle.feature(token))
    cells = puzzle.cells.copy()
    for row in range(puzzle.task.grid):
        before = [int(cells[row, column, place]) for column, place in enumerate(where[:-1])]
        cells[row, -1, where[-1]] = apply_rule(before, rule, puzzle.task.num_values)
    rules = list(puzzle.rules)
    rules[puzzle.feature(token)] = rule
    return dataclasses.replace(puzzle, cells=cells, rules=tuple(rules))


def donor_of(puzzle: Puzzle, state: State) -> tuple[Puzzle, str] | None:
    """The puzzle whose codes are put in, and its name in words."""
    kind, _, rest = state.donor.partition("-")
    if kind == "rule" and int(rest) != DISTRIBUTE:
        return rewritten(puzzle, state.query, int(rest)), f"this puzzle with the rule {RULE_NAMES[int(rest)]}"
    if kind == "n":
        return sample(puzzle.task, state.split, int(rest)), f"{state.split} puzzle {int(rest)}"
    return None


def expected(puzzle: Puzzle, donor: Puzzle, token: int) -> tuple[int, int] | None:
    """If the answer follows the code: (position in the answer, value), the donor's rule on this puzzle's last row."""
    rule = donor.rule(token)
    if rule == DISTRIBUTE:
        return None
    where = puzzle.where(puzzle.feature(token))
    before = [int(puzzle.cells[-1, column, place]) for column, place in enumerate(where[:-1])]
    return where[-1], apply_rule(before, rule, puzzle.task.num_values)


def uninformative(puzzle: Puzzle, donor: Puzzle, token: int, said: np.ndarray) -> str:
    """Why a donor cannot show whether the answer follows its code: a sentence, or "" where it can.

    `said` is what the model answers without the patch, (feature,).
    """
    follow = expected(puzzle, donor, token)
    if follow is None:
        return f"What the donor's rule, {RULE_NAMES[DISTRIBUTE]}, gives is not determined by one row."
    place, value = follow
    if not puzzle.edited and value == puzzle.answer[place]:
        return f"The donor's rule gives {value} on this row, which is the puzzle's own answer."
    if value == said[place]:
        return f"The donor's rule gives {value} on this row, which is the model's answer without the patch."
    return ""
