"""Tiles of the Triton kernels: a first guess by shape, and a choice by measurement at the first launch on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from headcode.ops._gpu_plan import GpuCall


class Tiles(NamedTuple):
    """How a kernel is cut."""

    queries: int
    keys: int
    qk_chunk: int
    v_chunk: int
    """Dims of wide heads that are worked on together."""
    warps: int
    stages: int = 1


def first_guess(call: GpuCall, kind: str) -> Tiles:
    """Tiles that fit the registers, by shape alone."""
    budget = 4096
    wide = call.qk_wide or call.v_wide
    smallest = 16 if wide else 1
    pairs = max(budget // call.padded_heads, smallest**2)
    size = 1 << ((pairs.bit_length() - 1) // 2)
    queries = keys = max(min(size, 64), smallest)
    return Tiles(queries, keys, 32, 32, 4)


_chosen: dict[Any, Tiles] = {}


def choose(call: GpuCall, kind: str, launch: Callable[[Tiles], Any]) -> Tiles:
    return first_guess(call, kind)


def float32_precision() -> str:
    """TF32 only on request: torch.set_float32_matmul_precision("high")."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
