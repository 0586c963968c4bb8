"""When is a SRAVEN puzzle ambiguous? Two definitions, for the same puzzles.

**The exact solver** (`headcode.tasks.oracle`): several answers fit the visible panels. An answer belongs to a reading,
a matching of positions across the columns with a rule for each feature; a rival is an answer that differs from the
puzzle's own in at least one feature.

**The authors' check** (`check_is_ambiguous` in the paper's repository), as we read it: a matching counts only if *each*
feature has a rule that fits its visible cells and ends it with *another* value than the puzzle's own. A rival that
agrees with the puzzle's answer in one feature or more is not found. In one respect the check is wider: its distribute
rule does not ask for three distinct values.
"""

from typing import Any

import numpy as np
from torch import Tensor

from headcode.tasks import oracle


def authors_check(puzzles: np.ndarray | Tensor, num_values: int = 8, permuted: bool = True) -> np.ndarray:
    """(N,): whether the authors' check calls each puzzle (row, column, position) ambiguous; it reads the last panel.

    The check tries all matchings, of unpermuted puzzles too; `permuted=False` has it try the true one alone.
    """
    from headcode.tasks import _ambiguity_kernels as kernels

    cells = puzzles.detach().cpu().numpy() if isinstance(puzzles, Tensor) else np.asarray(puzzles)
    if cells.ndim != 4 or cells.shape[1:3] != (3, 3) or cells.shape[3] < 1 or cells.dtype.kind not in "iu":
        raise ValueError(
            f"The authors' check is for puzzles (N, 3, 3, position) of whole numbers, got {cells.dtype} {cells.shape}."
        )
    cells = cells.astype(np.int64)
    if cells.size and not (cells.min() >= 0 and cells.max() < num_values):
        raise ValueError(f"All cells, the last panel's too, must lie in 0..{num_values - 1}.")
    return kernels.check(cells, permuted, num_values)


def changed_features(puzzles: np.ndarray, solutions: oracle.Solutions) -> np.ndarray:
    """(N, features + 1): entry [n, k] is whether puzzle n has a rival that differs in exactly k features.

    A rival is an answer other than the puzzle's own, so column 0 is whether the own one is among the answers.
    """
    num_puzzles, num_features = len(puzzles), puzzles.shape[3]
    owner = np.repeat(np.arange(num_puzzles), solutions.num_answers)
    differing = (solutions.flat_answers != puzzles[owner, -1, -1]).sum(axis=1)
    found = np.zeros((num_puzzles, num_features + 1), dtype=bool)
    found[owner, differing] = True
    return found


def authors_layout(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The puzzles of `SRaven.raw` as the authors' generator lays them out: unpermuted, and permuted.

    Its features are in the order of their rules' ids, which without permutation is that of the positions.
    """
    puzzles, permutations = arrays["puzzles"], arrays["permutations"]
    features = np.argsort(arrays["rules"], axis=1, kind="stable")  # (N, place in the order of the rules)
    place = np.argsort(permutations, axis=2)  # (N, column, feature) -> position
    positions = np.take_along_axis(place, np.broadcast_to(features[:, None], place.shape), axis=2)
    unpermuted = _at(puzzles, positions)
    return unpermuted, _at(unpermuted, permutations)


def answers_with_sorted_rules(puzzle: np.ndarray, num_values: int = 8) -> set[tuple[int, ...]]:
    """The answers of an unpermuted puzzle for a solver that knows that rules stand in the order of their ids."""
    readings = oracle.explain(puzzle, num_values, permuted=False)
    return {tuple(reading.answer.tolist()) for reading in readings if (np.diff(reading.rules) >= 0).all()}


def _at(puzzles: np.ndarray, positions: np.ndarray) -> Any:
    """puzzles (N, row, column, position) with positions (N, column, new position) in their places."""
    return np.take_along_axis(puzzles, np.broadcast_to(positions[:, None], puzzles.shape), axis=3)
