"""Fuzzy logic in the explorer: functions of a split, drawn ones, a hidden point that can be moved, and donors."""

import dataclasses
import functools

import numpy as np

from headcode.explorer.inside import outputs
from headcode.explorer.model import Model
from headcode.explorer.state import State
from headcode.tasks import FuzzyLogic
from headcode.tasks.fuzzy_logic import LEAST_DIFFERENCE
from headcode.tasks.render import formula

SIDE = 11
"""Points along each axis of the surface that a model predicts: each is a forward pass."""
FINE = 41


@dataclasses.dataclass(frozen=True)
class Function:
    """A function with its points; the last point's value is hidden."""

    task: FuzzyLogic
    term_ids: tuple[int, ...]
    inputs: np.ndarray
    """(point, variable)"""
    axes: tuple[int, int]

    @functools.cached_property
    def terms(self) -> np.ndarray:
        return self.task.term_bits(np.array(self.term_ids))

    @functools.cached_property
    def values(self) -> np.ndarray:
        return self.task.evaluate(self.terms, self.inputs, self.task.t_norm)

    @property
    def x(self) -> np.ndarray:
        x = np.concatenate([self.inputs, self.values[:, None]], 1).astype(np.float32)
        x[-1, -1] = 0
        return x

    @property
    def formula(self) -> str:
        return formula(self.terms)

    def slice(self, side: int) -> tuple[np.ndarray, np.ndarray]:
        """(side,) places along an axis, and (side, side, variable) points: the hidden one, moved along both axes."""
        places = np.linspace(0, 1, side)
        points = np.tile(self.inputs[-1], (side, side, 1)).astype(np.float32)
        points[..., self.axes[0]] = places[None, :]
        points[..., self.axes[1]] = places[:, None]
        return places, points

    def true_surface(self) -> tuple[np.ndarray, np.ndarray]:
        places, points = self.slice(FINE)
        flat = points.reshape(-1, self.task.num_variables)
        return places, self.task.evaluate(self.terms, flat, self.task.t_norm).reshape(FINE, FINE)

    def predicted_surface(self, model: Model) -> tuple[np.ndarray, np.ndarray]:
        """The model's answer wherever the hidden point could stand."""
        places, points = self.slice(SIDE)
        x = np.repeat(self.x[None], SIDE * SIDE, axis=0)
        x[:, -1, :-1] = points.reshape(-1, self.task.num_variables)
        return places, outputs(model, x)[:, 0, 0].reshape(SIDE, SIDE)

    def score(self, answer: float) -> float:
        """1 - squared error / variance of the sequence's values, as the task scores it."""
        variance = float(self.values.astype(np.float64).var())
        return 1 - (answer - float(self.values[-1])) ** 2 / variance if variance > 0 else float("nan")


def function_of(task: FuzzyLogic, state: State) -> Function:
    """The function that a state shows."""
    if state.terms:
        terms = tuple(sorted(state.terms))
        size = (task.num_points, task.num_variables)
        inputs = np.random.default_rng(state.seed).random(size).astype(np.float32)
    else:
        terms, inputs = _sample(task, state.split, state.n)
    if state.point:
        inputs = inputs.copy()
        inputs[-1] = state.point
    bits = task.term_bits(np.array(terms))
    order = np.argsort((bits == bits[0]).all(axis=0), kind="stable")[:2]
    axes = state.axes or tuple(sorted(int(variable) for variable in order))
    return Function(task, terms, inputs, (axes[0], axes[1]))


def _sample(task: FuzzyLogic, split: str, instance: int) -> tuple[tuple[int, ...], np.ndarray]:
    batch = task.instances(split, [instance])
    return tuple(batch.info["term_ids"][0].tolist()), batch.x[0, :, :-1].numpy()


def donor_of(function: Function, state: State) -> tuple[Function, str] | None:
    """The function whose codes are put in, and its name in words."""
    kind, _, rest = state.donor.partition("-")
    if kind == "terms":
        donor = dataclasses.replace(function, term_ids=tuple(sorted(int(term) for term in rest.split("."))))
        return donor, f"the same points with f = {donor.formula}"
    if kind == "n":
        terms, inputs = _sample(function.task, state.split, int(rest))
        return dataclasses.replace(function, term_ids=terms, inputs=inputs), f"{state.split} function {int(rest)}"
    return None


def expected(function: Function, donor: Function) -> float:
    """If the answer follows the code: the donor's function at this one's hidden point."""
    return float(function.task.evaluate(donor.terms, function.inputs[-1:], function.task.t_norm)[0])


def uninformative(function: Function, donor: Function, said: float) -> str:
    """Why a donor cannot show whether the answer follows its code: a sentence, or "" where it can.

    `said` is what the model answers without the patch.
    """
    truth, follow = float(function.values[-1]), expected(function, donor)
    if abs(follow - truth) < LEAST_DIFFERENCE:
        return f"At the hidden point the two functions differ by less than {LEAST_DIFFERENCE}."
    if abs(said - follow) < abs(said - truth):
        return "Without the patch the model's answer is already nearer to the donor's function."
    return ""
