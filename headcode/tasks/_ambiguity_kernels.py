"""The loops of the paper repository's ambiguity check, for a 3×3 grid."""

import numpy as np

from headcode.jit import njit
from headcode.tasks._oracle_kernels import rule_answer
from headcode.tasks._sraven_kernels import DISTRIBUTE


@njit()
def loose_distribute_answer(cells):  # type: ignore[no-untyped-def]
    """Distribute as the check reads it, the missing value or -1.

    The two whole rows have the same three values in any order, and the last row has values out of these; neither need
    be distinct. The missing one is that which the last row has least often, the smallest of several.
    """
    values, second = np.sort(cells[0]), np.sort(cells[1])
    answer, fewest = -1, 3
    for place in range(3):
        if values[place] != second[place]:
            return -1
        times = 0
        for column in range(2):
            times += 1 if cells[2, column] == values[place] else 0
        if times < fewest:
            answer, fewest = values[place], times
    for column in range(2):
        known = False
        for place in range(3):
            known = known or cells[2, column] == values[place]
        if not known:
            return -1
    return answer


@njit()
def continues_otherwise(cells, num_values):  # type: ignore[no-untyped-def]
    """Whether one of the check's rules fits a chain (row, column) and ends it with another value than it has."""
    for rule in range(DISTRIBUTE):
        answer = rule_answer(cells, rule, num_values)
        if answer >= 0 and answer != cells[2, 2]:
            return True
    answer = loose_distribute_answer(cells)
    return answer >= 0 and answer != cells[2, 2]


@njit()
def has_cover(fitting):  # type: ignore[no-untyped-def]
    """Whether fitting (last, first, second) has an entry for each `last` that uses no `first` and no `second` twice."""
    num_features = len(fitting)
    choice = np.full(num_features, -1)
    used = np.zeros((2, num_features), dtype=np.bool_)
    depth = 0
    while depth >= 0:
        if choice[depth] >= 0:
            used[0, choice[depth] // num_features] = False
            used[1, choice[depth] % num_features] = False
        choice[depth] += 1
        while choice[depth] < num_features**2:
            first, second = choice[depth] // num_features, choice[depth] % num_features
            if fitting[depth, first, second] and not (used[0, first] or used[1, second]):
                break
            choice[depth] += 1
        if choice[depth] == num_features**2:
            choice[depth] = -1
            depth -= 1
            continue
        used[0, choice[depth] // num_features] = True
        used[1, choice[depth] % num_features] = True
        if depth == num_features - 1:
            return True
        depth += 1
    return False


@njit()
def check(puzzles, permuted, num_values):  # type: ignore[no-untyped-def]
    """(N,): whether some matching of the positions lets every feature end with another value than it has."""
    num_features = puzzles.shape[3]
    found = np.zeros(len(puzzles), dtype=np.bool_)
    fitting = np.zeros((num_features, num_features, num_features), dtype=np.bool_)
    cells = np.empty((3, 3), dtype=np.int64)
    for n in range(len(puzzles)):
        for last in range(num_features):
            for first in range(num_features):
                for second in range(num_features):
                    fitting[last, first, second] = False
                    if not permuted and not first == second == last:
                        continue
                    for row in range(3):
                        cells[row, 0] = puzzles[n, row, 0, first]
                        cells[row, 1] = puzzles[n, row, 1, second]
                        cells[row, 2] = puzzles[n, row, 2, last]
                    fitting[last, first, second] = continues_otherwise(cells, num_values)
        found[n] = has_cover(fitting)
    return found
