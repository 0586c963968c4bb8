"""A model's decoding step on the CPU: its record, filled once, and the few words of it that differ from token to token.

The record has the addresses of the model's own weights. Nothing is copied from them, so nothing can become stale but
the addresses; whoever makes a `DecodePlan` watches these.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headcode.ops.cpu import records
from headcode.ops.cpu.launch import Area, kernel
from headcode.ops.cpu.team import run_native_in_team
from headcode.ops.registry import RMS_EPSILON

STAGES_PER_LAYER, STAGES_AROUND = 9, 3
PIECE = 64
"""Rows of a product that are one task where threads share it: a multiple of LANES."""
SMALL = 2**21
"""Weights up to which one thread alone is sooner done than several that wait for each other at each stage."""


class DecodeSizes(NamedTuple):
    """What the kernel is told about a model besides addresses; widths of queries and values are those of one head."""

    dim: int
    heads: int
    qk_width: int
    v_width: int
    inner_width: int
    hidden_width: int
    """Twice the inner width if the feed-forward is gated."""
    vocab_size: int
    outputs: int
    norm: int
    net: int
    num_buckets: int
    output_scale: float


Weights = Mapping[str, Tensor | float]
"""By their fields in the record, where those of a LayerNorm come after a dot: tensors, or numbers."""


def _positions(dtype: np.dtype) -> dict[str, int]:
    """Of the fields among a record's words."""
    return {name: offset // 8 for name, (_, offset, *_) in (dtype.fields or {}).items()}


_WORD, _LAYER_WORD = _positions(records.DECODE), _positions(records.DECODE_LAYER)
_ALL = 2**40


def _start(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


class DecodePlan:
    """Steps of one model, for any batch; not for two threads at once."""

    def __init__(self, sizes: DecodeSizes, model: Weights, layers: Sequence[Weights]) -> None:
        self._sizes = sizes
        self._record, self._layers = np.zeros(1, records.DECODE), np.zeros(len(layers), records.DECODE_LAYER)
        # Python writes single words through these twice as fast as into an array.
        self._words = memoryview(self._record).cast("B").cast("q")
        self._layer_words = memoryview(self._layers).cast("B").cast("q")
        self._stages = np.zeros(2 * (STAGES_PER_LAYER * len(layers) + STAGES_AROUND), np.int64)
        scales = {"scale": sizes.qk_width**-0.5, "epsilon": RMS_EPSILON, "output_scale": sizes.output_scale}
        shared = {name: value for name, value in sizes._asdict().items() if name not in scales}
        constants = {"num_layers": len(layers), "layers": _start(self._layers), "stages": _start(self._stages)}
        for name, value in (shared | constants | scales).items():
            self._record[name] = value
        for record, weights in ((self._record[0], model), *zip(self._layers, layers, strict=True)):
            for name, value in weights.items():
                part, _, field = name.rpartition(".")
                (record[part] if part else record)[field] = value if isinstance(value, float) else value.data_ptr()
        norms = [self._record[0]["final_norm"], *self._layers["attention_norm"], *self._layers["feedforward_norm"]]
        for norm in norms:
            norm["dim"] = sizes.dim
        self._norms, self._weights = norms, (model, layers)  # kept where the record says they are
        self._num_weights = sum(v.numel() for w in (model, *layers) for v in w.values() if isinstance(v, Tensor))
        self._kernel, self._start = kernel("decode", "decode_kernel"), _start(self._record)
        self._rows, self._scratch = 0, torch.empty(0)

    def cache_shapes(self, batch: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """(B, H, D) of a layer's keys and of its values."""
        return (batch, self._sizes.heads, self._sizes.qk_width), (batch, self._sizes.heads, self._sizes.v_width)

    def state_shape(self, batch: int) -> tuple[int, ...]:
        return batch, self._sizes.heads, self._sizes.qk_width, self._sizes.v_width

    def set_cache(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Where a layer finds its keys and values (B, H, room, D), which have room for the new ones."""
        self._set_layer(layer, keys=keys.data_ptr(), values=values.data_ptr(), room=keys.shape[2])

    def set_state(self, layer: int, state: Tensor | None, next_state: Tensor) -> None:
        """The matrices (B, H, Dk, Dv) that a layer reads, unless there is no past, and those that it fills."""
        self._set_layer(layer, state=0 if state is None else state.data_ptr(), next_state=next_state.data_ptr())

    def _set_layer(self, layer: int, **words: int) -> None:
        first = layer * records.DECODE_LAYER.itemsize // 8
        for name, word in words.items():
            self._layer_words[first + _LAYER_WORD[name]] = word

    def set_positions(self, places: Tensor | None, rotations: Tensor | None) -> None:
        """Tables (position, dim) of what is added to tokens, and (position, Dk) of cosines and sines."""
        for name, table in (("places", places), ("rotations", rotations)):
            self._words[_WORD[name]] = 0 if table is None else table.data_ptr()
        self._words[_WORD["num_places"]] = 0 if places is None else len(places)
        self._tables = places, rotations

    def run(self, tokens: Tensor, past: int, kept: range, mask: Tensor | None, recurrent: bool) -> Tensor | None:
        """Logits (B, kept, outputs) of some of the tokens (B, T) after `past` others.

        None, with nothing done, if a token is not in the vocabulary. `mask` is (B, keys), of the new ones alone if the
        past is a state, and True where a key is not seen.
        """
        batch, new = tokens.shape
        if batch * new > self._rows:
            self._allocate(batch * new)
        logits = torch.empty(batch, len(kept), self._sizes.outputs)
        num_threads = torch.get_num_threads() if self._num_weights > SMALL else 1
        words = {
            "refused": 0,
            "piece": PIECE if num_threads > 1 else _ALL,
            "batch": batch,
            "new": new,
            "rows": batch * new,
            "first_kept": kept.start,
            "kept": len(kept),
            "past": past,
            "recurrent": recurrent,
            "tokens": tokens.data_ptr(),
            "token_batch": tokens.stride(0),
            "token_step": tokens.stride(1),
            "mask": 0,
            "logits": logits.data_ptr(),
        }
        if mask is not None:
            words |= {"mask": mask.data_ptr(), "mask_batch": mask.stride(0), "mask_key": mask.stride(1)}
        for name, word in words.items():
            self._words[_WORD[name]] = word
        self._stages.fill(0)
        run_native_in_team(self._kernel, self._start, num_threads)
        return None if self._words[_WORD["refused"]] else logits

    def _allocate(self, rows: int) -> None:
        sizes, area = self._sizes, Area("scratch")
        qk, v = sizes.heads * sizes.qk_width, sizes.heads * sizes.v_width
        widths = {"x": sizes.dim, "normed": sizes.dim, "projected": 2 * qk + v, "attended": v}
        widths |= {"hidden": sizes.hidden_width, "inner": sizes.inner_width}
        sections = {name: area.take(rows, width) for name, width in widths.items()}
        statistics = area.take(rows, 2)
        self._scratch, self._rows = torch.empty(area.size), rows
        start = self._scratch.data_ptr()
        for name, section in sections.items():
            self._record[name] = start + 4 * section.start
        for norm in self._norms:
            norm["statistics"] = start + 4 * statistics.start
