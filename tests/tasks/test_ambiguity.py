"""The authors' ambiguity check, against a second one that tries all permutations, and beside the exact solver."""

from itertools import permutations, product

import numpy as np
import pytest

from headcode.tasks import SRaven, oracle
from headcode.tasks.ambiguity import answers_with_sorted_rules, authors_check, authors_layout, changed_features
from headcode.tasks.sraven_rules import DISTRIBUTE, apply_rule
from tests.support import ROOT

GOLDENS = np.load(ROOT / "tests/goldens/tasks_a.npz")


def endings(rows, num_values):
    """What the check's rules end a chain with: rows of 3, 3 and 2 cells."""
    *whole, part = rows
    if all(len(set(row)) == 1 for row in rows):
        yield part[0]
    steps = {(row[i + 1] - row[i]) % num_values for row in rows for i in range(len(row) - 1)}
    if len(steps) == 1 and steps & {step % num_values for step in (1, 2, -1, -2)}:
        yield (part[1] + steps.pop()) % num_values
    for sign in (1, -1):
        if all((a + sign * b) % num_values == c for a, b, c in whole):
            yield (part[0] + sign * part[1]) % num_values
    values = sorted(whole[0])
    if values == sorted(whole[1]) and set(part) <= set(values):
        yield min(values, key=lambda value: (part.count(value), value))


def is_ambiguous(puzzle, num_values, matchings):
    grid = puzzle.tolist()
    features = range(puzzle.shape[2])
    for matching in matchings:
        chains = [
            [[grid[row][column][matching[column][k]] for column in range(3)] for row in range(3)] for k in features
        ]
        if all(any(end != chain[2][2] for end in endings([*chain[:2], chain[2][:2]], num_values)) for chain in chains):
            return True
    return False


@pytest.mark.parametrize(("num_features", "num_values", "count"), [(1, 5, 400), (2, 5, 300), (3, 5, 60), (2, 3, 200)])
def test_the_check_agrees_with_one_that_tries_all_permutations(num_features, num_values, count):
    task = SRaven(num_features=num_features, num_values=num_values, held_out=0, seed=2)
    puzzles = task.raw("iid", np.arange(count))["puzzles"]
    orders = list(permutations(range(num_features)))
    expected = [is_ambiguous(puzzle, num_values, product(orders, repeat=3)) for puzzle in puzzles]
    assert authors_check(puzzles, num_values).tolist() == expected and 0 < sum(expected) < count
    alone = [is_ambiguous(puzzle, num_values, [[range(num_features)] * 3]) for puzzle in puzzles]
    assert authors_check(puzzles, num_values, permuted=False).tolist() == alone


def test_a_rival_that_changes_one_feature_of_two_is_not_found():
    """The first feature is a sum and nothing else; the second goes on by +1 as well as by a sum."""
    rows = [[2, 2, 4], [2, 4, 6], [0, 4, 4]]  # a sum; the first two rows are +0 and +2, so nothing else fits
    twice = [[1, 2, 3], [1, 2, 3], [4, 5, 6]]  # +1 says 6, the sum 9 - 8 = 1
    puzzle = np.array([[[rows[r][c], twice[r][c]] for c in range(3)] for r in range(3)])[None]
    solutions = oracle.solve(puzzle, permuted=False)
    assert sorted(solutions.answers[0].tolist()) == [[4, 1], [4, 6]]
    assert changed_features(puzzle, solutions).tolist() == [[True, True, False]]
    assert authors_check(puzzle, permuted=False).tolist() == [False]
    assert authors_check(puzzle[..., 1:], permuted=False).tolist() == [True]


def test_its_distribute_does_not_ask_for_distinct_values():
    puzzle = np.array([[1, 4, 6], [6, 1, 4], [1, 1, 0]])[None, ..., None]
    assert authors_check(puzzle).tolist() == [True]
    assert oracle.solve(puzzle).num_answers.tolist() == [0]
    puzzle[0, 2, 2] = 4  # of the two values that the last row lacks it takes the smaller one
    assert authors_check(puzzle).tolist() == [False]


def test_it_finds_all_rivals_that_change_every_feature():
    task = SRaven(num_features=2, seed=1)
    puzzles = task.raw("iid", np.arange(4096))["puzzles"]
    solutions = oracle.solve(puzzles)
    changed = changed_features(puzzles, solutions)
    assert 0 < changed[:, 2].sum() <= (authors_check(puzzles) & changed[:, 2]).sum()
    assert ((solutions.num_answers > 1) == changed[:, 1:].any(1)).all() and changed[:, 0].all()
    for puzzle, answers, found in zip(puzzles, solutions.answers, changed, strict=True):
        counts = {int((answer != puzzle[-1, -1]).sum()) for answer in answers}
        assert counts == set(np.flatnonzero(found).tolist())


def test_the_authors_layouts_are_the_same_puzzles():
    task = SRaven(seed=4)
    arrays = task.raw("compositional", np.arange(512))
    unpermuted, permuted = authors_layout(arrays)
    rules = np.sort(arrays["rules"], axis=1)
    for puzzle, chosen in zip(unpermuted, rules, strict=True):
        for position, rule in enumerate(chosen):
            for row in puzzle[:, :, position].tolist():
                if rule != DISTRIBUTE:
                    assert row[2] == apply_rule(row[:2], rule, 8)
                else:
                    assert sorted(row) == sorted(puzzle[0, :, position].tolist()) and len(set(row)) == 3
    # Neither definition sees in which order a column shows its features.
    ours, theirs = oracle.solve(arrays["puzzles"]), oracle.solve(permuted)
    assert np.array_equal(ours.num_answers, theirs.num_answers)
    assert np.array_equal(authors_check(arrays["puzzles"]), authors_check(permuted))
    matched = oracle.solve(unpermuted, permuted=False)
    for n in np.flatnonzero(matched.num_answers > 1):
        known = answers_with_sorted_rules(unpermuted[n])
        assert tuple(unpermuted[n, -1, -1].tolist()) in known
        assert known <= {tuple(answer) for answer in matched.answers[n].tolist()}


def test_on_puzzles_of_the_authors_own_generator():
    """docs/results/ambiguity.md tells these counts, of 2,048 puzzles each."""
    counts = {}
    for split in ("train", "ood", "unpermuted"):
        puzzles = GOLDENS[f"sraven.{split}.instances"]
        several = oracle.solve(puzzles, permuted=split != "unpermuted").num_answers > 1
        counts[split] = (int(authors_check(puzzles).sum()), int(several.sum()))
    assert counts == {"train": (4, 513), "ood": (9, 536), "unpermuted": (2, 280)}


@pytest.mark.parametrize("puzzles", [np.zeros((1, 4, 4, 2), int), np.zeros((1, 3, 3, 2)), np.zeros((3, 3, 2), int)])
def test_other_shapes_are_refused(puzzles):
    with pytest.raises(ValueError, match="is for puzzles"):
        authors_check(puzzles)


def test_a_hidden_panel_is_refused():
    puzzle = np.zeros((1, 3, 3, 2), int)
    puzzle[0, 2, 2] = -1
    with pytest.raises(ValueError, match="the last panel's too"):
        authors_check(puzzle)
