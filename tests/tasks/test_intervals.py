"""Intervals of shares: what they are in cases that can be reckoned by hand, and that they cover."""

import numpy as np
import pytest

from headcode.tasks.intervals import share_of, wilson_interval


def test_features_that_are_right_together_count_once():
    """Of 100 puzzles 50 are all right and 50 all wrong: 500 features tell no more than 100 puzzles."""
    hits = np.repeat(np.arange(100) < 50, 5).reshape(100, 5)
    found = share_of(hits)
    assert (found["share"], found["count"]) == (0.5, 500)
    assert (found["low"], found["high"]) == pytest.approx(wilson_interval(0.5, 100))
    alone = share_of(hits[:, 0])
    assert (alone["low"], alone["high"]) == pytest.approx(wilson_interval(0.5, 100)) and alone["count"] == 100


def test_asked_features_are_counted_alone():
    hits = np.array([[True, False], [True, True], [False, True]])
    found = share_of(hits, np.array([[True, False], [True, False], [True, True]]))
    assert (found["share"], found["count"]) == (0.75, 4) and found["low"] < 0.75 < found["high"]
    assert share_of(hits, np.zeros((3, 2), bool)) == {"share": None, "low": None, "high": None, "count": 0}


def test_where_all_are_right_each_puzzle_counts_once():
    found = share_of(np.ones((49, 4), dtype=bool))
    assert (found["share"], found["high"], found["count"]) == (1.0, 1.0, 196)
    assert found["low"] == pytest.approx(wilson_interval(1.0, 49)[0])


def test_the_intervals_cover_in_about_95_of_100_cases():
    generator = np.random.default_rng(0)
    inside = 0
    for _ in range(1000):
        level = generator.beta(2, 5, (150, 1))  # how easy each puzzle is: its features hang together
        found = share_of(generator.random((150, 4)) < level)
        inside += found["low"] < 2 / 7 < found["high"]
    assert 920 < inside < 975
    naive = wilson_interval(2 / 7, 600)
    assert found["high"] - found["low"] > 1.15 * (naive[1] - naive[0])


def test_the_mean_of_probabilities():
    """0, 0.5, 1 and 0.5 have half the variance of heads and tails: they tell as much as 8 of these."""
    found = share_of(np.array([0.0, 0.5, 1.0, 0.5]))
    assert (found["share"], found["count"]) == (0.5, 4)
    assert (found["low"], found["high"]) == pytest.approx(wilson_interval(0.5, 8))
    assert share_of(np.zeros(9))["high"] == pytest.approx(wilson_interval(0.0, 9)[1])
