"""Puzzles, functions and what is done to them, against numbers worked out by hand."""

import base64
import dataclasses

import numpy as np
import pytest

from headcode.explorer import functions, panels, puzzles
from headcode.explorer.sentences import strongest
from headcode.explorer.state import State
from headcode.tasks import SRaven

TASK = SRaven(num_features=3, seed=5)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("rules", [(0, 1, 2), (3, 4, 5), (6, 7, 7)])
def test_a_drawn_puzzle_obeys_its_rules(rules, shuffle):
    for seed in range(5):
        puzzle = puzzles.draw(TASK, rules, seed, shuffle)
        orders = set()
        for feature, rule in enumerate(rules):
            where = puzzle.where(feature)
            orders.add(tuple(where))
            lines = [[int(puzzle.cells[row, column, where[column]]) for column in range(3)] for row in range(3)]
            for first, second, third in lines:
                expected = {
                    0: (first, first),
                    1: ((first + 1) % 8, (first + 2) % 8),
                    2: ((first + 2) % 8, (first + 4) % 8),
                    3: ((first - 1) % 8, (first - 2) % 8),
                    4: ((first - 2) % 8, (first - 4) % 8),
                    5: (second, (first + second) % 8),
                    6: (second, (first - second) % 8),
                    7: (second, third),
                }[rule]
                assert (second, third) == expected, (rule, lines)
            if rule == 7:
                assert len(set(lines[0])) == 3 and {frozenset(line) for line in lines} == {frozenset(lines[0])}
        straight = {(position,) * 3 for position in range(3)}
        assert (orders == straight) or shuffle
    assert any((puzzles.draw(TASK, rules, s, True).permutations != [0, 1, 2]).any() for s in range(5))


def test_another_rule_for_one_feature_leaves_the_others():
    one, two = (puzzles.draw(TASK, rules, 3, False) for rules in ((1, 5, 7), (2, 5, 7)))
    assert (one.cells[..., 1:] == two.cells[..., 1:]).all()
    assert (one.cells[..., 0] != two.cells[..., 0]).any()


def test_a_puzzle_of_a_split_is_the_task_s_own():
    batch = TASK.instances("compositional", [11])
    puzzle = puzzles.puzzle_of(TASK, State(model="m", split="compositional", n=11))
    assert (puzzle.cells == batch.info["puzzles"][0].numpy()).all()
    assert puzzle.token_rules() == batch.info["token_rules"][0].tolist()
    assert (puzzle.x == batch.x[0].numpy()).all()
    assert not puzzle.edited


def test_cells_set_by_hand():
    plain = puzzles.puzzle_of(TASK, State(model="m", split="iid", n=2))
    row, column, position = plain.place(10)
    assert (row, column, position) == (1, 0, 1)
    value = (int(plain.cells[1, 0, 1]) + 3) % 8
    edited = puzzles.puzzle_of(TASK, State(model="m", split="iid", n=2, edits=((10, value),)))
    assert edited.edited and edited.cells[1, 0, 1] == value
    assert (edited.cells != plain.cells).sum() == 1
    same = puzzles.puzzle_of(TASK, State(model="m", split="iid", n=2, edits=((10, int(plain.cells[1, 0, 1])),)))
    assert not same.edited


def by_hand(cells):
    task = SRaven(num_features=1, held_out=0.0, permute=False)
    return puzzles.Puzzle(task, np.array(cells, dtype=np.int8)[..., None], (1,), np.zeros((3, 1), dtype=np.int64))


def test_the_solver_s_verdict():
    state = State(model="m", split="iid", rules=(1,))
    unique = puzzles.judge_puzzle(by_hand([[3, 4, 5], [7, 0, 1], [6, 7, 0]]), state)
    assert unique.answers == [[0]] and unique.readings == [([1], 1.0)]
    assert "Unique" in unique.headline
    # 2 2 4 is a sum; 0 0 0 is constant, a sum and a difference; 1 3 4 is a sum alone.
    several = puzzles.judge_puzzle(by_hand([[0, 0, 0], [0, 0, 0], [1, 3, 0]]), state)
    assert sorted(several.answers) == [[4], [6]] and "Ambiguous: 2 answers" in several.headline
    assert sum(several.probabilities) == pytest.approx(1)
    nothing = puzzles.judge_puzzle(by_hand([[0, 1, 7], [3, 3, 1], [5, 2, 0]]), state)
    assert nothing.answers == [] and nothing.headline == "No rules explain these cells."


def test_a_rewritten_puzzle_tells_another_rule():
    puzzle = puzzles.draw(TASK, (1, 5, 7), 4, True)
    token = 24 + puzzle.where(0)[-1]
    donor = puzzles.rewritten(puzzle, token, 6)
    assert donor.rules == (6, 5, 7)
    different = np.argwhere(donor.cells != puzzle.cells)
    assert {tuple(place[1:]) for place in different.tolist()} <= {(2, puzzle.where(0)[-1])}
    where = puzzle.where(0)
    first, second = (int(puzzle.cells[2, column, where[column]]) for column in range(2))
    assert puzzles.expected(puzzle, donor, token) == (where[-1], (first - second) % 8)
    assert donor.cells[2, 2, where[-1]] == (first - second) % 8
    three = dataclasses.replace(puzzle, rules=(7, 5, 7))
    assert puzzles.expected(puzzle, three, token) is None


def test_a_donor_is_the_puzzle_that_the_state_names():
    puzzle = puzzles.draw(TASK, (1, 5, 7), 4, True)
    state = State(model="m", split="iid", query=24)
    assert puzzles.donor_of(puzzle, state) is None
    assert puzzles.donor_of(puzzle, state.change(donor="rule-7")) is None
    donor, words = puzzles.donor_of(puzzle, state.change(donor="n-3"))
    assert words == "iid puzzle 3"
    assert (donor.cells == TASK.raw("iid", np.array([3]))["puzzles"][0]).all()


def test_a_function_and_its_surfaces(logician):
    task = logician.task
    function = functions.function_of(task, State(model="m", terms=(15, 0), seed=1, point=(0.9, 0.8, 0.7, 0.6)))
    assert function.term_ids == (0, 15) and function.axes == (0, 1)
    assert function.values[-1] == pytest.approx(max(min(0.9, 0.8, 0.7, 0.6), min(0.1, 0.2, 0.3, 0.4)))
    assert function.x[-1].tolist() == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.0])
    places, true = function.true_surface()
    column, row = 10, 30  # x1 = 0.25, x2 = 0.75
    assert (places[column], places[row]) == (0.25, 0.75)
    assert true[row, column] == pytest.approx(max(min(0.25, 0.75, 0.7, 0.6), min(0.75, 0.25, 0.3, 0.4)))
    coarse, predicted = function.predicted_surface(logician)
    moved = functions.function_of(
        task, State(model="m", terms=(15, 0), seed=1, point=(float(coarse[3]), float(coarse[8]), 0.7, 0.6))
    )
    from headcode.explorer.inside import look

    assert predicted[8, 3] == pytest.approx(look(logician, moved.x).output[0, 0], abs=1e-5)
    assert function.score(float(function.values[-1])) == 1.0


def test_the_donor_of_a_function(logician):
    state = State(model="m", split="iid", n=1, donor="terms-3.9")
    function = functions.function_of(logician.task, state)
    donor, words = functions.donor_of(function, state)
    assert donor.term_ids == (3, 9) and (donor.inputs == function.inputs).all() and "(¬x1 ∧ ¬x2 ∧ x3 ∧ x4)" in words
    other, _ = functions.donor_of(function, state.change(donor="n-4"))
    assert other.term_ids == tuple(logician.task.instances("iid", [4]).info["term_ids"][0].tolist())


def test_panels_are_pictures_of_their_values():
    def drawn(*given):
        return base64.b64decode(panels.panel(*given).removeprefix("data:image/svg+xml;base64,")).decode()

    assert drawn((2, 4, 6), 8).count("<polygon") == 7  # number 6 is seven things
    assert drawn((2, 4, 6, 1), 8).count("<polygon") == 8  # and the pointer
    assert "#0072b2" in drawn((2, 4), 8)
    assert ">?<" in drawn((), 8, "hidden")
    assert drawn((11, 3), 12).count("<text") == 2  # more values than signs: numbers
    assert panels.position_names(2, 8) == ["shape", "colour"] and panels.position_names(5, 8)[4] == "place 5"


def test_the_strongest_weight_of_a_block():
    matrix = np.arange(35.0).reshape(5, 7)
    matrix[0, 0] = -50
    small = strongest(matrix, most=3)
    assert small.shape == (3, 3)
    assert small[0, 0] == -50 and small[2, 2] == 34
    assert (strongest(matrix, most=7) == matrix).all()
