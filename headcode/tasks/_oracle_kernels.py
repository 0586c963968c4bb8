"""The oracle's search: chains of positions that some rule fits, then all ways to cover the positions with them."""

import numpy as np

from headcode.jit import njit
from headcode.tasks._sraven_kernels import DISTRIBUTE, STEPS, SUM, wrap

# The search of one puzzle ends with an error after this many steps, some seconds, and not never.
MAX_STEPS = 100_000_000


@njit()
def expected_value(cells, row, rule, num_values):  # type: ignore[no-untyped-def]
    """What a rule but distribute puts into the last cell of a row, or -1 if the earlier cells forbid it."""
    last = cells.shape[1] - 1
    if rule < SUM:
        step = STEPS[rule]
        for column in range(1, last):
            if cells[row, column] != wrap(cells[row, column - 1] + step, num_values):
                return -1
        return wrap(cells[row, last - 1] + step, num_values)
    total = cells[row, 0]
    for column in range(1, last):
        change = cells[row, column] if rule == SUM else -cells[row, column]
        total = wrap(total + change, num_values)
    return total


@njit()
def distribute_answer(cells):  # type: ignore[no-untyped-def]
    """The missing value of the last row if all rows have the same distinct values, else -1. The corner is not read."""
    grid = cells.shape[1]
    for column in range(grid):
        for other in range(column):
            if cells[0, column] == cells[0, other]:
                return -1
    for row in range(1, grid):
        width = grid if row < grid - 1 else grid - 1
        for column in range(width):
            found = False
            for other in range(grid):
                found = found or cells[row, column] == cells[0, other]
            if not found:
                return -1
            for other in range(column):
                if cells[row, column] == cells[row, other]:
                    return -1
    for column in range(grid):
        used = False
        for other in range(grid - 1):
            used = used or cells[grid - 1, other] == cells[0, column]
        if not used:
            return cells[0, column]
    return -1


@njit()
def rule_answer(cells, rule, num_values):  # type: ignore[no-untyped-def]
    """The last cell of one chain (row, column) under one rule, or -1 if the rule does not fit its visible cells."""
    if rule == DISTRIBUTE:
        return distribute_answer(cells)
    last = cells.shape[1] - 1
    for row in range(last):
        if expected_value(cells, row, rule, num_values) != cells[row, last]:
            return -1
    return expected_value(cells, last, rule, num_values)


@njit()
def find_candidates(puzzle, rules, permuted, num_values, starts, chains, chain_rules, answers):  # type: ignore[no-untyped-def]
    """All (chain, rule) that fit, grouped by the chain's position in the last column.

    A chain is one position per column. Those of last position j are starts[j] … starts[j+1]-1 of the buffers:
    chains (candidate, column), chain_rules and answers.
    """
    grid, num_features = puzzle.shape[0], puzzle.shape[2]
    cells = np.empty((grid, grid), dtype=np.int64)
    positions = np.zeros(grid, dtype=np.int64)
    count = 0
    tails = num_features ** (grid - 1) if permuted else 1
    for last in range(num_features):
        starts[last] = count
        for tail in range(tails):
            rest = tail
            for column in range(grid):
                if column == grid - 1 or not permuted:
                    positions[column] = last
                else:
                    positions[column] = rest % num_features
                    rest = rest // num_features
            for row in range(grid):
                for column in range(grid):
                    cells[row, column] = puzzle[row, column, positions[column]]
            for rule in rules:
                answer = rule_answer(cells, rule, num_values)
                if answer >= 0:
                    chains[count] = positions
                    chain_rules[count] = rule
                    answers[count] = answer
                    count += 1
    starts[num_features] = count


@njit()
def grown(array, length):  # type: ignore[no-untyped-def]
    """The same rows in an array that has room for `length` of them."""
    bigger = np.empty((length, array.shape[1]), dtype=array.dtype)
    bigger[: len(array)] = array
    return bigger


@njit()
def cover(starts, chains, chain_rules, next_state, weights, paths, keep_paths, candidate_answers, answers, masses):  # type: ignore[no-untyped-def]
    """Walks through all ways to give every position of the last column a candidate without using a position twice.

    next_state (state, rule) counts rules: a state is a multiset of the rules chosen so far, and weights (state,) is the
    probability of one explanation with that multiset, 0 where the prior excludes it (it still counts, and so does its
    answer: what the cells support does not depend on the prior). Gives the number of explanations,
    the best one's weight and candidates, the answers (answer, position) with their masses (answer, 1), their number,
    and with keep_paths the candidates of every explanation.
    """
    num_features = len(starts) - 1
    grid = chains.shape[1]
    used = np.zeros((grid, num_features), dtype=np.bool_)
    states = np.zeros(num_features + 1, dtype=np.int64)
    choice = np.zeros(num_features, dtype=np.int64)
    best = np.zeros(num_features, dtype=np.int64)
    best_weight = 0.0
    explanations = 0
    num_answers = 0
    latest = 0
    depth = 0
    choice[0] = starts[0] - 1
    steps = 0
    while depth >= 0:
        steps += 1
        if steps > MAX_STEPS:
            raise ValueError(
                "A puzzle has too many explanations to search them all; use fewer features or more values."
            )
        current = choice[depth]
        if current >= starts[depth]:
            for column in range(grid):
                used[column, chains[current, column]] = False
        found = False
        current += 1
        while current < starts[depth + 1] and not found:
            found = True
            for column in range(grid):
                found = found and not used[column, chains[current, column]]
            if not found:
                current += 1
        choice[depth] = current
        if not found:
            choice[depth] = starts[depth] - 1
            depth -= 1
            continue
        for column in range(grid):
            used[column, chains[current, column]] = True
        states[depth + 1] = next_state[states[depth], chain_rules[current]]
        if depth + 1 < num_features:
            depth += 1
            choice[depth] = starts[depth] - 1
            continue
        weight = weights[states[num_features]]
        if keep_paths:
            if explanations == len(paths):
                paths = grown(paths, 2 * len(paths))
            paths[explanations] = choice
        explanations += 1
        if weight > best_weight:
            best_weight = weight
            best[:] = choice
        # The answer is usually the one that was met last.
        index = latest
        for attempt in range(num_answers + 1):
            index = latest if attempt == 0 else attempt - 1
            same = index < num_answers
            if same:
                for position in range(num_features):
                    if answers[index, position] != candidate_answers[choice[position]]:
                        same = False
                        break
            if same:
                break
            index = num_answers
        if index == num_answers:
            if num_answers == len(answers):
                answers = grown(answers, 2 * len(answers))
                masses = grown(masses, 2 * len(masses))
            for position in range(num_features):
                answers[index, position] = candidate_answers[choice[position]]
            masses[index, 0] = 0.0
            num_answers += 1
        masses[index, 0] += weight
        latest = index
    return explanations, best_weight, best, answers, masses, num_answers, paths


@njit()
def comes_before(answers, masses, left, right):  # type: ignore[no-untyped-def]
    """Whether answer `left` is more probable than `right`, or as probable and smaller position by position."""
    if masses[left, 0] != masses[right, 0]:
        return masses[left, 0] > masses[right, 0]
    for position in range(answers.shape[1]):
        if answers[left, position] != answers[right, position]:
            return answers[left, position] < answers[right, position]
    return False


@njit()
def solve(puzzles, rules, permuted, num_values, next_state, weights):  # type: ignore[no-untyped-def]
    """Each puzzle's answers, most probable first, in one flat list with its offsets; see `oracle.Solutions`."""
    num_puzzles, grid, num_features = puzzles.shape[0], puzzles.shape[1], puzzles.shape[3]
    num_chains = num_features**grid if permuted else num_features
    starts = np.zeros(num_features + 1, dtype=np.int64)
    chains = np.empty((num_chains * len(rules), grid), dtype=np.int64)
    chain_rules = np.empty(num_chains * len(rules), dtype=np.int64)
    candidate_answers = np.empty(num_chains * len(rules), dtype=np.int64)
    answers = np.empty((16, num_features), dtype=np.int64)
    masses = np.empty((16, 1), dtype=np.float64)
    paths = np.empty((1, num_features), dtype=np.int64)
    offsets = np.zeros(num_puzzles + 1, dtype=np.int64)
    explanations = np.zeros(num_puzzles, dtype=np.int64)
    best_rules = np.full((num_puzzles, num_features), -1, dtype=np.int64)
    all_answers = np.empty((2 * num_puzzles + 16, num_features), dtype=np.int64)
    all_probabilities = np.empty((2 * num_puzzles + 16, 1), dtype=np.float64)
    total = 0
    for n in range(num_puzzles):
        find_candidates(puzzles[n], rules, permuted, num_values, starts, chains, chain_rules, candidate_answers)
        explanations[n], best_weight, best, answers, masses, count, paths = cover(
            starts, chains, chain_rules, next_state, weights, paths, False, candidate_answers, answers, masses
        )
        if best_weight > 0.0:
            for position in range(num_features):
                best_rules[n, position] = chain_rules[best[position]]
        if total + count > len(all_answers):
            length = max(2 * len(all_answers), total + count)
            all_answers = grown(all_answers, length)
            all_probabilities = grown(all_probabilities, length)
        mass = 0.0
        for index in range(count):
            mass += masses[index, 0]
        order = np.arange(count)
        for index in range(1, count):
            place = index
            while place > 0 and comes_before(answers, masses, order[place], order[place - 1]):
                order[place], order[place - 1] = order[place - 1], order[place]
                place -= 1
        for index in range(count):
            all_answers[total + index] = answers[order[index]]
            all_probabilities[total + index, 0] = masses[order[index], 0] / mass if mass > 0.0 else 0.0
        total += count
        offsets[n + 1] = total
    return offsets, all_answers[:total].copy(), all_probabilities[:total, 0].copy(), explanations, best_rules
