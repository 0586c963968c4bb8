"""The oracle against exact brute force, against the authors' puzzles, and against its own promise."""

import itertools

import numpy as np
import pytest
import torch

from headcode.tasks import SRaven, oracle
from tests.support import GOLDENS, brute_force


@pytest.fixture(scope="module")
def goldens():
    with np.load(GOLDENS / "tasks_a.npz") as data:
        return {name: data[name] for name in data.files}


def compare(task, puzzles, compositions=None, permuted=True):
    multisets = task.compositions if compositions is None else compositions
    solutions = oracle.solve(puzzles, task.num_values, permuted, task.rule_ids, compositions)
    for n, puzzle in enumerate(puzzles):
        posterior, explanations, weights = brute_force.solve(
            puzzle, task.num_values, task.rule_ids, multisets.tolist(), permuted
        )
        found = dict(zip(map(tuple, solutions.answers[n].tolist()), solutions.probabilities[n].tolist(), strict=True))
        assert found.keys() == posterior.keys()
        assert all(abs(found[answer] - float(posterior[answer])) < 1e-12 for answer in posterior)
        assert solutions.explanations[n] == explanations
        assert solutions.unique[n] == (len(posterior) == 1)
        if weights:
            assert list(found.values()) == sorted(found.values(), reverse=True)
            # Equal weights may be told in either order; the rules must have the largest one.
            best = weights[tuple(solutions.rules[n].tolist())]
            assert float(best) == pytest.approx(float(max(weights.values())), rel=1e-12)
        else:
            assert (solutions.rules[n] == -1).all()
        if not posterior:
            assert (solutions.best[n] == -1).all()


@pytest.mark.parametrize(("num_features", "count"), [(2, 2000), (3, 2000), (4, 200)])
def test_answers_counts_and_posteriors_agree_with_brute_force(num_features, count):
    task = SRaven(num_features=num_features, held_out=0.25)
    compare(task, task.raw("iid", np.arange(count))["puzzles"])


@pytest.mark.parametrize("split", ["iid", "compositional"])
def test_the_splits_own_prior_agrees_with_brute_force(split):
    task = SRaven(num_features=3, seed=7)
    compare(task, task.raw(split, np.arange(300))["puzzles"], task.compositions[task.split_compositions[split]])


@pytest.mark.parametrize(
    "options",
    [
        {"num_features": 2, "num_values": 3, "held_out": 0.0},
        {"num_features": 2, "num_values": 5, "grid": 4, "held_out": 0.0},
        {"num_features": 3, "num_values": 2, "grid": 2, "held_out": 0.0},
        {"num_features": 1, "num_values": 7, "held_out": 0.0},
        {"num_features": 3, "num_values": 5, "rules": (0, 2, 6, 7), "held_out": 0.0},
    ],
)
def test_other_sizes_and_rule_subsets_agree_with_brute_force(options):
    task = SRaven(**options)
    compare(task, task.raw("iid", np.arange(60))["puzzles"])


def test_unpermuted_puzzles_and_puzzles_nobody_generated_agree_with_brute_force():
    task = SRaven(num_features=2, num_values=3, permute=False, held_out=0.0)
    compare(task, task.raw("iid", np.arange(200))["puzzles"], permuted=False)
    noise = np.random.default_rng(5).integers(0, 3, (300, 3, 3, 2))
    compare(task, noise)
    assert (oracle.solve(noise, 3).explanations == 0).any()


def test_a_puzzle_where_everything_fits_everything():
    task = SRaven(num_features=3, num_values=3, held_out=0.0)
    zeros = np.zeros((1, 3, 3, 3), dtype=np.int64)
    compare(task, zeros)
    solutions = oracle.solve(zeros, 3)
    # 6·6 matchings; each feature is constant, sum or difference.
    assert solutions.explanations[0] == 36 * 3**3
    assert solutions.rules[0].tolist() == [0, 0, 0]


def test_a_hand_made_posterior():
    # Rows 0 0 0 / 0 0 0 / 0 0 ?: constant has likelihood 8**-3, sum and difference 8**-6; all say 0.
    # Rows 1 2 3 / 1 2 3 / 1 2 ?: +1 has 8**-3, sum 8**-6, distribute 1 / (56·6**3); the answer is 3 for all three.
    one = oracle.solve(np.array([[[[1], [2], [3]], [[1], [2], [3]], [[1], [2], [0]]]]))
    assert one.explanations[0] == 3
    assert one.answers[0].tolist() == [[3]]
    assert one.rules[0].tolist() == [1]
    # Rows 1 2 3 / 2 1 3 / 3 2 ?: sum says 5, distribute says 1.
    two = oracle.solve(np.array([[[[1], [2], [3]], [[2], [1], [3]], [[3], [2], [0]]]]))
    assert two.answers[0].tolist() == [[1], [5]]
    distribute, total = 1 / (56 * 216), 8.0**-6
    expected = [distribute / (distribute + total), total / (distribute + total)]
    np.testing.assert_allclose(two.probabilities[0], expected, rtol=1e-14)
    only_sum = oracle.solve(np.array([[[[1], [2], [3]], [[2], [1], [3]], [[3], [2], [0]]]]), rules=(0, 5))
    assert only_sum.answers[0].tolist() == [[5]]


def test_the_last_panel_is_never_read():
    puzzles = SRaven().raw("compositional", np.arange(500))["puzzles"].astype(np.int64)
    expected = oracle.solve(puzzles)
    for garbage in (-1, 99):
        spoiled = puzzles.copy()
        spoiled[:, -1, -1] = garbage
        found = oracle.solve(torch.from_numpy(spoiled))
        assert (found.flat_answers == expected.flat_answers).all()
        assert (found.flat_probabilities == expected.flat_probabilities).all()
        assert (spoiled[:, -1, -1] == garbage).all()


@pytest.mark.parametrize(("name", "permuted"), [("train", True), ("ood", True), ("unpermuted", False)])
def test_the_authors_answers_rules_and_permutations_are_among_the_explanations(goldens, name, permuted):
    puzzles, rules = goldens[f"sraven.{name}.instances"], goldens[f"sraven.{name}.rules"]
    perms = goldens.get(f"sraven.{name}.perms", np.broadcast_to(np.arange(4), (len(puzzles), 3, 4)))
    solutions = oracle.solve(puzzles, permuted=permuted)
    assert solutions.supports(puzzles[:, -1, -1]).all()
    where = np.argsort(perms, axis=-1)  # (N, column, feature): the position that shows the feature
    for n in range(len(puzzles)):
        last = perms[n, -1]  # the feature at each position of the last column
        truth = (where[n][:, last].tolist(), rules[n][last].tolist(), puzzles[n, -1, -1].tolist())
        found = oracle.explain(puzzles[n], permuted=permuted)
        assert len(found) == solutions.explanations[n]
        assert truth in [(e.positions.tolist(), e.rules.tolist(), e.answer.tolist()) for e in found]


def test_explanations_add_up_to_the_posterior():
    puzzles = SRaven().raw("iid", np.arange(400))["puzzles"]
    solutions = oracle.solve(puzzles)
    for n in np.flatnonzero(~solutions.unique)[:40]:
        found = oracle.explain(puzzles[n])
        assert len(found) == solutions.explanations[n]
        assert found[0].rules.tolist() == solutions.rules[n].tolist()
        for answer, probability in zip(solutions.answers[n], solutions.probabilities[n], strict=True):
            mass = sum(e.probability for e in found if (e.answer == answer).all())
            assert mass == pytest.approx(probability, rel=1e-12)


@pytest.mark.parametrize(("options", "split"), [({}, "iid"), ({}, "compositional"), ({"permute": False}, "iid")])
def test_the_ceiling_is_what_the_most_probable_answer_reaches(options, split):
    task = SRaven(**options)
    puzzles = task.raw(split, np.arange(100_000))["puzzles"]
    compositions = task.compositions[task.split_compositions[split]]
    solutions = oracle.solve(puzzles, permuted=task.permute, compositions=compositions)
    truth = puzzles[:, -1, -1]
    assert solutions.supports(truth).all()
    right = (solutions.best == truth).all(axis=1)
    # Given the puzzles, each success is an independent draw with the stated posterior.
    standard_error = np.sqrt((solutions.best_probability * (1 - solutions.best_probability)).sum()) / len(right)
    assert abs(right.mean() - solutions.ceiling) < 3 * standard_error
    assert 0.9 < solutions.ceiling < 1
    assert solutions.random_choice < solutions.ceiling


def test_posteriors_are_calibrated_in_a_small_ambiguous_setting():
    task = SRaven(num_features=2, num_values=3, held_out=0.0, seed=3)
    puzzles = task.raw("iid", np.arange(60_000))["puzzles"]
    solutions = oracle.solve(puzzles, 3)
    right = (solutions.best == puzzles[:, -1, -1]).all(axis=1)
    bins = np.clip((solutions.best_probability * 10).astype(int), 0, 9)
    checked = 0
    for b in np.unique(bins):
        p = solutions.best_probability[bins == b]
        if len(p) > 200 and (p < 1).any():
            error = np.sqrt((p * (1 - p)).sum()) / len(p)
            assert abs(right[bins == b].mean() - p.mean()) < 4 * error + 1e-12
            checked += 1
    assert checked >= 4
    assert solutions.ambiguous > 0.3


@pytest.mark.parametrize("split", ["train", "compositional"])
def test_the_prior_changes_probabilities_and_not_what_the_cells_support(split):
    task = SRaven(num_features=2)
    puzzles = task.raw(split, np.arange(2000))["puzzles"]
    everything, own = oracle.solve(puzzles), oracle.solve_split(task, split, puzzles)
    assert (own.explanations == everything.explanations).all()
    assert (own.num_answers == everything.num_answers).all() and own.ambiguous == everything.ambiguous
    excluded = 0
    for mine, others, probabilities in zip(own.answers, everything.answers, own.probabilities, strict=True):
        assert set(map(tuple, mine.tolist())) == set(map(tuple, others.tolist()))
        assert probabilities.sum() == pytest.approx(1, abs=1e-12)
        excluded += (probabilities == 0).sum()
    assert excluded > 0


def test_aligned_training_puzzles_are_not_judged_by_a_wrong_prior():
    task = SRaven(num_features=2, aligned=0.5)
    puzzles = task.raw("train", np.arange(10))["puzzles"]
    with pytest.raises(ValueError, match="Aligned training puzzles do not match their columns uniformly"):
        oracle.solve_split(task, "train", puzzles)
    assert oracle.solve_split(task, "iid", task.raw("iid", np.arange(10))["puzzles"]).explanations.all()
    blank = SRaven(num_features=2, blank=1.0)
    with pytest.raises(ValueError, match="Training puzzles with blank features are no whole puzzles"):
        oracle.solve_split(blank, "train", blank.raw("train", np.arange(10))["puzzles"])


def test_wrong_questions_are_refused():
    puzzles = SRaven(num_features=2).raw("iid", np.arange(3))["puzzles"]
    assert oracle.solve(puzzles[:0]).answers == []
    for arguments, words in [
        ({"compositions": np.empty((0, 2), int)}, "at least one"),
        ({"compositions": np.array([1, 2])}, "(composition, feature)"),
        ({"rules": (0.5, 1.9)}, "rules must be whole numbers"),
    ]:
        with pytest.raises(ValueError) as caught:
            oracle.solve(puzzles, **arguments)
        assert words in str(caught.value)
    with pytest.raises(ValueError, match="answers must have shape"):
        oracle.solve(puzzles).supports(np.zeros((3, 1)))


@pytest.mark.slow
def test_a_search_without_end_is_given_up():
    zeros = np.zeros((1, 2, 2, 9), dtype=int)
    with pytest.raises(ValueError, match="too many explanations"):
        oracle.solve(zeros, num_values=2)


def test_the_order_of_positions_does_not_matter():
    task = SRaven(num_features=3)
    puzzles = task.raw("iid", np.arange(50))["puzzles"]
    expected = oracle.solve(puzzles)
    for order in itertools.permutations(range(3)):
        shuffled = puzzles.copy()
        shuffled[:, :, 0] = puzzles[:, :, 0][..., list(order)]
        found = oracle.solve(shuffled)
        assert (found.explanations == expected.explanations).all()
        np.testing.assert_allclose(found.best_probability, expected.best_probability, rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"puzzles": np.zeros((1, 3, 2, 4), int)}, "square grid"),
        ({"puzzles": np.zeros((1, 3, 3, 4))}, "whole numbers"),
        ({"puzzles": np.full((1, 3, 3, 4), 8)}, "0..7"),
        ({"puzzles": np.zeros((1, 3, 3, 4), int), "rules": (0, 9)}, "distinct ids"),
        ({"puzzles": np.zeros((1, 3, 3, 4), int), "rules": ()}, "at least one"),
        ({"puzzles": np.zeros((1, 4, 4, 2), int), "num_values": 3}, "distribute"),
        ({"puzzles": np.zeros((1, 3, 3, 4), int), "compositions": np.zeros((1, 3), int)}, "multisets of 4 rules"),
        ({"puzzles": np.zeros((1, 6, 6, 12), int)}, "too many to search"),
    ],
)
def test_bad_puzzles_are_refused_in_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        oracle.solve(**arguments)
    assert "\n" not in str(caught.value)
