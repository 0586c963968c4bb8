"""Rows out of results.csv: types, filters, sorting, groups and their intervals."""

import math

import pytest
from scipy import stats

from headcode.report.results import (
    estimate,
    find_column,
    group_rows,
    main_columns,
    read_results,
    select,
    sort_rows,
    t_half_width,
    varying_fields,
)
from headcode.sweep.table import to_csv

ROWS = [
    {
        "name": f"method={method},seed={seed}",
        "hash": f"{seed}e{index}",
        "folder": f"runs/{seed}e{index}",
        "task": "logic",
        "method": method,
        "norm": None,
        "causal": seed == 1,
        "aligned": ((0.0, 1.0), (7.0, 0.5)),
        "learning_rate": 1e-3,
        "seed": seed,
        "task_seed": seed,
        "train/loss": 0.1 / 3 + seed,
        "iid/loss": 0.5,
        "iid/r2": 0.75 + seed,
        "compositional/loss": 1.0,
        "compositional/r2": score,
        "seconds": 7.0,
    }
    for index, (method, seed, score) in enumerate(
        [("softmax", 0, 0.2), ("softmax", 1, 0.4), ("hyla", 0, 0.7), ("hyla", 1, None), ("hyla", 2, 0.9)]
    )
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "results.csv").write_text(to_csv(ROWS))
    return tmp_path


def test_rows_come_back_as_they_were(folder):
    rows = read_results(folder)
    assert len(rows) == 5 and rows == read_results(folder / "results.csv")
    for row, original in zip(rows, ROWS, strict=True):
        lists = {"folder": str(folder / original["folder"]), "aligned": [[0.0, 1.0], [7.0, 0.5]]}
        assert row == {**original, **lists}
    # A hash of digits and one e is a word, not a number.
    assert rows[0]["hash"] == "0e0" and rows[1]["causal"] is True and rows[3]["compositional/r2"] is None


@pytest.mark.parametrize(
    ("conditions", "kept"),
    [
        (["method=hyla"], [2, 3, 4]),
        (["method=hyla,softmax", "seed=1"], [1, 3]),
        (["method!=hyla"], [0, 1]),
        (["seed!=0,2"], [1, 3]),
        (["seed>=1", "seed<2"], [1, 3]),
        (["compositional/r2>0.3"], [1, 2, 4]),
        (["compositional/r2="], [3]),
        (["norm=null"], [0, 1, 2, 3, 4]),
        (["causal=true"], [1, 3]),
        (["learning_rate=1e-3", " seed = 2 "], [4]),
        (["method=hyl"], []),
        ([], [0, 1, 2, 3, 4]),
    ],
)
def test_select(conditions, kept):
    assert select(ROWS, conditions) == [ROWS[index] for index in kept]


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ("causal=True", [1, 3]),
        ("causal!=False", [1, 3]),
        ("norm=None", [0, 1, 2, 3, 4]),
        ("name=method=hyla,seed=0", [2]),
        ("name=method=hyla,seed=0, method=softmax,seed=1", [1, 2]),
        ("name!=method=hyla,seed=0,method=softmax,seed=1", [0, 3, 4]),
        ("name=method=hyla,seed=7", []),
        ("aligned=[[0,1],[7,0.5]]", [0, 1, 2, 3, 4]),
        ("aligned=0.5,[[0,1],[7,0.5]]", [0, 1, 2, 3, 4]),
        ("aligned!=[[0,1],[7,0.5]]", []),
    ],
)
def test_values_with_commas_and_words_of_python(folder, condition, kept):
    rows = read_results(folder)
    assert select(rows, [condition]) == [rows[index] for index in kept]


def test_mistakes_in_conditions():
    with pytest.raises(ValueError, match=r"no column 'metod'; did you mean 'method'\? There are: name, hash"):
        select(ROWS, ["metod=hyla"])
    with pytest.raises(ValueError, match="A condition reads like"):
        select(ROWS, ["method"])
    with pytest.raises(ValueError, match="> compares numbers; got 'softmax' and '3'"):
        select(ROWS, ["method>3"])
    with pytest.raises(ValueError, match="no column 'r2'; there are: iid/r2, compositional/r2"):
        find_column(ROWS, "r2")


def test_columns():
    assert main_columns(ROWS) == ["name", "train/loss", "iid/r2", "compositional/r2", "seconds"]
    assert varying_fields(ROWS) == ["method", "causal", "seed"]
    assert find_column([{"iid/accuracy": 1}], "accuracy") == "iid/accuracy"


def test_sorting_puts_missing_values_last():
    assert [row["compositional/r2"] for row in sort_rows(ROWS, "compositional/r2")] == [0.2, 0.4, 0.7, 0.9, None]
    assert [row["compositional/r2"] for row in sort_rows(ROWS, "compositional/r2", True)] == [0.9, 0.7, 0.4, 0.2, None]
    assert [row["method"] for row in sort_rows(ROWS, "method")] == ["hyla"] * 3 + ["softmax"] * 2


def test_groups_with_students_interval():
    groups = group_rows(ROWS, ["method"], ["compositional/r2", "iid/r2"])
    assert [(group.fields, len(group.rows)) for group in groups] == [
        ({"method": "softmax"}, 2),
        ({"method": "hyla"}, 3),
    ]
    mean, half_width, number = groups[0].cells["compositional/r2"]
    # Two values at a distance of 0.2: their standard error is 0.1, and t(0.975, 1) is 12.7062.
    assert (mean, number) == (pytest.approx(0.3), 2) and half_width == pytest.approx(1.27062, rel=1e-5)
    values = [0.75, 1.75, 2.75]
    low, high = stats.t.interval(0.95, 2, loc=1.75, scale=stats.sem(values))
    assert groups[1].cells["iid/r2"] == (1.75, pytest.approx((high - low) / 2), 3)
    assert groups[1].cells["compositional/r2"].num_values == 2
    assert estimate([None, None]) is None and estimate([3.0]) == (3.0, None, 1) and estimate(["a", True]) is None
    assert math.isclose(estimate([1, 1, 1]).half_width, 0)


def test_a_run_with_two_names_counts_once_in_a_group():
    again = [{**row, "name": f"again: {row['name']}"} for row in ROWS[2:]]
    once, twice = (group_rows(rows, ["method"], ["compositional/r2"]) for rows in (ROWS, ROWS + again))
    assert once == twice and len(twice[1].rows) == 3
    assert twice[1].cells["compositional/r2"].num_values == 2
    assert len(group_rows(ROWS + again, ["name"], ["iid/r2"])) == 8
    # Rows of other tables may have no hash: each is a run of its own.
    assert group_rows([{"a": 1, "b": 2}, {"a": 1, "b": 4}], ["a"], ["b"])[0].cells["b"].mean == 3


def test_files_that_are_no_results(tmp_path):
    with pytest.raises(ValueError, match="has no results of a sweep: it has no results.csv"):
        read_results(tmp_path)
    with pytest.raises(ValueError, match="there is no such folder"):
        read_results(tmp_path / "nothing")
    (tmp_path / "results.csv").write_text("name,seed\na,1\nb\n")
    with pytest.raises(ValueError, match="different lengths"):
        read_results(tmp_path)
    (tmp_path / "results.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not text in UTF-8"):
        read_results(tmp_path)


def test_equal_scores_have_an_interval_of_no_width():
    assert t_half_width([0.1] * 3) == 0.0
    assert t_half_width([0.7] * 3) == 0.0


def test_columns_of_former_names_are_read_under_todays(tmp_path):
    rows = [{"name": "a", "hint": 0.5}, {"name": "b", "hint": None, "auxiliary_weight": 1.0}]
    (tmp_path / "results.csv").write_text(to_csv(rows))
    assert read_results(tmp_path) == [{"name": "a", "auxiliary_weight": 0.5}, {"name": "b", "auxiliary_weight": 1.0}]
