"""A random order of very many things, place by place: which thing comes n-th is computed, not looked up.

A Feistel network permutes the numbers below the next power of four; what falls outside 0..count-1 is sent through again
until it lands inside. No table is made, so an epoch of a billion windows costs no memory, and a run that resumes in the
middle of an epoch simply goes on counting.

>>> sorted(shuffled(np.arange(10), 10, key=7).tolist()) == list(range(10))
True
"""

import hashlib

import numpy as np

ROUNDS = 8


def shuffled(places: np.ndarray, count: int, key: int) -> np.ndarray:
    """Which of `count` things stands at each place, int64; for every key another order of 0..count-1."""
    half = max((max(count - 1, 1).bit_length() + 1) // 2, 1)
    shift, mask = np.uint64(half), np.uint64(2**half - 1)
    seeds = _mixed(np.arange(1, ROUNDS + 1, dtype=np.uint64) + np.uint64(key % 2**64))
    found = np.asarray(places).astype(np.uint64)
    outside = np.ones(found.shape, dtype=bool)
    while outside.any():
        left, right = found[outside] >> shift, found[outside] & mask
        for seed in seeds:
            left, right = right, left ^ (_mixed(right ^ seed) & mask)
        found[outside] = left << shift | right
        outside = found >= count
    return found.astype(np.int64)


def key_of(*address: str | int) -> int:
    """64 bits that belong to an address, such as (seed, "epoch", 3)."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, address)).encode(), digest_size=8).digest(), "little")


def _mixed(words: np.ndarray) -> np.ndarray:
    """Every bit of each 64-bit word spread over all of them: multiply and fold, twice (a bijection)."""
    words = (words ^ words >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
    words = (words ^ words >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
    return words ^ words >> np.uint64(32)
