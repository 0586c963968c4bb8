"""Fuzzy logic: values against the authors and by hand, splits, input distributions, scores and bad input."""

import itertools
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from headcode.tasks import Batch, FuzzyLogic, add_sums
from tests.support import GOLDENS

unit = st.floats(0, 1, width=32)


@pytest.mark.parametrize("name", ["logic", "logic53"])
def test_targets_agree_with_the_authors(name):
    with np.load(GOLDENS / "tasks_a.npz") as data:
        terms, inputs, targets = (data[f"{name}.{key}"] for key in ("terms", "inputs", "targets"))
    found = FuzzyLogic.evaluate(terms, inputs)
    assert found.shape == targets.shape[:-1]
    assert np.abs(found - targets[..., 0]).max() <= 1e-6
    as_tensor = FuzzyLogic.evaluate(torch.from_numpy(terms), torch.from_numpy(inputs))
    assert (as_tensor.numpy() == found).all()


def test_hand_computed_values():
    terms = np.array([[1, 0, 1], [0, 1, 1]])
    point = np.array([[0.75, 0.25, 0.5]])
    assert FuzzyLogic.evaluate(terms, point).tolist() == [0.5]  # max(min(.75, .75, .5), min(.25, .25, .5))
    first, second = 0.75 * 0.75 * 0.5, 0.25 * 0.25 * 0.5
    assert FuzzyLogic.evaluate(terms, point, "product").tolist() == [first + second - first * second]


@pytest.mark.parametrize("t_norm", ["zadeh", "product"])
def test_at_the_corners_it_is_boolean_logic(t_norm):
    task = FuzzyLogic(num_variables=3, num_terms=2, novel=0.0)
    corners = np.array(list(itertools.product([0.0, 1.0], repeat=3)))
    for composition in task.compositions:
        values = FuzzyLogic.evaluate(task.term_bits(composition), corners, t_norm)
        # Corner k is the point that exactly term k accepts.
        assert np.flatnonzero(values).tolist() == sorted(composition.tolist())


@given(st.lists(st.tuples(unit, unit, unit), min_size=1, max_size=5), st.permutations([0, 3, 5, 6]))
@settings(max_examples=50, deadline=None)
def test_the_order_of_terms_does_not_matter_and_more_terms_are_more(points, order):
    task = FuzzyLogic(num_variables=3, num_terms=4, novel=0.0)
    inputs = np.array(points, dtype=np.float32)
    terms = task.term_bits(np.array([0, 3, 5, 6]))
    values = FuzzyLogic.evaluate(terms, inputs)
    assert (FuzzyLogic.evaluate(task.term_bits(np.array(order)), inputs) == values).all()
    assert (FuzzyLogic.evaluate(terms[:3], inputs) <= values).all()
    assert ((values >= 0) & (values <= 1)).all()
    swapped = FuzzyLogic.evaluate(1 - terms, 1 - inputs.astype(np.float64))
    assert (swapped == FuzzyLogic.evaluate(terms, inputs.astype(np.float64))).all()


def test_evaluate_is_differentiable():
    inputs = torch.tensor([[0.75, 0.25]], dtype=torch.float64, requires_grad=True)
    FuzzyLogic.evaluate(torch.tensor([[1, 0]]), inputs, "product").sum().backward()
    assert inputs.grad is not None
    assert inputs.grad.tolist() == [[0.75, -0.75]]


def test_a_batch_is_what_its_info_says():
    task = FuzzyLogic(num_variables=3, num_terms=2, num_points=7, seed=5)
    x, y, info = task.sample("train", 2, 11)
    assert x.shape == (11, 7, 4)
    assert x.dtype == torch.float32
    assert y.shape == (11, 1)
    values = FuzzyLogic.evaluate(info["terms"], x[..., :-1])
    assert torch.equal(values, info["targets"])
    assert torch.equal(x[:, :-1, -1], values[:, :-1])
    assert torch.equal(x[:, -1, -1], torch.zeros(11))
    assert torch.equal(y[:, 0], values[:, -1])
    assert info["instance"].tolist() == list(range(22, 33))
    assert torch.equal(torch.from_numpy(task.compositions)[info["composition"]], info["term_ids"])
    weights = torch.tensor([4, 2, 1])
    assert torch.equal((info["terms"] * weights).sum(-1), info["term_ids"])
    assert (task.input_dim, task.output_dim, task.sequence_length, task.queries) == (4, 1, 7, slice(-1, None))


@pytest.mark.parametrize(("held_out", "sizes"), [(0.3, (47, 19)), (0.5, (33, 33)), (0.7, (20, 46))])
@pytest.mark.parametrize("seed", [0, 1, 13])
def test_the_papers_splits(held_out, sizes, seed):
    task = FuzzyLogic(held_out=held_out, seed=seed)
    splits = task.split_compositions
    assert len(task.compositions) == 120
    assert (len(splits["train"]), len(splits["compositional"]), len(splits["novel"])) == (*sizes, 6)
    assert (splits["train"] == splits["iid"]).all()
    train, compositional, novel = (set(splits[name].tolist()) for name in ("train", "compositional", "novel"))
    assert not train & compositional
    assert not (train | compositional) & novel
    seen = set(task.compositions[splits["train"]].ravel().tolist())
    assert len(seen) == 12
    assert not seen & set(task.novel_terms.tolist())
    assert set(task.compositions[splits["compositional"]].ravel().tolist()) <= seen
    assert set(task.compositions[splits["novel"]].ravel().tolist()) == set(task.novel_terms.tolist())


def test_the_seed_draws_the_split_and_the_authors_switch_does_not():
    assert len({tuple(FuzzyLogic(seed=seed).novel_terms.tolist()) for seed in range(8)}) > 4
    assert len({tuple(FuzzyLogic(seed=seed).split_compositions["train"].tolist()) for seed in range(8)}) == 8
    assert FuzzyLogic(authors_novel_terms=True, seed=3).novel_terms.tolist() == [12, 13, 14, 15]
    with np.load(GOLDENS / "tasks_a.npz") as data:
        ids = (data["logic53.terms"] * [16, 8, 4, 2, 1]).sum(-1)
    assert ids.max() == 23  # the authors' training functions never use the last quarter in this numbering


def test_samples_stay_within_their_split_and_are_uniform_over_it():
    task = FuzzyLogic(num_points=2)
    for split, ids in task.split_compositions.items():
        drawn = task.sample(split, 0, 20_000).info["composition"].numpy()
        counts = np.bincount(drawn, minlength=120)
        assert counts.sum() == counts[ids].sum()
        assert stats.chisquare(counts[ids]).pvalue > 1e-4


def test_inputs_are_uniform():
    x = FuzzyLogic(num_points=8).sample("train", 0, 4000).x[..., :-1]
    for variable in range(4):
        assert stats.kstest(x[..., variable].flatten().double().numpy(), "uniform").pvalue > 1e-4


def test_fixed_context_and_fixed_query():
    free = FuzzyLogic(num_points=5).sample("iid", 0, 7)
    context = FuzzyLogic(num_points=5, inputs="fixed_context")
    query = FuzzyLogic(num_points=5, inputs="fixed_query")
    a, b = context.sample("iid", 0, 7), context.sample("novel", 3, 7)
    assert torch.equal(a.x[:, :-1, :-1], b.x[:, :-1, :-1])
    assert torch.equal(a.x[0, :-1, :-1], a.x[6, :-1, :-1])
    assert torch.equal(a.x[:, -1, :-1], free.x[:, -1, :-1])
    assert len(torch.unique(a.x[:, -1, 0])) == 7
    c, d = query.sample("iid", 0, 7), query.sample("compositional", 1, 7)
    assert torch.equal(c.x[:, -1, :-1], d.x[:, -1, :-1])
    assert torch.equal(c.x[:, :-1, :-1], free.x[:, :-1, :-1])
    for batch in (a, c):
        assert torch.equal(FuzzyLogic.evaluate(batch.info["terms"], batch.x[..., :-1]), batch.info["targets"])


def test_scores_by_hand_and_over_batches():
    task = FuzzyLogic(num_points=3)
    targets = torch.tensor([[0.0, 0.5, 1.0], [0.25, 0.25, 1.0]])
    batch = Batch(torch.zeros(2, 3, 5), targets[:, -1:], {"targets": targets})
    prediction = torch.tensor([[0.5], [0.75]])
    metrics = task.metrics(task.score(prediction.unsqueeze(-1), batch))
    # squared errors 1/4 and 1/16; population variances 1/6 and 1/8
    assert metrics["r2"] == pytest.approx((1 - 1.5 + 1 - 0.5) / 2)
    assert metrics["mse"] == pytest.approx(5 / 32)
    assert np.isnan(metrics["pooled_r2"])  # both hidden values are 1: nothing to explain

    big = task.sample("iid", 0, 30)
    guess = big.y + torch.linspace(-0.1, 0.1, 30).unsqueeze(1)
    whole = task.metrics(task.score(guess, big))
    sums: dict[str, float] = {}
    for index in range(3):
        part = task.sample("iid", index, 10)
        add_sums(sums, task.score(guess[10 * index : 10 * index + 10], part))
    assert task.metrics(sums) == pytest.approx(whole)
    hidden = big.y.double().flatten()
    error = (guess.double() - big.y.double()).square().sum()
    assert whole["pooled_r2"] == pytest.approx(float(1 - error / (hidden - hidden.mean()).square().sum()))
    assert task.metrics(task.score(big.y, big))["r2"] == 1
    with pytest.raises(ValueError, match="one prediction per sequence"):
        task.score(torch.zeros(30, 2), big)


def test_a_task_is_its_configuration():
    task = FuzzyLogic(num_points=16, seed=2**63 + 5, t_norm="product")
    task.sample("train", 0, 2)
    again = FuzzyLogic.from_dict(json.loads(json.dumps(task.to_dict())))
    assert again == task
    assert hash(again) == hash(task)
    copied = pickle.loads(pickle.dumps(task))
    assert copied == task
    assert len(pickle.dumps(task)) < 1000
    assert torch.equal(copied.sample("iid", 1, 3).x, task.sample("iid", 1, 3).x)
    with pytest.raises(AttributeError):
        task.seed = 1  # type: ignore[misc]


def test_without_shares_there_are_fewer_splits():
    assert FuzzyLogic(novel=0.0).splits == ("train", "iid", "compositional")
    assert FuzzyLogic(novel=0.0, held_out=0.0).splits == ("train", "iid")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_variables": 0}, "num_variables must be 1 or more, got 0"),
        ({"num_variables": 17}, "at most 16"),
        ({"num_terms": 0}, "num_terms must be 1 or more"),
        ({"num_variables": 2, "num_terms": 5}, "2 variables have 4 terms"),
        ({"num_points": 1}, "num_points must be 2 or more"),
        ({"num_variables": 7, "num_terms": 5}, "compositions; at most"),
        ({"held_out": 1.5}, "held_out is a share and must lie in 0..1, got 1.5"),
        ({"novel": -0.1}, "novel is a share"),
        ({"held_out": 1.0}, "leave no composition to train on"),
        ({"held_out": 0.95}, "every seen term occurs in training"),
        ({"held_out": 0.001}, "holds out none"),
        ({"novel": 0.1}, "fewer than num_terms=2"),
        ({"seed": -1}, "seed must lie in"),
        ({"t_norm": "lukasiewicz"}, "must be one of 'zadeh', 'product'"),
        ({"inputs": "normal"}, "must be one of"),
        ({"held_out": "half"}, "must be a number"),
    ],
)
def test_bad_configurations_are_refused_in_one_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        FuzzyLogic(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("test", 0, 4), "has no split 'test'; its splits are 'train', 'iid', 'compositional', 'novel'"),
        (("train", -1, 4), "index counts batches from 0, got -1"),
        (("train", 1.5, 4), "index counts batches"),
        (("train", 0, 0), "batch_size must be a whole number, 1 or more, got 0"),
        (("train", 2**62, 4), "Instance numbers end"),
    ],
)
def test_bad_samples_are_refused_in_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        FuzzyLogic().sample(*arguments)


def test_bad_instances_and_evaluations_are_refused():
    with pytest.raises(ValueError, match="whole numbers from 0"):
        FuzzyLogic().instances("train", [3, -2])
    with pytest.raises(ValueError, match="same variables"):
        FuzzyLogic.evaluate(np.zeros((2, 3)), np.zeros((5, 4)))
    with pytest.raises(ValueError, match="'zadeh' or 'product'"):
        FuzzyLogic.evaluate(np.zeros((2, 3)), np.zeros((5, 3)), "min")
