"""SRAVEN's loops: small integers in, puzzles and one-hot tokens out. No floats but the ones and zeros of x."""

import numpy as np

from headcode.jit import njit

STEPS = np.array([0, 1, 2, -1, -2], dtype=np.int64)  # what rules 0 to 4 add from one cell to the next
SUM, DIFFERENCE, DISTRIBUTE = 5, 6, 7
BLANK = -1


@njit()
def shuffle(things, index):  # type: ignore[no-untyped-def]
    """Fisher and Yates with the digits of one integer below factorial(len(things)): every order has one integer."""
    for last in range(len(things) - 1, 0, -1):
        rest = index // (last + 1)
        chosen = index - rest * (last + 1)
        index = rest
        things[last], things[chosen] = things[chosen], things[last]


@njit()
def wrap(value, num_values):  # type: ignore[no-untyped-def]
    """value modulo num_values for a value at most num_values off; a comparison costs less than a division."""
    if value >= num_values:
        return value - num_values
    if value < 0:
        return value + num_values
    return value


@njit()
def fill_row(row, rule, draws, num_values):  # type: ignore[no-untyped-def]
    """One row of one feature under any rule but distribute; draws are len(row) - 1 values or more."""
    grid = len(row)
    value = draws[0]
    row[0] = value
    if rule < SUM:
        for column in range(1, grid):
            value = wrap(value + STEPS[rule], num_values)
            row[column] = value
        return
    for column in range(1, grid - 1):
        row[column] = draws[column]
        value = wrap(value + draws[column] if rule == SUM else value - draws[column], num_values)
    row[grid - 1] = value


@njit()
def build(integers, multisets, shared, shown, permute, num_values, puzzles, rules, permutations):  # type: ignore[no-untyped-def]
    """Puzzles from bounded integers, laid out as `SRaven._bounds` says.

    integers (N, draws), multisets (composition, feature), shared (N,) whether the columns share one permutation,
    shown (N,) how many features are not blank (the first: rules and places are shuffled) ->
    puzzles (N, row, column, position), rules (N, feature), permutations (N, column, position).
    """
    grid, num_features = permutations.shape[1], permutations.shape[2]
    cells = np.empty((grid, grid), dtype=np.int64)
    pool = np.empty(num_values, dtype=np.int64)
    chosen = np.empty(grid, dtype=np.int64)
    for n in range(len(integers)):
        draws = integers[n]
        for feature in range(num_features):
            rules[n, feature] = multisets[draws[0], feature]
        shuffle(rules[n], draws[1])
        for column in range(grid):
            for position in range(num_features):
                permutations[n, column, position] = position
            if permute:
                shuffle(permutations[n, column], draws[3] if shared[n] else draws[3 + column])
        start = 3 + grid
        for feature in range(num_features):
            rule = rules[n, feature]
            if rule == DISTRIBUTE:
                at = start + grid * (grid - 1)
                for value in range(num_values):
                    pool[value] = value
                for k in range(grid):
                    other = k + draws[at + k]
                    pool[k], pool[other] = pool[other], pool[k]
                at += grid
                for row in range(grid):
                    chosen[:] = pool[:grid]
                    shuffle(chosen, draws[at + row])
                    cells[row, :] = chosen
            else:
                for row in range(grid):
                    at = start + row * (grid - 1)
                    fill_row(cells[row], rule, draws[at : at + grid - 1], num_values)
            start += grid * (grid - 1) + 2 * grid
            for column in range(grid):
                for position in range(num_features):
                    if permutations[n, column, position] == feature:
                        for row in range(grid):
                            puzzles[n, row, column, position] = cells[row, column] if feature < shown[n] else BLANK


@njit()
def encode(puzzles, x):  # type: ignore[no-untyped-def]
    """Ones into the zeros of x (N, row·column·position, value); blanks and the last panel stay zero."""
    grid, num_features = puzzles.shape[1], puzzles.shape[3]
    for n in range(len(puzzles)):
        token = 0
        for panel in range(grid * grid - 1):
            for position in range(num_features):
                value = puzzles[n, panel // grid, panel % grid, position]
                if value != BLANK:
                    x[n, token, value] = 1.0
                token += 1


@njit()
def label_tokens(rules, permutations, token_rules):  # type: ignore[no-untyped-def]
    """The rule behind every token: (N, feature) and (N, column, position) -> (N, row·column·position)."""
    grid, num_features = permutations.shape[1], permutations.shape[2]
    for n in range(len(rules)):
        token = 0
        for panel in range(grid * grid):
            for position in range(num_features):
                token_rules[n, token] = rules[n, permutations[n, panel % grid, position]]
                token += 1
