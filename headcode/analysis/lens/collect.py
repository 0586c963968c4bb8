"""What is kept of a pass over many texts: of each layer the codes of the drawn pairs, and sums over all of them.

A layer's codes, tokens and weights are dropped when the pass comes to the next layer.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headcode.analysis.lens.layer import LayerReading, summarise
from headcode.analysis.lens.models import Layer, LensModel
from headcode.analysis.lens.questions import Question
from headcode.analysis.lens.reading import Text
from headcode.analysis.lens.separation import dealt_to_other_heads, interval

TEXTS_AT_A_TIME = 64
CHECKED_TEXTS = 8
"""How many passages are held to the model's own outputs, in every layer."""
STRONGEST, OTHERS = 24, 40
"""Pairs of each passage whose codes are kept: those that add most, and some of the rest."""
WIDEST_RANKED = 1024
"""Above this width the singular values of the generated matrices are not computed."""
RANKED_PAIRS = 3
RESAMPLES = 200


@dataclasses.dataclass
class Pairs:
    """Pairs of passages with their codes and the size of what each adds to its query."""

    text: np.ndarray
    query: np.ndarray
    key: np.ndarray
    size: np.ndarray
    """As a share of what the query's output would be long if it were alone: relative to the layer's mean output."""
    share: np.ndarray
    """Of the sizes of all pairs of the query."""
    codes: np.ndarray
    """(pair, H)"""


class Collection:
    """The visitor of one pass: `features` for the questions, and of the passages `pairs`, `moments` and sums."""

    def __init__(self, texts: Sequence[Text], num_passages: int, questions: Sequence[Question], seed: int) -> None:
        self.texts, self.num_passages, self.questions, self.seed = texts, num_passages, questions, seed
        self.features: dict[int, dict[str, np.ndarray]] = {}
        self.moments: dict[int, list[dict[str, np.ndarray]]] = collections.defaultdict(list)
        """Per passage the moments of its codes: as they are, at length 1, and at length 1 with the heads shuffled."""
        self.errors: dict[int, list[tuple[float, float]]] = collections.defaultdict(list)
        self.sizes_by_kind: dict[int, list[dict[str, float]]] = collections.defaultdict(list)
        self.facts: dict[int, dict[str, Any]] = {}
        self._pairs: dict[int, list[Pairs]] = collections.defaultdict(list)

    def run(self, model: LensModel, layers: Sequence[int] | None, sizes: bool = True) -> "Collection":
        """Read all texts; without `sizes`, only what a control needs."""
        order = list(range(len(self.texts)))
        for first in range(0, len(order), TEXTS_AT_A_TIME):
            chosen = order[first : first + TEXTS_AT_A_TIME]
            batch = model.batch([self.texts[i].ids for i in chosen])
            model.run(batch, lambda layer, chosen=chosen: self._visit(layer, chosen, sizes), layers=layers)  # type: ignore[misc]
        return self

    def pairs(self, layer: int) -> Pairs:
        parts = self._pairs[layer]
        fields = [field.name for field in dataclasses.fields(Pairs)]
        return Pairs(*(np.concatenate([getattr(part, name) for part in parts]) for name in fields))

    def _visit(self, layer: Layer, chosen: Sequence[int], sizes: bool) -> None:
        codes = layer.codes.float().numpy()
        place = {text: row for row, text in enumerate(chosen)}
        features = self.features.setdefault(layer.number, {})
        for question in self.questions:
            here = np.flatnonzero(np.isin(question.text, chosen))
            if question.name not in features:
                features[question.name] = np.zeros((len(question), codes.shape[1]), np.float32)
            rows = [place[text] for text in question.text[here]]
            features[question.name][here] = codes[rows, :, question.query[here], question.key[here]]
        for row, text in enumerate(chosen):
            if text < self.num_passages:
                self._note_moments(layer, row)
                if sizes:
                    self._note_sizes(layer.reading(row), text)

    def _note_moments(self, layer: Layer, row: int) -> None:
        length = layer.lengths[row]
        codes = layer.codes[row, :, :length, :length].double().flatten(1).T.numpy()
        codes = codes[np.abs(codes).sum(1) > 0]
        unit = codes / np.linalg.norm(codes, axis=1, keepdims=True)
        kinds = {"codes": codes, "unit": unit, "unit shuffled": dealt_to_other_heads(unit, self.seed)}
        self.moments[layer.number].append({name: _moments(rows) for name, rows in kinds.items()})

    def _note_sizes(self, reading: LayerReading, text: int) -> None:
        number = reading.layer
        if text < CHECKED_TEXTS:
            self.errors[number].append((reading.error, reading.relative_error))
        if text == 0 and reading.is_linear and reading.weights.output.shape[1] <= WIDEST_RANKED:
            self.facts[number] = summarise(reading, pairs=RANKED_PAIRS, seed=self.seed)
        sizes = reading.sizes().numpy()
        kinds = self.texts[text].kinds
        by_kind: dict[str, float] = collections.defaultdict(float)
        for kind, size in zip(kinds, sizes.sum(0), strict=True):
            by_kind[kind] += float(size)
        self.sizes_by_kind[number].append(dict(by_kind))
        output = float(reading.own_output.double().norm(dim=-1).mean())
        order = np.argsort(-sizes, axis=None)[: int((sizes > 0).sum())]
        rng = np.random.default_rng([self.seed, number, text])
        kept = np.concatenate([order[:STRONGEST], rng.permutation(order[STRONGEST:])[:OTHERS]])
        query, key = np.unravel_index(kept, sizes.shape)
        share = sizes / np.maximum(sizes.sum(1, keepdims=True), 1e-30)
        self._pairs[number].append(
            Pairs(
                np.full(len(kept), text),
                query,
                key,
                sizes[query, key] / max(output, 1e-30),
                share[query, key],
                reading.codes.float().numpy()[:, query, key].T,
            )
        )


def dimension(moments: Sequence[np.ndarray], z: float, seed: int) -> dict[str, float]:
    """In how many directions the codes vary: (Σλ)² / Σλ² of their covariance's eigenvalues λ; 1 is a line."""
    table = np.stack(moments)
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(len(table), np.full(len(table), 1 / len(table)), size=RESAMPLES)
    resampled = [_participation(_covariance(np.tensordot(weights, table, 1))) for weights in drawn]
    return interval(_participation(_covariance(table.sum(0))), float(np.std(resampled)), z)


def directions(moments: Sequence[np.ndarray], share: float = 0.9) -> int:
    """How many directions hold that share of the codes' variance."""
    values = np.sort(np.linalg.eigvalsh(_covariance(np.stack(moments).sum(0))))[::-1].clip(min=0)
    return int(np.searchsorted(np.cumsum(values) / max(values.sum(), 1e-300), share - 1e-9) + 1)


def shares_by_kind(sizes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of everything that is added to queries, how much comes from keys of each kind."""
    total: dict[str, float] = collections.defaultdict(float)
    for each in sizes:
        for kind, size in each.items():
            total[kind] += size
    whole = sum(total.values()) or 1.0
    return {kind: size / whole for kind, size in sorted(total.items(), key=lambda item: -item[1])}


def _moments(codes: np.ndarray) -> np.ndarray:
    """(H + 1, H + 1): the sum of [1, z] [1, z]^T."""
    rows = np.concatenate([np.ones((len(codes), 1)), codes], 1)
    return rows.T @ rows


def _covariance(moments: np.ndarray) -> np.ndarray:
    mean = moments[0, 1:] / moments[0, 0]
    return moments[1:, 1:] / moments[0, 0] - np.outer(mean, mean)


def _participation(covariance: np.ndarray) -> float:
    squares = float((covariance**2).sum())
    return float(np.trace(covariance) ** 2 / squares) if squares else 0.0
