"""What a decoder remembers between tokens: keys and values, or the fast weights of linear attention."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

FIRST_ROOM = 64
"""Tokens that a new buffer has room for, at least."""


class KeyValueCache:
    """Keys and values of one layer, in a buffer that doubles when it is full.

    Gradients flow through it: where they are asked for, every call makes new tensors.
    """

    def __init__(self) -> None:
        self.length = 0
        self.keys: Tensor | None = None
        """(B, H, room, D), of which the first `length` are filled."""
        self.values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add (B, H, T, D) keys and values; returns all of them so far."""
        end = self.length + k.shape[2]
        held = (self.keys, self.values)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (k, v, *held)):
            self.keys, self.values = (self._joined(old, new) for old, new in zip(held, (k, v), strict=True))
            self.length = end
            return self.keys, self.values
        keys, values = self.reserve(k, v)
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        self.length = end
        return keys[:, :, :end], values[:, :, :end]

    def _joined(self, old: Tensor | None, new: Tensor) -> Tensor:
        if old is None:
            return new
        self._check_batch(old, new.shape[0])
        return torch.cat((old[:, :, : self.length], new), 2)

    def reserve(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers (B, H, room, D), with room for as many keys and values as k and v have; only shapes matter."""
        self.keys, self.values = self._grown(self.keys, k), self._grown(self.values, v)
        return self.keys, self.values

    @property
    def batch_size(self) -> int | None:
        return None if self.keys is None else self.keys.shape[0]

    def reorder(self, index: Tensor) -> None:
        """Let sequence i continue the past of sequence index[i]; the batch may become larger or smaller."""
        if self.keys is not None and self.values is not None:
            self.keys = self.keys.index_select(0, index.to(self.keys.device))
            self.values = self.values.index_select(0, index.to(self.values.device))

    def snapshot(self) -> int:
        return self.length

    def restore(self, snapshot: int) -> None:
        self.length = snapshot
        if snapshot == 0:
            self.keys = self.values = None

    def _grown(self, buffer: Tensor | None, new: Tensor) -> Tensor:
        batch, heads, length, width = new.shape
        needed = self.length + length
        if buffer is None:
            return new.new_empty(batch, heads, max(needed, FIRST_ROOM), width)
        self._check_batch(buffer, batch)
        if buffer.shape[2] >= needed and not buffer.requires_grad:  # others may ask for gradients of what it holds
            return buffer
        bigger = buffer.new_empty(batch, heads, max(needed, 2 * buffer.shape[2]), width)
        bigger[:, :, : self.length] = buffer[:, :, : self.length]
        return bigger

    @staticmethod
    def _check_batch(buffer: Tensor, batch: int) -> None:
        if buffer.shape[0] != batch:
            raise ValueError(f"The cache holds a batch of {buffer.shape[0]}, got {batch}; start a new cache.")


class FastWeightState:
    """The (Dk, Dv) matrix per head that summarises the past of causal linear attention."""

    def __init__(self) -> None:
        self.length = 0
        self.state: Tensor | None = None
        self.seen: Tensor | None = None
        """(B,): how many tokens were no padding, where pooling divides by that."""

    @property
    def batch_size(self) -> int | None:
        return None if self.state is None else self.state.shape[0]

    def reorder(self, index: Tensor) -> None:
        """Let sequence i continue the past of sequence index[i]; the batch may become larger or smaller."""
        if self.state is not None:
            self.state = self.state.index_select(0, index.to(self.state.device))
        if self.seen is not None:
            self.seen = self.seen.index_select(0, index.to(self.seen.device))

    def snapshot(self) -> tuple[int, Tensor | None, Tensor | None]:
        return self.length, self.state, self.seen

    def restore(self, snapshot: tuple[int, Tensor | None, Tensor | None]) -> None:
        self.length, self.state, self.seen = snapshot


class ContextCache:
    """Keys and values of a context, for cross-attention: computed by the first call, read by all that follow."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        """(B, key and value heads, Tk, D)"""
        self.values: Tensor | None = None

    @property
    def length(self) -> int:
        """How many tokens the context has; 0 as long as there is none."""
        return 0 if self.keys is None else self.keys.shape[2]

    @property
    def batch_size(self) -> int | None:
        return None if self.keys is None else self.keys.shape[0]

    def reorder(self, index: Tensor) -> None:
        """Let sequence i attend to the context of sequence index[i]; the batch may become larger or smaller."""
        if self.keys is not None and self.values is not None:
            self.keys = self.keys.index_select(0, index.to(self.keys.device))
            self.values = self.values.index_select(0, index.to(self.values.device))

    def snapshot(self) -> tuple[Tensor | None, Tensor | None]:
        return self.keys, self.values

    def restore(self, snapshot: tuple[Tensor | None, Tensor | None]) -> None:
        self.keys, self.values = snapshot


class DecoderLayerCache(KeyValueCache):
    """Of one layer of a decoder: keys and values of the target so far, and those of the source."""

    def __init__(self) -> None:
        super().__init__()
        self.context = ContextCache()

    def reorder(self, index: Tensor) -> None:
        super().reorder(index)
        self.context.reorder(index)

    def restore(self, snapshot: int) -> None:
        super().restore(snapshot)
        if snapshot == 0:
            self.context = ContextCache()


LayerCache = KeyValueCache | FastWeightState


class DecodingCache:
    """One layer cache per layer of a Transformer; made by `Transformer.new_cache`."""

    def __init__(self, layers: list[LayerCache]) -> None:
        self.layers = layers
        self.compiled: Any = None
        """What `nn.decoding` has found out about the model that this cache is used with."""

    def __getstate__(self) -> dict[str, Any]:
        """Without addresses in this process, which mean nothing to a copy."""
        return {**self.__dict__, "compiled": None}

    @property
    def length(self) -> int:
        """How many tokens have been seen."""
        return self.layers[0].length if self.layers else 0


@contextmanager
def unchanged_on_error(caches: Sequence[LayerCache | ContextCache]) -> Iterator[None]:
    """Restore the caches if the pass inside the `with` fails half-way."""
    before: list[Any] = [cache.snapshot() for cache in caches]
    try:
        yield
    except BaseException:
        for cache, snapshot in zip(caches, before, strict=True):
            cache.restore(snapshot)
        raise
