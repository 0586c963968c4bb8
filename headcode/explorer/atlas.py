"""Codes of a few hundred instances of a model: the map of codes, and the neighbours of one code."""

import dataclasses
import threading
from collections.abc import Sequence

import numpy as np
import torch

from headcode.explorer.inside import Recent, on_model
from headcode.explorer.model import COMPUTING, Model
from headcode.nn import capture_codes
from headcode.tasks import Batch

SIZE = 256
"""Instances of an atlas."""
AT_ONCE = 32


@dataclasses.dataclass(frozen=True)
class Plane:
    """The two main directions of a set of codes."""

    points: np.ndarray
    """(N, 2)"""
    centre: np.ndarray
    directions: np.ndarray
    """(channel, 2)"""
    shares: tuple[float, float]
    """Of the variance, along each direction."""

    def place(self, code: np.ndarray) -> np.ndarray:
        """Where a code lies, (2,)."""
        return (code.ravel() - self.centre) @ self.directions


def plane_of(features: np.ndarray) -> Plane | None:
    """The plane of codes (N, channel), or None where they differ by rounding alone."""
    features = features.astype(np.float64)
    if not (features.std(0) > 1e-3 * max(np.abs(features).max(), 1e-12)).any():
        return None
    centre = features.mean(0)
    _, sizes, directions = np.linalg.svd(features - centre, full_matrices=False)
    chosen = np.zeros((features.shape[1], 2))
    chosen[:, : len(directions[:2])] = directions[:2].T
    # A direction's sign is arbitrary: the larger half points up, so that a map looks the same on every machine.
    chosen *= np.where(chosen[np.abs(chosen).argmax(0), [0, 1]] < 0, -1, 1)
    share = np.zeros(2)
    share[: len(sizes[:2])] = (sizes**2 / (sizes**2).sum())[:2]
    return Plane((features - centre) @ chosen, centre, chosen, (float(share[0]), float(share[1])))


def alike(features: np.ndarray, code: np.ndarray, count: int, without: int | None = None) -> list[tuple[int, float]]:
    """The rows of features (N, channel) whose direction is nearest to a code's: (row, cosine), the nearest first."""
    features, code = features.astype(np.float64), code.ravel().astype(np.float64)
    sizes = np.linalg.norm(features, axis=1) * np.linalg.norm(code)
    cosines = np.divide(features @ code, sizes, where=sizes > 0, out=np.zeros(len(features)))
    if without is not None:
        cosines[without] = -np.inf
    order = np.argsort(-cosines, kind="stable")[:count]
    return [(int(row), float(cosines[row])) for row in order if np.isfinite(cosines[row])]


class Atlas:
    """All codes of one model on the first instances of a split, in half precision."""

    def __init__(self, model: Model, size: int = SIZE) -> None:
        self.split = model.limits.split
        task = model.task
        size = min(size, task.split_size(self.split) or size)
        self.batch: Batch = task.instances(self.split, np.arange(size))
        kept: list[list[np.ndarray]] = [[] for _ in range(model.limits.layers)]
        predictions = []
        for first in range(0, size, AT_ONCE):
            x = on_model(model, self.batch.x[first : first + AT_ONCE])
            with COMPUTING, torch.no_grad(), capture_codes(model.run.model) as codes:
                predictions.append(model.run.model(x)[:, task.queries])
            for layer, found in codes.items():
                kept[layer].append(found.half().numpy())
        self._codes = [np.concatenate(parts) for parts in kept]  # (N, H, query, key)
        self._positions = [model.positions(layer) for layer in range(model.limits.layers)]
        self.judged = task.judge(torch.cat(predictions), self.batch)
        self.correct: np.ndarray = self.judged["correct"]
        self._planes = Recent(64)

    def __len__(self) -> int:
        return len(self.batch.x)

    def features(self, layer: int, query: int, keys: int | Sequence[int] | None) -> np.ndarray:
        """(N, channel): codes of one query to one key, or to all tokens (None); 0 for tokens that are none here."""
        own_queries, own_keys = self._positions[layer]
        kept = self._codes[layer]
        length = self.batch.x.shape[1]
        codes = np.zeros((*kept.shape[:2], length), kept.dtype)
        if query in own_queries:
            codes[:, :, own_keys.start : own_keys.stop] = kept[:, :, own_queries.index(query)]
        chosen = codes if keys is None else codes[:, :, keys]
        return chosen.reshape(len(codes), -1)

    def plane(self, layer: int, query: int, keys: int | None) -> Plane | None:
        return self._planes.get((layer, query, keys), lambda: plane_of(self.features(layer, query, keys)))


class Atlases:
    """One atlas per model, made when it is first needed, or ahead by `prepare`."""

    def __init__(self) -> None:
        self._made: dict[str, Atlas] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def of(self, model: Model) -> Atlas:
        with self._lock:
            lock = self._locks.setdefault(model.name, threading.Lock())
        with lock:
            if model.name not in self._made:
                self._made[model.name] = Atlas(model)
            return self._made[model.name]
