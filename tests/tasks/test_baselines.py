"""Baselines on puzzles small enough to answer by hand, and the table that shows them."""

import json

import numpy as np
import pytest
import torch

from headcode.bench.tasks import Tasks, logic_split, sraven_split
from headcode.tasks import FuzzyLogic, SRaven, baselines

# Position 1: rows 3 4 5 / 7 0 1 / 6 7 ?; position 2: 2 2 2 / 5 5 5 / 5 5 ?
PUZZLE = np.array([[[3, 2], [4, 2], [5, 2]], [[7, 5], [0, 5], [1, 5]], [[6, 5], [7, 5], [-9, -9]]])[None]
TASK = SRaven(num_features=2)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (baselines.most_frequent, [7, 5]),
        (baselines.copy_left, [7, 5]),
        (baselines.copy_above, [1, 5]),
        (baselines.without_permutation, [0, 5]),
    ],
)
def test_answers_by_hand(answer, expected):
    assert answer(TASK, PUZZLE).tolist() == [expected]


def test_without_permutation_falls_back_to_the_panel_on_the_left():
    noise = PUZZLE.copy()
    noise[0, 0, 0, 0] = 0
    assert baselines.without_permutation(TASK, noise).tolist() == [[7, 5]]


def test_without_permutation_is_the_oracle_where_nothing_is_permuted():
    task = SRaven(permute=False)
    row = sraven_split(task, "iid", 4000)
    assert row["oracle without the permutation"] == pytest.approx(row["ceiling"], abs=0.02)
    assert row["ceiling"] > 0.97


def test_logic_baselines_by_hand():
    task = FuzzyLogic(num_variables=2, num_terms=1, num_points=3, novel=0.0, held_out=0.0)
    x = torch.tensor([[[0.75, 0.25, 0.75], [0.5, 1.0, 0.0], [0.7, 0.35, 0.0]]])  # f = x1 and not x2
    assert baselines.context_mean(task, x).tolist() == [[0.375]]
    assert baselines.nearest_point(task, x).tolist() == [[0.75]]
    torch.testing.assert_close(baselines.consistent_terms(task, x), torch.tensor([[0.65]]))


def test_the_solver_that_knows_the_logic_task_solves_it():
    row = logic_split(FuzzyLogic(), "compositional", 1000)
    assert row["best-fitting function, R²"] > 0.999
    assert row["mean of the context, R²"] < 0.1
    assert 0.2 < row["value of the nearest point, R²"] < 0.6


def test_the_table_has_every_split_and_orders_the_solvers(capsys):
    Tasks(puzzles=3000, overlap=2000, json=True).run()
    report = json.loads(capsys.readouterr().out)
    assert [row["split"] for row in report["sraven"]] == ["train", "iid", "compositional"]
    assert [row["split"] for row in report["logic"]] == ["train", "iid", "compositional", "novel"]
    for row in report["sraven"]:
        assert 0.9 < row["ceiling"] < 1
        assert 0.1 < row["ambiguous"] < 0.3
        assert row["random choice among the answers"] < row["ceiling"]
        for name in baselines.SRAVEN_BASELINES:
            assert row[name] < 0.02
    paper = {row["splits"]: row["in both"] for row in report["shared"] if row["task"] == "sraven (paper)"}
    assert set(paper.values()) == {0}
    assert all(row["per second"] > 0 for row in report["speed"])


def test_the_table_is_printed_for_people(capsys):
    Tasks(puzzles=200, overlap=0).run()
    text = capsys.readouterr().out
    assert "ceiling" in text
    assert "copy the panel above" in text
    with pytest.raises(ValueError, match="--puzzles"):
        Tasks(puzzles=0).run()
