"""Philox4x32-10 and unbiased small integers, each written once and used by both paths.

`philox` and `scale` are plain arithmetic without branches, so the same source runs on Numba scalars and on whole NumPy
arrays; only the loop around it differs. All arithmetic is in uint64 with 32-bit operands: nothing ever overflows, so
both paths give the same bits and no warning.
"""

import numpy as np

from headcode.jit import njit, numba_enabled

# Constants of Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (2011).
MULTIPLIER_0 = np.uint64(0xD2511F53)
MULTIPLIER_1 = np.uint64(0xCD9E8D57)
WEYL_0 = np.uint64(0x9E3779B9)
WEYL_1 = np.uint64(0xBB67AE85)
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
COMPILED = numba_enabled()


@njit()
def philox(c0, c1, c2, c3, k0, k1):  # type: ignore[no-untyped-def]
    """Four 32-bit words for one 128-bit counter under one 64-bit key; all arguments are uint64 below 2**32."""
    for _ in range(10):
        product_0 = MULTIPLIER_0 * c0
        product_1 = MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (product_1 >> HALF) ^ c1 ^ k0, product_1 & LOW, (product_0 >> HALF) ^ c3 ^ k1, product_0 & LOW
        k0 = (k0 + WEYL_0) & LOW
        k1 = (k1 + WEYL_1) & LOW
    return c0, c1, c2, c3


@njit()
def scale(low, high, bound):  # type: ignore[no-untyped-def]
    """floor(word * bound / 2**64) for the 64-bit word (high, low) and a bound below 2**32."""
    return (((low * bound) >> HALF) + high * bound) >> HALF


@njit()
def _fill_words_loop(words, numbers, tag, k0, k1):  # type: ignore[no-untyped-def]
    for n in range(words.shape[0]):
        number = numbers[n]
        for block in range(words.shape[1] // 4):
            a, b, c, d = philox(np.uint64(block), number & LOW, number >> HALF, tag, k0, k1)
            words[n, 4 * block] = a
            words[n, 4 * block + 1] = b
            words[n, 4 * block + 2] = c
            words[n, 4 * block + 3] = d


@njit()
def _fill_bounded_loop(integers, words, bounds):  # type: ignore[no-untyped-def]
    for n in range(integers.shape[0]):
        for draw in range(integers.shape[1]):
            low, high = np.uint64(words[n, 2 * draw]), np.uint64(words[n, 2 * draw + 1])
            integers[n, draw] = scale(low, high, bounds[draw])


def fill_words(words: np.ndarray, numbers: np.ndarray, tag: np.uint64, k0: np.uint64, k1: np.uint64) -> None:
    """words (N, 4·blocks) uint32: block b of row n is Philox at the counter (b, numbers[n], tag)."""
    if COMPILED:
        _fill_words_loop(words, numbers, tag, k0, k1)
        return
    blocks = np.arange(words.shape[1] // 4, dtype=np.uint64)[None, :]
    number = numbers[:, None]
    for lane, values in enumerate(philox(blocks, number & LOW, number >> HALF, tag, k0, k1)):
        words[:, lane::4] = values


def fill_bounded(integers: np.ndarray, words: np.ndarray, bounds: np.ndarray) -> None:
    """integers (N, draws) int64: draw d of row n is below bounds[d] and uses the words 2d and 2d+1 of that row."""
    if COMPILED:
        _fill_bounded_loop(integers, words, bounds)
        return
    wide = words.astype(np.uint64)
    draws = integers.shape[1]
    integers[...] = scale(wide[:, 0 : 2 * draws : 2], wide[:, 1 : 2 * draws : 2], bounds[None, :])
