"""Launches of kernels, planned once: what they do depends on shapes, and only addresses differ from call to call.

A kernel reads what it is to do from a record (`records`). Writing records anew for every launch of every step would
take Python longer than some kernels run. A `Program` holds the records of a call's launches with their addresses left
open: each is a `Section` of some named memory. `Program.bind` is told the tensors of one call and fills all of them in
at once; `BoundProgram.run` then runs a launch, by its name, on torch's threads.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headcode.ops.cpu import records
from headcode.ops.cpu.library import KernelName, address, compile_beside
from headcode.ops.cpu.team import run_native_in_team

UNIT = 16
"""Numbers that a section's start is a multiple of: a line of the cache, in float32."""
PIECE = 2**13
"""Numbers that one task of a sum adds up."""


class Section(NamedTuple):
    """A tensor to be: a view of the memory that has this name when the program is bound."""

    memory: str
    start: int
    """In numbers, as the strides."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def of(self, memory: Tensor) -> Tensor:
        """This section of its memory, which may itself be part of another tensor's."""
        return memory.as_strided(self.shape, self.strides, memory.storage_offset() + self.start)

    def split(self, *lengths: int) -> list["Section"]:
        """Parts of these lengths, along the first axis."""
        starts = [self.start + sum(lengths[:i]) * self.strides[0] for i in range(len(lengths))]
        return [self._replace(start=s, shape=(n, *self.shape[1:])) for s, n in zip(starts, lengths, strict=True)]

    def by_head(self, num_heads: int, first: int, width: int) -> "Section":
        """`width` columns of (B, T, …), from the first one on, as (B, H, T, D)."""
        batch, length, row = self.shape
        head = width // num_heads
        shape, strides = (batch, num_heads, length, head), (length * row, head, row, 1)
        return self._replace(start=self.start + first, shape=shape, strides=strides)


def contiguous(memory: str, start: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Section:
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return Section(memory, start, shape, tuple(strides), dtype)


def whole(memory: str, tensor: Tensor) -> Section:
    """All of a tensor that is bound under this name; later calls may bind others of its shape and strides."""
    return Section(memory, 0, tuple(tensor.shape), tensor.stride(), tensor.dtype)


class Area:
    """Memory that a call allocates; sections are taken from it one after the other."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        self.name, self.dtype = name, dtype
        self._taken = 0

    @property
    def size(self) -> int:
        """Numbers that the memory must have. Kernels read whole vectors, also where a section ends within one."""
        return self._taken + UNIT

    def take(self, *shape: int) -> Section:
        start = self._taken
        self._taken += -(-math.prod(shape) // UNIT) * UNIT
        return contiguous(self.name, start, shape, self.dtype)


class Value(NamedTuple):
    """A number that is known only when a program is bound, such as the stream of a dropout."""

    name: str


Word = int | float | Section | Value


def record(dtype: np.dtype, **fields: Word) -> list[Word]:
    """The words of a record, 0 where nothing is given. A section is its address, and its strides where those fit."""
    words: list[Word] = []
    for name in dtype.names or ():
        word = fields.pop(name, 0)
        strides = dtype[name].names is not None
        words += [word, *(word.strides if isinstance(word, Section) else (0,) * 4)] if strides else [word]
    if fields:
        raise KeyError(f"The record has no field {', '.join(fields)}.")
    return words


class _Launch(NamedTuple):
    kernel: KernelName
    offset: int
    """Of its record among the program's words, in bytes."""
    num_tasks: int


class Program:
    """Launches by name, with records whose addresses are open."""

    def __init__(self) -> None:
        self.launches: dict[str, _Launch] = {}
        self._words: list[int] = []
        self._open: list[tuple[int, str, int]] = []
        """Position of each open word, the name of its memory or value, and what is to be added, in bytes."""

    def launch(self, name: str, kernel: KernelName, words: Sequence[Word], num_tasks: int) -> None:
        """Plan a launch. `words` are those of `record`; the number of tasks goes into the record as well."""
        self.launches[name] = _Launch(kernel, 8 * len(self._words), num_tasks)
        for position, word in enumerate((0, num_tasks, *words[2:]), len(self._words)):
            if isinstance(word, Section):
                self._open.append((position, word.memory, word.start * word.dtype.itemsize))
                word = 0
            elif isinstance(word, Value):
                self._open.append((position, word.name, 0))
                word = 0
            self._words.append(int(np.float64(word).view(np.int64)) if isinstance(word, float) else int(word))

    def launch_sum(self, name: str, parts: Section, total: Section) -> None:
        """Plan a sum over the first axis of `parts`, always in the same order."""
        num_parts, size = parts.shape[0], math.prod(parts.shape[1:])
        words = record(records.SUM, parts=parts, total=total, num_parts=num_parts, size=size, piece=PIECE)
        self.launch(name, KernelName("gemm", "SUM_KERNELS", parts.dtype == torch.float64), words, -(-size // PIECE))

    def bind(self, memory: Mapping[str, Tensor], **values: int) -> "BoundProgram":
        """The launches of one call, with this memory and these values."""
        template, positions, names, indices, offsets = self._compiled
        words = template.copy()
        known = [values[name] if name in values else memory[name].data_ptr() for name in names]
        words[positions] = np.array(known, np.int64)[indices] + offsets
        return BoundProgram(self, words, memory)

    @functools.cached_property
    def addresses(self) -> dict[str, int]:
        """Of the launches' kernels, compiled when they are first asked for."""
        return {name: address(launch.kernel) for name, launch in self.launches.items()}

    def compile_beside(self) -> None:
        """This program will be needed soon: have another process compile what it lacks."""
        compile_beside(launch.kernel for launch in self.launches.values())

    @functools.cached_property
    def _compiled(self) -> tuple[np.ndarray, np.ndarray, list[str], np.ndarray, np.ndarray]:
        names = list(dict.fromkeys(name for _, name, _ in self._open))
        places = [(position, names.index(name), offset) for position, name, offset in self._open]
        positions, indices, offsets = np.array(places, np.int64).reshape(-1, 3).T.copy()
        return np.array(self._words, np.int64), positions, names, indices, offsets


class BoundProgram:
    """A program with its addresses, to be run once: kernels count their tasks in their records."""

    def __init__(self, program: Program, words: np.ndarray, memory: Mapping[str, Tensor]) -> None:
        self._program, self._words, self._memory = program, words, memory
        self._start: int = words.__array_interface__["data"][0]
        self._num_threads = torch.get_num_threads()

    def run(self, name: str) -> None:
        _, offset, num_tasks = self._program.launches[name]
        kernel = self._program.addresses[name]
        run_native_in_team(kernel, self._start + offset, min(self._num_threads, num_tasks))

    def view(self, section: Section) -> Tensor:
        return section.of(self._memory[section.memory])
