"""One forward pass, laid open: codes of every pair, the generated network of one, and the answer with codes patched."""

import dataclasses
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from headcode.explorer.model import COMPUTING, Model
from headcode.nn import capture_codes, edit_codes, value_network
from headcode.nn.capture import find_attentions

T = TypeVar("T")


class Recent:
    """The last few results by key; several threads may ask."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._found: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]
        value = make()
        with self._lock:
            self._found[key] = value
            while len(self._found) > self.size:
                self._found.popitem(last=False)
        return value


@dataclasses.dataclass(frozen=True)
class Look:
    """What a model does with one sequence."""

    output: np.ndarray
    """(answering token, output_dim)"""
    codes: list[np.ndarray]
    """Per layer (H, token, token): query and key; 0 for tokens that are none in this layer."""

    @functools.cached_property
    def probabilities(self) -> np.ndarray:
        """(answering token, class)"""
        shifted = np.exp(self.output - self.output.max(1, keepdims=True))
        return shifted / shifted.sum(1, keepdims=True)


_looks = Recent(64)


def look(model: Model, x: np.ndarray) -> Look:
    """The model's pass over one sequence (token, input)."""
    return _looks.get((model.name, id(model.run), x.tobytes()), lambda: _look(model, x))


def _look(model: Model, x: np.ndarray) -> Look:
    with COMPUTING, torch.no_grad(), capture_codes(model.run.model) as codes:
        output = model.run.model(_batch(model, x))[0, model.task.queries]
    return Look(output.double().numpy(), [_at_tokens(model, layer, codes[layer][0]) for layer in sorted(codes)])


def _at_tokens(model: Model, layer: int, codes: Tensor) -> np.ndarray:
    """Codes (H, query, key) of a layer at the tokens of the whole sequence."""
    length, (queries, keys) = model.task.sequence_length, model.positions(layer)
    found = np.zeros((len(codes), length, length), np.float32)
    found[:, queries.start : queries.stop, keys.start : keys.stop] = codes.float().numpy()
    return found


def outputs(model: Model, x: np.ndarray) -> np.ndarray:
    """(sequence, answering token, output_dim) of several sequences (sequence, token, input)."""
    with COMPUTING, torch.no_grad():
        return model.run.model(_batch(model, x), queries=model.task.queries).double().numpy()


def patched(model: Model, x: np.ndarray, donor: np.ndarray, layers: list[int], query: int, key: int | None) -> Look:
    """The pass over `x` with the donor's codes of one query, to one key or (None) to all, in the chosen layers."""
    given = [torch.from_numpy(codes) for codes in look(model, donor).codes]

    def edit(layer: int, codes: Tensor) -> Tensor:
        queries, keys = model.positions(layer)
        if query not in queries:
            return codes
        codes = codes.clone()
        for place, token in enumerate(keys):
            if key in (None, token):
                codes[0, :, queries.index(query), place] = given[layer][:, query, token].to(codes.dtype)
        return codes

    with COMPUTING, torch.no_grad(), edit_codes(model.run.model, edit, layers=layers):
        output = model.run.model(_batch(model, x))[0, model.task.queries]
    return Look(output.double().numpy(), [])


def network(model: Model, layer: int, code: np.ndarray) -> list[np.ndarray]:
    """The weights that a code (H,) generates: one matrix (dim, dim), or two, (Dv, dim) and (dim, Dv)."""
    attention = find_attentions(model.run.model)[layer]
    with torch.no_grad():
        made = value_network(attention, torch.from_numpy(code)[None, :, None, None])
    return [weight[0, 0, 0].float().numpy() for weight in made.weights]


def _batch(model: Model, x: np.ndarray) -> Tensor:
    return on_model(model, torch.from_numpy(x if x.ndim == 3 else x[None]))


def on_model(model: Model, x: Tensor) -> Tensor:
    """Inputs in the model's precision; token numbers as they are."""
    return x.to(next(model.run.model.parameters()).dtype) if x.is_floating_point() else x
