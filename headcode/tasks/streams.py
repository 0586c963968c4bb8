"""Random streams that are addresses: every draw is a pure function of (seed, task, version, stream, instance, draw).

The generator is Philox4x32-10, a counter-based one: a keyed bijection of 128-bit counters. Our addresses fill it so:

    key      the seed, 64 bits
    counter  word 0: block of four 32-bit words inside the instance
             words 1 and 2: the instance number, 64 bits
             word 3: task (8 bits), version of its generator (8 bits), stream (16 bits)

A split is a stream. Two splits, two instances or two draws therefore never use the same counter under one seed: the
streams are disjoint by construction, not by luck. Nothing is carried from draw to draw, so instances can be made in any
order, in any batch and by any worker.

An integer below n is floor(word · n / 2**64) of a 64-bit word: each of the n values has probability 1/n to within
2**-64. A uniform float32 is the top 24 bits of a 32-bit word times 2**-24: exact, in [0, 1).

>>> stream = Stream(seed=0, task=255, version=0, name="train")
>>> stream.integers([5], [6, 6, 6]).tolist()                        # three dice of instance 5
[[0, 5, 4]]
>>> stream.integers([4, 5], [6, 6, 6])[1].tolist()                  # the same, whoever stands beside it
[0, 5, 4]
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

STREAMS = {
    "train": 1,
    "iid": 2,
    "compositional": 3,
    "novel": 4,
    "parts": 5,
    "split": 6,
    "fixed": 7,
    "variants": 8,
    "longer": 9,
}
MAX_ID = 2**8 - 1
MAX_BOUND = 2**32 - 1
MAX_SEED = 2**64 - 1
MAX_INSTANCE = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Stream:
    """One stream of random words, addressed by instance number."""

    seed: int
    task: int
    version: int
    name: str

    def __post_init__(self) -> None:
        if not (0 <= self.task <= MAX_ID and 0 <= self.version <= MAX_ID):
            raise ValueError(f"task_id and version must lie in 0..{MAX_ID}, got {self.task} and {self.version}.")

    def words(self, numbers: np.ndarray | Sequence[int], count: int) -> np.ndarray:
        """The first `count` 32-bit words of each of the numbered instances, (len(numbers), count) uint32."""
        from headcode.tasks import _stream_kernels as kernels

        numbers = np.ascontiguousarray(numbers, dtype=np.uint64)
        tag = np.uint64(self.task | self.version << 8 | STREAMS[self.name] << 16)
        words = np.empty((len(numbers), (count + 3) // 4 * 4), dtype=np.uint32)
        kernels.fill_words(words, numbers, tag, np.uint64(self.seed & 0xFFFFFFFF), np.uint64(self.seed >> 32))
        return words[:, :count]

    def integers(self, numbers: np.ndarray | Sequence[int], bounds: np.ndarray | Sequence[int]) -> np.ndarray:
        """One integer below each bound for each of the numbered instances, (len(numbers), len(bounds)) int64."""
        return bounded(self.words(numbers, 2 * len(bounds)), bounds)

    def order(self, number: int, count: int) -> np.ndarray:
        """A uniformly random order of `count` things: they are sorted by one 64-bit word each."""
        words = self.words([number], 2 * count)[0].astype(np.uint64)
        return np.argsort(words[0::2] << np.uint64(32) | words[1::2], kind="stable")


def bounded(words: np.ndarray, bounds: np.ndarray | Sequence[int]) -> np.ndarray:
    """Integers below `bounds` (each below 2**32) from pairs of words: (N, 2·draws) uint32 -> (N, draws) int64."""
    from headcode.tasks import _stream_kernels as kernels

    limits = np.asarray(bounds, dtype=np.int64)
    if limits.min() < 1 or limits.max() > MAX_BOUND:
        raise ValueError(f"Every bound of a random integer must lie in 1..2**32-1, got {limits.tolist()}.")
    integers = np.empty((len(words), len(bounds)), dtype=np.int64)
    kernels.fill_bounded(integers, words, limits.astype(np.uint64))
    return integers


def unit_floats(words: np.ndarray) -> np.ndarray:
    """Uniform float32 in [0, 1) with 24 bits each; 1 - x is exact too, so negation loses nothing."""
    return (words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
