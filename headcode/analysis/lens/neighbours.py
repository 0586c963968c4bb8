"""Which pairs a layer's networks add most with, and whose codes are alike in other texts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from headcode.analysis.lens.collect import Pairs
from headcode.analysis.lens.reading import Text

SHOWN, ALIKE = 6, 3
_PROBES = 600


def strongest_pairs(pairs: Pairs, texts: Sequence[Text]) -> list[dict[str, Any]]:
    """The pairs that add most, no two with the same words, each with its most similar codes in other texts."""
    similarity = _unit(pairs.codes)
    found: list[dict[str, Any]] = []
    words: set[tuple[str, str]] = set()
    for row in np.argsort(-pairs.size, kind="stable"):
        names = texts[pairs.text[row]].names
        both = (names[pairs.query[row]], names[pairs.key[row]])
        if both in words:
            continue
        words.add(both)
        near = similarity @ similarity[row]
        near[pairs.text == pairs.text[row]] = -np.inf
        alike = _distinct(np.argsort(-near, kind="stable"), pairs, texts)
        found.append({**_place(pairs, row), "size": float(pairs.size[row]), "share": float(pairs.share[row])})
        found[-1]["alike"] = [{**_place(pairs, i), "similarity": float(near[i])} for i in alike if np.isfinite(near[i])]
        if len(found) == SHOWN:
            break
    return found


def agreement(pairs: Pairs, texts: Sequence[Text], seed: int) -> dict[str, dict[str, float]]:
    """How often the most similar code of another text has the same relative position and kinds, beside a random one."""
    rng = np.random.default_rng(seed)
    unit = _unit(pairs.codes)
    probes = rng.permutation(len(unit))[:_PROBES]
    near = unit[probes] @ unit.T
    other = pairs.text[probes][:, None] != pairs.text[None]
    if not other.any(1).all():
        return {}
    nearest = np.where(other, near, -np.inf).argmax(1)
    drawn = np.where(other, rng.random(near.shape), -1).argmax(1)
    features = {
        "relative position": pairs.key - pairs.query,
        "kind of the key": _kinds(pairs, texts, pairs.key),
        "kind of the query": _kinds(pairs, texts, pairs.query),
    }
    return {
        name: {
            "nearest": float((values[nearest] == values[probes]).mean()),
            "random": float((values[drawn] == values[probes]).mean()),
        }
        for name, values in features.items()
    }


def _distinct(order: np.ndarray, pairs: Pairs, texts: Sequence[Text]) -> list[int]:
    """The first few rows, of different texts."""
    chosen: list[int] = []
    used: set[int] = set()
    for row in order:
        if int(pairs.text[row]) not in used:
            used.add(int(pairs.text[row]))
            chosen.append(int(row))
        if len(chosen) == ALIKE:
            break
    return chosen


def _place(pairs: Pairs, row: int) -> dict[str, int]:
    return {"text": int(pairs.text[row]), "query": int(pairs.query[row]), "key": int(pairs.key[row])}


def _kinds(pairs: Pairs, texts: Sequence[Text], place: np.ndarray) -> np.ndarray:
    return np.array([texts[text].kinds[i] for text, i in zip(pairs.text, place, strict=True)])


def _unit(codes: np.ndarray) -> np.ndarray:
    return codes / np.maximum(np.linalg.norm(codes, axis=1, keepdims=True), 1e-30)
