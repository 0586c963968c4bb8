"""Kernel launches that are planned once: what they do depends on shapes, and only addresses differ from call to call.

A kernel reads what it is to do from a record of 64-bit words. To write such records by hand for every launch of every
step takes Python longer than some kernels run. A `Program` holds the records of many launches with their addresses left
open, as `Place`s in areas of memory; a call tells where the areas are and binds all of them at once.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headcode.ops.cpu.team import run_native_in_team

ITSELF = 0
"""The area of a program's own words."""
UNIT = 16
"""Numbers that a section's start is a multiple of: a line of the cache."""


class Place(NamedTuple):
    """An address that is known when a program is bound: so many bytes from the start of an area."""

    area: int
    offset: int


Word = int | float | Place


class Section(NamedTuple):
    """A float32 tensor to be, in an area."""

    area: int
    start: int
    """In numbers, as the strides."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def data_ptr(self) -> Place:
        return Place(self.area, 4 * self.start)

    def stride(self) -> tuple[int, ...]:
        return self.strides

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def of(self, memory: Tensor) -> Tensor:
        """This section of an area's memory, which may itself be part of another tensor's."""
        return memory.as_strided(self.shape, self.strides, memory.storage_offset() + self.start)

    def split(self, lengths: tuple[int, ...]) -> list["Section"]:
        """Parts of these lengths, along the first axis."""
        starts = [self.start + sum(lengths[:i]) * self.strides[0] for i in range(len(lengths))]
        return [self._replace(start=s, shape=(n, *self.shape[1:])) for s, n in zip(starts, lengths, strict=True)]

    def by_head(self, num_heads: int, first: int, width: int) -> "Section":
        """`width` columns of (B, T, …), from the first one on, as (B, H, T, D)."""
        batch, length, row = self.shape
        head = width // num_heads
        return Section(
            self.area, self.start + first, (batch, num_heads, length, head), (length * row, head, row, 1)
        )  # fmt: skip


def contiguous(area: int, start: int, shape: tuple[int, ...]) -> Section:
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return Section(area, start, shape, tuple(strides))


class Area:
    """Float32 memory that a call provides; sections are taken from it one after the other."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._taken = 0

    @property
    def size(self) -> int:
        """Numbers that the memory must have. Kernels read whole vectors, also where a section ends within one."""
        return self._taken + UNIT

    def take(self, *shape: int) -> Section:
        start = self._taken
        self._taken += -(-math.prod(shape) // UNIT) * UNIT
        return contiguous(self.number, start, shape)


class _Launch(NamedTuple):
    kernel: int
    """Its address."""
    place: int
    """Where its record starts, in bytes."""
    num_tasks: int


class Program:
    """Launches by name, with records whose addresses are open."""

    def __init__(self) -> None:
        self.launches: dict[str, _Launch] = {}
        self._words: list[int] = []
        self._open: list[tuple[int, int, int]] = []
        """Position, area and offset of each word that is an address."""
        self._template: np.ndarray | None = None

    def launch(self, name: str, kernel: int, record: Sequence[Word], num_tasks: int) -> None:
        self.launches[name] = _Launch(kernel, self._append(record), num_tasks)

    def table(self, words: Sequence[Word]) -> Place:
        """Put words beside the records; a record can tell a kernel where they are."""
        return Place(ITSELF, self._append(words))

    def _append(self, words: Sequence[Word]) -> int:
        first = len(self._words)
        for position, word in enumerate(words, first):
            if isinstance(word, Place):
                self._open.append((position, word.area, word.offset))
                word = 0
            self._words.append(int(np.float64(word).view(np.int64)) if isinstance(word, float) else int(word))
        return 8 * first

    def bind(self, starts: Sequence[int]) -> "BoundProgram":
        """The launches of one call, whose areas 1, 2, … start at these addresses."""
        if self._template is None:
            self._positions, self._areas, self._offsets = np.array(self._open, np.int64).reshape(-1, 3).T.copy()
            self._template = np.array(self._words, np.int64)
        words = self._template.copy()
        itself = words.__array_interface__["data"][0]
        words[self._positions] = np.array((itself, *starts), np.int64)[self._areas] + self._offsets
        return BoundProgram(self.launches, words, itself)


class BoundProgram:
    """A program with its addresses, to be run once: kernels count their tasks in their records."""

    def __init__(self, launches: dict[str, _Launch], words: np.ndarray, start: int) -> None:
        self._launches, self._words, self._start = launches, words, start
        self._num_threads = torch.get_num_threads()

    def run(self, name: str) -> None:
        kernel, place, num_tasks = self._launches[name]
        run_native_in_team(kernel, self._start + place, min(self._num_threads, num_tasks))
