"""A model's decoding step on the CPU: its record, filled once, and the few words of it that differ from token to token.

The record has the addresses of the model's own weights. Nothing is copied from them, so nothing can become stale but
the addresses; whoever makes a `DecodePlan` watches these.
"""

import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headcode.ops.cpu import records
from headcode.ops.cpu.launch import Area
from headcode.ops.cpu.library import KernelName, address
from headcode.ops.cpu.records import LANES
from headcode.ops.cpu.team import run_native_in_team
from headcode.ops.registry import RMS_EPSILON

STAGES_PER_LAYER, STAGES_AROUND = 9, 3
PIECE = 64
"""Rows of a product that are one task where threads share it: a multiple of LANES."""
SMALL = 2**22
"""Weights times tokens up to which one thread alone is as soon done as several that wait for each other."""


class DecodeSizes(NamedTuple):
    """What the kernel is told about a model besides addresses, or compiled for (norm, net); widths of queries and
    values are those of one head."""

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
"""Tensors and numbers of a record by the names of their fields; those of a LayerNorm come after its name and a dot."""


def _positions(dtype: np.dtype) -> dict[str, int]:
    """Of the fields among a record's words; of fields of a field, after a dot."""
    found: dict[str, int] = {}
    for name, (kind, offset, *_) in (dtype.fields or {}).items():
        inside = _positions(kind) if kind.names else {"": 0}
        found |= {f"{name}.{field}".rstrip("."): offset // 8 + position for field, position in inside.items()}
    return found


_WORD, _LAYER_WORD = _positions(records.DECODE), _positions(records.DECODE_LAYER)
_LAYER_SIZE = records.DECODE_LAYER.itemsize // 8
_CALL = struct.Struct(f"{len(records.DECODE_CALL)}q")
_ALL = 2**40


def _start(array: np.ndarray) -> int:
    return array.ctypes.data  # twenty times as soon found as by __array_interface__, which describes every field


class DecodePlan:
    """Steps of one model, for any batch; not for two threads at once."""

    def __init__(self, sizes: DecodeSizes, model: Weights, layers: Sequence[Weights]) -> None:
        self._sizes = sizes
        record, layer_records = np.zeros(1, records.DECODE), np.zeros(len(layers), records.DECODE_LAYER)
        self._start = _start(record)
        self._stages = np.zeros((STAGES_PER_LAYER * len(layers) + STAGES_AROUND, 2), np.int64)
        # Python writes single words through these twice as fast as into an array.
        self._words, self._layer_words = _words(record), _words(layer_records)
        told = {name: number for name, number in sizes._asdict().items() if name not in ("norm", "net")}
        numbers: dict[str, Any] = {**told, "scale": sizes.qk_width**-0.5, "epsilon": RMS_EPSILON}
        numbers |= {"num_layers": len(layers), "layers": _start(layer_records), "stages": _start(self._stages)}
        numbers |= {"final_norm.dim": sizes.dim}
        _fill(self._words, _WORD, 0, {**numbers, **model})
        norms = {"attention_norm.dim": sizes.dim, "feedforward_norm.dim": sizes.dim}
        for index, weights in enumerate(layers):
            _fill(self._layer_words, _LAYER_WORD, index * _LAYER_SIZE, {**norms, **weights})
        self._num_layers, self._weights = len(layers), (model, layers)  # kept where the records say they are
        self._num_weights = sum(v.numel() for w in (model, *layers) for v in w.values() if isinstance(v, Tensor))
        variant = records.Variant(sizes.norm, sizes.net, rows=LANES, wide=True, lanes=LANES, double=False)
        self._kernel, self._rows, self._scratch = address(KernelName("decode", "KERNELS", variant)), 0, _empty(0)

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
        for name, word in words.items():
            self._layer_words[layer * _LAYER_SIZE + _LAYER_WORD[name]] = word

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
        logits = _empty(batch, len(kept), self._sizes.outputs)
        num_threads = torch.get_num_threads() if self._num_weights * batch * new > SMALL else 1
        _CALL.pack_into(
            self._words,
            0,  # from the first word on
            *(0, PIECE if num_threads > 1 else _ALL),
            *(batch, new, batch * new, kept.start, len(kept), past, recurrent),
            *(tokens.data_ptr(), *tokens.stride()),
            *((0, 0, 0) if mask is None else (mask.data_ptr(), *mask.stride())),
            logits.data_ptr(),
        )
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
        self._scratch, self._rows = _empty(area.size), rows
        start = self._scratch.data_ptr()
        for name, section in sections.items():
            self._words[_WORD[name]] = start + 4 * section.start
        self._words[_WORD["final_norm.statistics"]] = start + 4 * statistics.start
        for layer in range(self._num_layers):
            for norm in ("attention_norm", "feedforward_norm"):
                position = layer * _LAYER_SIZE + _LAYER_WORD[f"{norm}.statistics"]
                self._layer_words[position] = start + 4 * statistics.start


def _empty(*shape: int) -> Tensor:
    """Memory for the kernel's numbers, whatever torch's default dtype and device are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _words(record: Any) -> memoryview:
    return memoryview(record.view(np.int64))


def _fill(words: memoryview, positions: dict[str, int], first: int, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, float):
            value = int.from_bytes(struct.pack("d", value), sys.byteorder, signed=True)
        words[first + positions[name]] = value.data_ptr() if isinstance(value, Tensor) else value
