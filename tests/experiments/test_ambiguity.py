"""The ambiguity experiment: counts that fit together, and drawn puzzles that a reader can check."""

import numpy as np
import pytest

from headcode.experiments._readings import draw_readings
from headcode.experiments.ambiguity import Ambiguity, authors_rows, measured, undecided
from headcode.experiments.base import Study
from headcode.tasks import SRaven, oracle
from headcode.tasks.sraven_rules import DISTRIBUTE, apply_rule

TASK = SRaven()


def test_counts_fit_together():
    row = measured(TASK, "iid", 700, "ours")
    puzzles = TASK.raw("iid", np.arange(700))["puzzles"]
    solutions = oracle.solve_split(TASK, "iid", puzzles)
    assert row["several"] == (solutions.num_answers > 1).sum() and row["puzzles"] == 700
    assert row["ceiling"] == solutions.ceiling
    assert row["undecided"] <= row["unsure"] <= row["several"] <= sum(row[f"changed_{k}"] for k in (1, 2, 3, 4))
    assert row["changed_4"] <= row["check"] < 0.02 * 700
    several, ceiling = row["several"], row["ceiling_several"]
    assert row["ceiling"] == pytest.approx(1 - several / 700 * (1 - ceiling))
    permuted, tried, known, ordered = authors_rows(TASK, "iid", 700)
    assert (permuted["check"], permuted["several"]) == (row["check"], several) == (tried["check"], tried["several"])
    assert 0 < ordered["several"] < known["several"] < several and known["check"] <= tried["check"]


@pytest.mark.parametrize("changed", [1, 2])
def test_a_drawn_puzzle_can_be_checked_row_by_row(changed, tmp_path):
    name, puzzle, readings = undecided(TASK, "compositional", 300, changed)
    instance = int(name.split()[-1])
    assert np.array_equal(puzzle, TASK.raw("compositional", np.array([instance]))["puzzles"][0])
    assert readings[0].answer.tolist() == puzzle[-1, -1].tolist()
    assert sum(reading.probability for reading in readings) == pytest.approx(1)
    assert len({tuple(reading.answer) for reading in readings}) == len(readings) <= 4
    assert changed in {int((reading.answer != readings[0].answer).sum()) for reading in readings}
    for reading in readings:
        for feature, rule in enumerate(reading.rules):
            cells = [[int(puzzle[row, c, reading.positions[c, feature]]) for c in range(3)] for row in range(3)]
            cells[2][2] = int(reading.answer[feature])
            if rule == DISTRIBUTE:
                assert all(sorted(row) == sorted(cells[0]) and len(set(row)) == 3 for row in cells)
            else:
                assert all(row[2] == apply_rule(row[:2], rule, 8) for row in cells)
                steps = {(row[1] - row[0]) % 8 for row in cells}
                assert rule >= 5 or steps == {(0, 1, 2, 7, 6)[rule]}
    assert all(path.stat().st_size > 10_000 for path in draw_readings(name, puzzle, readings, "words", tmp_path / "a"))


def test_without_such_a_puzzle_there_is_none():
    assert undecided(TASK, "iid", 3, 4) is None


@pytest.mark.parametrize(("several", "holds"), [(200, False), (0, True), (5, None)])
def test_a_verdict_needs_the_whole_interval(several, holds, tmp_path):
    row = {"layout": "ours", "split": "iid", "puzzles": 1000, "check": several, "several": several}
    verdicts = Ambiguity().verdicts(Study("smoke", [row], tmp_path))
    assert [verdict.holds for verdict in verdicts] == [holds, holds]
