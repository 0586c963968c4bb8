"""Attention dropout as a hash of (seed, query, key): the same mask on every backend, and nothing stored for it.

With `mix` a 32-bit finaliser (all arithmetic modulo 2**32) and query positions counted as `causal` counts them:

    stream = mix(low word of seed + mix(high word of seed + 0x9E3779B9))
    row    = mix(stream + position * 0x9E3779B1)
    hash   = mix(row + key * 0x85EBCA77)
    keep   = hash >= dropout * 2**32

Kernels in other languages repeat these four lines; tests hold them to this file.
"""

from typing import Any

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
SEED_INCREMENT = 0x9E3779B9
QUERY_FACTOR = 0x9E3779B1
KEY_FACTOR = 0x85EBCA77
MIX_FACTORS = (0x7FEB352D, 0x846CA68B)


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words (held in int64) whose every output bit depends on every input bit."""
    x = ((x ^ (x >> 16)) * MIX_FACTORS[0]) & MASK32
    x = ((x ^ (x >> 15)) * MIX_FACTORS[1]) & MASK32
    return x ^ (x >> 16)


def threshold(dropout: float) -> int:
    """The smallest hash that is kept."""
    return min(round(dropout * 2**32), MASK32)


def stream(seed: int, device: torch.device | None = None) -> Tensor:
    """The 32-bit stream number of a 63-bit seed, as an int64 scalar tensor."""
    word = torch.full((), seed, dtype=torch.int64, device=device)
    return mix(((word & MASK32) + mix(((word >> 32) + SEED_INCREMENT) & MASK32)) & MASK32)


def stream_number(seed: int) -> int:
    """`stream` in plain integers: its tensor form is for torch.compile, and slow."""
    inner: Any = mix(((seed >> 32) + SEED_INCREMENT) & MASK32)  # type: ignore[arg-type]
    return int(mix(((seed & MASK32) + inner) & MASK32))


def keep_mask(
    dropout: float, seed: int, num_queries: int, num_keys: int, query_offset: int, device: torch.device | None = None
) -> Tensor:
    """The boolean (Tq, Tk) mask of pairs that are kept; query i stands at position `query_offset + i`."""
    return _keep_mask(dropout, seed, num_queries, num_keys, query_offset, device=device or torch.device("cpu"))


# An op of its own: torch.compile would inline the hash, whose every step reads the one before twice, to thousands of
# operations and minutes of compilation.
@torch.library.custom_op("headcode::dropout_keep_mask", mutates_args=())
def _keep_mask(
    dropout: float, seed: int, num_queries: int, num_keys: int, query_offset: int, *, device: torch.device
) -> Tensor:
    positions = torch.arange(num_queries, device=device) + query_offset
    keys = torch.arange(num_keys, device=device)
    rows = mix((stream(seed, device) + positions * QUERY_FACTOR) & MASK32)
    return mix((rows[:, None] + keys * KEY_FACTOR) & MASK32) >= threshold(dropout)


@_keep_mask.register_fake
def _(dropout: float, seed: int, num_queries: int, num_keys: int, query_offset: int, *, device: torch.device) -> Tensor:
    return torch.empty(num_queries, num_keys, dtype=torch.bool, device=device)
