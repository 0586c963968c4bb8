"""How far codes tell classes of pairs apart, on texts that the decoder has not seen, and beside which controls.

A linear discriminant on the code's H numbers guesses the class of pairs of held-out texts. Its **skill** is the
balanced accuracy on a scale where guessing is 0 and being always right is 1. The numbers enter by their signed square
root, since attention weights are heavy-tailed. Three controls get the same decoder:

    heads shuffled     every code's numbers dealt to other heads: what remains is how large they are, not whose
    untrained          codes of the same configuration before any training: what tokens and positions give by themselves
    labels shuffled    nothing to be found

Intervals come from resampling whole texts (where that finds no spread at all, from one text in error). They are made
wider, so that all comparisons of a page hold together with 95 % (Bonferroni). Classes are told **clearly** if the codes
are ahead of all three controls in this sense.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headcode.analysis.lens.questions import Question

CONTROLS = ("heads shuffled", "untrained", "labels shuffled")
FOLDS = 4
SHUFFLES = 8
"""Of the labels: a single one would be a noisy zero."""
RESAMPLES = 1000
_SHRINKAGE = 1e-4


@dataclasses.dataclass(frozen=True)
class Answers:
    """A decoder's held-out guesses, counted: (group, true class, guessed class)."""

    counts: np.ndarray

    def skill(self) -> float:
        return float(_skill(self.counts.sum(0)[None])[0])

    def error(self, drawn: np.ndarray) -> float:
        """The standard error of skills that were resampled; without any spread, what one group in error would make."""
        return float(drawn.std()) or 1 / len(self.counts)

    def resampled(self, seed: int) -> np.ndarray:
        """(RESAMPLES,) skills of groups drawn anew; equal seeds draw the same groups."""
        groups = len(self.counts)
        drawn = np.random.default_rng(seed).multinomial(groups, np.full(groups, 1 / groups), size=RESAMPLES)
        return _skill(np.tensordot(drawn, self.counts, 1))


def answer(features: np.ndarray, question: Question, seed: int, shuffles: int = 0) -> Answers:
    """Guess the class of every pair by a decoder that was fitted on other groups.

    With `shuffles`, the labels are shuffled that many times, and all answers counted.
    """
    try:
        from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
    except ModuleNotFoundError:
        raise ModuleNotFoundError("Decoders need scikit-learn: pip install scikit-learn.") from None
    rng = np.random.default_rng(seed)
    groups, group = np.unique(question.group, return_inverse=True)
    fold = rng.permutation(np.arange(len(groups)) % FOLDS)[group]
    count = len(question.classes)
    counts = np.zeros((len(groups), count, count))
    features = np.sign(features) * np.sqrt(np.abs(features))
    labels = [rng.permutation(question.label) for _ in range(shuffles)] or [question.label]
    for held in range(FOLDS):
        fit, test = fold != held, fold == held
        spread = features[fit].std(0)
        scaled = (features - features[fit].mean(0)) / np.where(spread > 0, spread, 1)
        for label in labels:
            known = np.unique(label[fit])
            priors = np.full(len(known), 1 / len(known))
            decoder = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=_SHRINKAGE, priors=priors)
            guesses = decoder.fit(scaled[fit], label[fit]).predict(scaled[test])
            np.add.at(counts, (group[test], label[test], guesses), 1)
    return Answers(counts)


def dealt_to_other_heads(features: np.ndarray, seed: int) -> np.ndarray:
    """Every code's numbers in an order of their own."""
    return np.random.default_rng(seed).permuted(features, axis=1)


def separation(
    features: Mapping[str, Mapping[int, Mapping[str, np.ndarray]]], questions: Sequence[Question], seed: int
) -> list[dict[str, Any]]:
    """One row per layer and question; `features` are {trained, untrained} → layer → question's name → (pair, H)."""
    layers = sorted(features["trained"])
    z = critical_value(len(layers) * len(questions) * len(CONTROLS))
    rows = []
    for layer in layers:
        for question in questions:
            codes = features["trained"][layer][question.name]
            before = features["untrained"].get(layer, {}).get(question.name)
            found = {
                "codes": answer(codes, question, seed),
                "heads shuffled": answer(dealt_to_other_heads(codes, seed), question, seed),
                "labels shuffled": answer(codes, question, seed, shuffles=SHUFFLES),
            }
            if before is not None:
                found["untrained"] = answer(before, question, seed)
            rows.append({"layer": layer, "question": question.name, **_judged(found, z, seed)})
    return rows


def critical_value(comparisons: int) -> float:
    """How many standard errors make an interval with which that many comparisons hold together."""
    return statistics.NormalDist().inv_cdf(1 - 0.025 / max(1, comparisons))


def interval(value: float, error: float, z: float) -> dict[str, float]:
    return {"value": value, "low": value - z * error, "high": value + z * error}


def _judged(found: Mapping[str, Answers], z: float, seed: int) -> dict[str, Any]:
    drawn = {name: answers.resampled(seed) for name, answers in found.items()}
    skill = {name: answers.skill() for name, answers in found.items()}
    ahead = {
        name: interval(skill["codes"] - skill[name], answers.error(drawn["codes"] - drawn[name]), z)
        for name, answers in found.items()
        if name != "codes"
    }
    return {
        "skill": interval(skill["codes"], found["codes"].error(drawn["codes"]), z),
        "controls": {name: skill[name] for name in ahead},
        "ahead": ahead,
        "clear": all(each["low"] > 0 for each in ahead.values()),
    }


def _skill(counts: np.ndarray) -> np.ndarray:
    """(n,) from (n, true class, guessed class): recall averaged over the classes that occur, guessing at 0."""
    truths = counts.sum(2)
    recall = np.diagonal(counts, axis1=1, axis2=2) / np.maximum(truths, 1)
    chance = 1 / counts.shape[1]
    return (recall.sum(1) / np.maximum((truths > 0).sum(1), 1) - chance) / (1 - chance)
