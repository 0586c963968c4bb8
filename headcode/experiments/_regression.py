"""Algorithms that answer a fuzzy-logic question from its context alone, for comparison with trained models.

Each fits a linear function of some features of the points to the visible values and reads it off at the query:

    least squares      w = (ΦᵀΦ/n + λ)⁻¹ Φᵀy/n
    gradient descent   w ← w + η Φᵀ(y - Φw)/n,  K times from w = 0; with K > 1, η is at most 1/λ_max(ΦᵀΦ/n), where the
                       steps of every context converge

Features Φ are the inputs as they are (centred, with a constant), or the truth values of all terms ("minterms"): with
the right weights these give the function wherever one term dominates, so the second kind is told what the task is made
of. λ and η are chosen on the training compositions.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from headcode.tasks import FuzzyLogic
from headcode.tasks.baselines import consistent_terms, context_mean, nearest_point

PENALTIES = tuple(10.0**exponent for exponent in range(-8, 2))
RATES = tuple(float(rate) for rate in np.geomspace(0.03, 30.0, 16))
TUNED_ON = 1024
"""Training instances by which penalties and rates are chosen."""
STEPS = (1, 10, 100)
FEATURES = ("inputs", "minterms")

Predict = Callable[[Tensor], Tensor]
"""x (B, points, variables + 1), the last value hidden, to predictions (B,)."""


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """A way to predict, with the number that was chosen for it (None: nothing to choose)."""

    name: str
    predict: Predict
    setting: float | None = None


def features(task: FuzzyLogic, kind: str, inputs: Tensor) -> Tensor:
    """Inputs (…, variable) in float64 to features (…, feature).

    >>> features(FuzzyLogic(num_variables=1, num_terms=1, novel=0.0, held_out=0.0), "minterms", torch.tensor([[0.25]]))
    tensor([[0.7500, 0.2500]], dtype=torch.float64)
    """
    inputs = inputs.double()
    if kind == "inputs":
        return torch.cat([inputs - 0.5, torch.ones_like(inputs[..., :1])], -1)
    bits = torch.from_numpy(task.term_bits(np.arange(2**task.num_variables))).bool()  # (term, variable)
    literals = torch.where(bits, inputs[..., None, :], 1 - inputs[..., None, :])
    return literals.amin(-1) if task.t_norm == "zadeh" else literals.prod(-1)


def least_squares(context: Tensor, values: Tensor, query: Tensor, penalty: float) -> Tensor:
    """Predictions (B,) of ridge regression: context (B, n, F), values (B, n), query (B, F)."""
    count, width = context.shape[1:]
    moments = context.mT @ context / count + penalty * torch.eye(width, dtype=context.dtype)
    weights = torch.linalg.solve(moments, context.mT @ values[..., None] / count)
    return (query[:, None] @ weights).flatten()


def gradient_descent(context: Tensor, values: Tensor, query: Tensor, rate: float, steps: int) -> Tensor:
    """Predictions (B,) after so many steps of gradient descent on half the mean squared error, from zero."""
    moments, slope = context.mT @ context / context.shape[1], context.mT @ values[..., None] / context.shape[1]
    rates = torch.full((len(context), 1, 1), rate, dtype=context.dtype)
    if steps > 1:
        rates = rates.minimum(1 / torch.linalg.matrix_norm(moments, 2)[:, None, None])
    weights = rates * slope
    for _ in range(steps - 1):
        weights = weights + rates * (slope - moments @ weights)
    return (query[:, None] @ weights).flatten()


def algorithms(task: FuzzyLogic, train: Tensor, targets: Tensor) -> list[Algorithm]:
    """All of them for contexts like those of `train` (B, points, variables + 1), whose hidden values are `targets`."""
    train, targets = train[:TUNED_ON], targets[:TUNED_ON]
    found = [
        Algorithm("mean of the context", lambda x: context_mean(task, x)[:, 0].double()),
        Algorithm("nearest point", lambda x: nearest_point(task, x)[:, 0].double()),
    ]
    for kind in FEATURES:
        for steps in STEPS:
            words = "one gradient step" if steps == 1 else f"{steps} gradient steps"
            descent = functools.partial(gradient_descent, steps=steps)
            found.append(_tuned(f"{words}, {kind}", task, kind, descent, RATES, train, targets))
        found.append(_tuned(f"least squares, {kind}", task, kind, least_squares, PENALTIES, train, targets))
    found.append(Algorithm("best-fitting function", lambda x: consistent_terms(task, x)[:, 0].double()))
    return found


def _tuned(
    name: str,
    task: FuzzyLogic,
    kind: str,
    solver: Callable[[Tensor, Tensor, Tensor, float], Tensor],
    settings: tuple[float, ...],
    train: Tensor,
    targets: Tensor,
) -> Algorithm:
    def predict(x: Tensor, setting: float) -> Tensor:
        found = features(task, kind, x[..., :-1])
        return solver(found[:, :-1], x[:, :-1, -1].double(), found[:, -1], setting)

    errors = [float((predict(train, setting) - targets.double()).square().mean()) for setting in settings]
    best = settings[int(np.nanargmin(np.where(np.isfinite(errors), errors, np.nan)))]
    return Algorithm(name, lambda x: predict(x, best), best)
