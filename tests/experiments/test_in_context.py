"""Algorithms on contexts, and linear attention as a gradient step: against hand-made numbers and each other."""

import pytest
import torch

from headcode.experiments import _one_step
from headcode.experiments._regression import algorithms, features, gradient_descent, least_squares
from headcode.experiments.in_context import context_lengths
from headcode.tasks import FuzzyLogic


def test_one_layer_of_linear_attention_is_one_gradient_step():
    assert _one_step.identity_error(seed=3) < 1e-12


def test_a_step_by_hand():
    """Points 1 and 2 with values 2 and 4 and rate 0.5: from w = 0 to 0.5 · (1·2 + 2·4)/2 = 2.5, read off at 3."""
    x, y = torch.tensor([[[1.0], [2.0]]]).double(), torch.tensor([[[2.0], [4.0]]]).double()
    query = torch.tensor([[3.0]]).double()
    for start, expected in ((0.0, 7.5), (1.0, 3 * (1 + 0.5 * (1 * 1 + 2 * 2) / 2))):
        weights = torch.full((1, 1), start, dtype=torch.float64)
        layer = _one_step.constructed_layer(weights, 0.5, 2)
        assert _one_step.attention_prediction(layer, x, y, query, weights).item() == pytest.approx(expected, abs=1e-12)
        assert _one_step.step_prediction(x, y, query, weights, 0.5).item() == pytest.approx(expected, abs=1e-12)
    assert _one_step.one_step(x, y[..., 0], query, 0.5).item() == pytest.approx(7.5, abs=1e-12)


def test_the_best_rate_is_the_best():
    setting = _one_step.Setting(num_inputs=3, num_points=5)
    rate = _one_step.best_rate(setting, seed=0)
    x, y, query, target = _one_step.regressions(setting, 65536, torch.Generator().manual_seed(0))

    def error(other):
        return float((_one_step.one_step(x, y, query, other) - target).square().mean())

    assert error(rate) < min(error(0.97 * rate), error(1.03 * rate))


@pytest.mark.slow
def test_training_comes_to_the_gradient_step():
    looks = _one_step.train(_one_step.Setting(steps=1500), seed=0)
    assert looks[0]["step"] == 0
    assert looks[0]["cosine"] < 0.5
    assert looks[-1]["cosine"] > 0.99
    assert looks[-1]["difference"] < 0.1
    assert looks[-1]["loss"] == pytest.approx(looks[-1]["step_loss"], rel=0.03)


def test_least_squares_and_many_steps_agree():
    generator = torch.Generator().manual_seed(0)
    context = torch.randn(5, 13, 3, dtype=torch.float64, generator=generator)
    values = torch.randn(5, 13, dtype=torch.float64, generator=generator)
    query = torch.randn(5, 3, dtype=torch.float64, generator=generator)
    exact = (query[:, None] @ torch.linalg.lstsq(context, values[..., None]).solution).flatten()
    torch.testing.assert_close(least_squares(context, values, query, 0.0), exact)
    torch.testing.assert_close(gradient_descent(context, values, query, 0.5, 2000), exact)
    one = 0.5 * (query * (context * values[..., None]).mean(1)).sum(1)
    torch.testing.assert_close(gradient_descent(context, values, query, 0.5, 1), one)


def test_features_of_points():
    task = FuzzyLogic()
    point = torch.tensor([[0.9, 0.2, 0.7, 0.6]])
    torch.testing.assert_close(features(task, "inputs", point), torch.tensor([[0.4, -0.3, 0.2, 0.1, 1.0]]).double())
    terms = features(task, "minterms", point)
    assert terms.shape == (1, 16)
    assert terms[0, 0b1011].item() == pytest.approx(0.6)  # min(0.9, 1 - 0.2, 0.7, 0.6)
    assert terms[0, 0b0000].item() == pytest.approx(0.1)


def test_minterms_solve_a_function_of_one_term():
    """A single term is one of the features, so enough points give it exactly; the raw inputs do not."""
    task = FuzzyLogic(num_terms=1, num_points=40, held_out=0.0, novel=0.0)
    train, test = (task.sample(split, 0, 64) for split in ("train", "iid"))
    found = {a.name: a for a in algorithms(task, train.x, train.y[:, 0])}
    error = {name: float((a.predict(test.x) - test.y[:, 0]).square().mean()) for name, a in found.items()}
    assert error["least squares, minterms"] < 1e-8
    assert error["best-fitting function"] < 1e-12
    assert error["least squares, inputs"] > 1e-3
    assert error["least squares, inputs"] < error["mean of the context"]
    assert error["100 gradient steps, minterms"] < error["one gradient step, minterms"]
    assert found["least squares, minterms"].setting == 1e-8
    assert found["nearest point"].setting is None


def test_context_lengths():
    assert context_lengths(32) == [1, 3, 7, 15, 31]
    assert context_lengths(8) == [1, 3, 7]
    assert context_lengths(7) == [1, 3, 6]
