"""An oracle written a second time, slowly: all matchings × all rules in exact fractions, sharing no code with headcode.

Where the package derives (weights of a multiset, likelihood of a rule), this one counts what the generator can do.
"""

from fractions import Fraction
from functools import cache
from itertools import combinations, permutations, product
from math import comb

STEP = {0: 0, 1: 1, 2: 2, 3: -1, 4: -2}


@cache
def rows_of(rule, num_values, grid):
    """Every row the rule can draw, with its probability (not for distribute)."""
    rows = []
    if rule in STEP:
        for first in range(num_values):
            rows.append(tuple((first + STEP[rule] * c) % num_values for c in range(grid)))
    else:
        for free in product(range(num_values), repeat=grid - 1):
            last = free[0]
            for value in free[1:]:
                last = last + value if rule == 5 else last - value
            rows.append((*free, last % num_values))
    return rows


@cache
def row_probability(rule, visible, num_values, grid):
    """P(row starts with these visible cells) and the set of full rows that do."""
    rows = rows_of(rule, num_values, grid)
    fitting = [row for row in rows if row[: len(visible)] == visible]
    return Fraction(len(fitting), len(rows)), {row[-1] for row in fitting}


@cache
def set_probabilities(visible, num_values, grid):
    """Distribute: for every set of values, P(a row in random order starts with these cells) and how such rows end."""
    fitting = {}
    for chosen in combinations(range(num_values), grid):
        orders = list(permutations(chosen))
        starting = [order for order in orders if order[: len(visible)] == visible]
        if starting:
            fitting[chosen] = Fraction(len(starting), len(orders)), {order[-1] for order in starting}
    return fitting


@cache
def chain(rule, rows, num_values):
    """rows: the visible cells of one matched feature, the last row one cell short -> (likelihood, answer) or None."""
    grid = len(rows)
    if rule == 7:
        likelihood, answers = Fraction(0), set()
        by_row = [set_probabilities(visible, num_values, grid) for visible in rows]
        for chosen in by_row[0]:
            weight = Fraction(1, comb(num_values, grid))
            for fitting in by_row:
                weight *= fitting.get(chosen, (Fraction(0), set()))[0]
            if weight:
                likelihood += weight
                answers |= by_row[-1][chosen][1]
    else:
        likelihood, answers = Fraction(1), set()
        for visible in rows:
            probability, answers = row_probability(rule, visible, num_values, grid)
            likelihood *= probability
    if not likelihood:
        return None
    assert len(answers) == 1
    return likelihood, next(iter(answers))


@cache
def assignment_prior(multisets):
    """P(rule of feature 1, rule of feature 2, …): a multiset is drawn, then one of all orders of its members."""
    prior = {}
    for multiset in multisets:
        orders = list(permutations(multiset))
        for order in orders:
            prior[order] = prior.get(order, Fraction(0)) + Fraction(1, len(multisets) * len(orders))
    return prior


def solve(puzzle, num_values, rules, multisets, permuted=True):
    """-> {answer: posterior}, number of explanations, {(rules, answer): largest weight of one explanation}."""
    grid, num_features = puzzle.shape[0], puzzle.shape[2]
    prior = assignment_prior(tuple(map(tuple, multisets)))
    identity = tuple(range(num_features))
    orders = list(permutations(identity)) if permuted else [identity]
    mass, explanations, weights = {}, 0, {}

    @cache
    def options(places):
        """places[c]: where the feature stands in column c -> every (rule, likelihood, answer) that fits it."""
        rows = tuple(
            tuple(int(puzzle[r, c, places[c]]) for c in range(grid if r < grid - 1 else grid - 1)) for r in range(grid)
        )
        fits = {rule: chain(rule, rows, num_values) for rule in rules}
        return [(rule, *fit) for rule, fit in fits.items() if fit]

    for matching in product(orders, repeat=grid - 1):
        columns = (*matching, identity)  # columns[c][j]: where last-column position j stands in column c
        for combination in product(*(options(tuple(column[j] for column in columns)) for j in range(num_features))):
            assignment = tuple(rule for rule, _, _ in combination)
            weight = prior.get(assignment, Fraction(0))
            for _, likelihood, _ in combination:
                weight *= likelihood
            # What fits counts, and its answer is supported, even if the prior thinks nothing of it.
            answer = tuple(value for _, _, value in combination)
            explanations += 1
            mass[answer] = mass.get(answer, Fraction(0)) + weight
            if weight:
                weights[assignment] = max(weights.get(assignment, Fraction(0)), weight)
    total = sum(mass.values())
    return {answer: value / total if total else value for answer, value in mass.items()}, explanations, weights
