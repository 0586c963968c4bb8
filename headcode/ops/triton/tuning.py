"""Tiles of the Triton kernels: a first guess by shape, and a choice by measurement at the first launch on a GPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from headcode.ops.triton import backend

if TYPE_CHECKING:
    from headcode.ops.triton.plan import TritonCall

logger = logging.getLogger("headcode")

SMALLEST_PRODUCT = 16
"""Matrix units multiply at least 16 deep."""
LONGEST_TILE = 64
SHORT_SIDE = 4
WARPS = 4
MOST_REGISTERS = 255
PAIRS = 2048
"""Numbers of a tile with all its heads: 16 for each thread of 4 warps."""
NARROW_CHUNK = 8
"""Dims whose sums are held in registers where heads are read one dim at a time."""


class Tiles(NamedTuple):
    """How a kernel is cut."""

    queries: int
    keys: int
    qk_chunk: int
    v_chunk: int
    """Dims of wide heads that are worked on together."""
    warps: int
    stages: int = 1
    registers: int | None = None
    """At most so many for a thread; without it the compiler may rather spill a few than lower the occupancy."""


def first_guess(call: TritonCall, kind: str) -> Tiles:
    """Tiles whose sums fit the registers, by shape alone; docs/gpu-kernels.md has what they compile to."""
    if call.qk_wide or call.v_wide:
        size = min(max(square_root(2 * PAIRS // call.padded_heads), SMALLEST_PRODUCT), LONGEST_TILE)
        most = SMALLEST_PRODUCT
        if kind in ("log_sums", "forward"):
            most = min(max(2048 // call.q.element_size() // call.padded_heads, SMALLEST_PRODUCT), LONGEST_TILE)
        chunks = (most if call.qk_wide else NARROW_CHUNK, most if call.v_wide else NARROW_CHUNK)
        return Tiles(size, size, *chunks, 4 * WARPS if call.padded_heads > SMALLEST_PRODUCT else 2 * WARPS)
    pairs = min(max(PAIRS // call.padded_heads, 1), LONGEST_TILE * SHORT_SIDE)
    if kind == "band":
        size = square_root(pairs)
        return Tiles(size, size, NARROW_CHUNK, NARROW_CHUNK, WARPS, registers=MOST_REGISTERS)
    # One dim at a time, a tile is summed over its keys (for k and v over its queries) across threads: a short side.
    short = min(SHORT_SIDE, square_root(pairs))
    queries, keys = (short, pairs // short) if kind == "key" else (pairs // short, short)
    registers = None if kind in ("log_sums", "forward") else MOST_REGISTERS
    return Tiles(queries, keys, NARROW_CHUNK, NARROW_CHUNK, WARPS, registers=registers)


def square_root(power: int) -> int:
    """The largest power of 2 whose square is not above a power of 2."""
    return 1 << ((power.bit_length() - 1) // 2)


def candidates(call: TritonCall, kind: str) -> list[Tiles]:
    """The first guess and its neighbours; few, because each is compiled."""
    guess = first_guess(call, kind)
    result = [guess, guess._replace(warps=guess.warps // 2), guess._replace(registers=None)]
    if kind == "band":
        return list(dict.fromkeys([*result, guess._replace(queries=guess.queries * 2, keys=guess.keys * 2)]))
    if call.qk_wide or call.v_wide:
        longer = [guess._replace(keys=guess.keys * 2), guess._replace(queries=guess.queries * 2)]
        return list(dict.fromkeys([*result, *longer]))
    size = square_root(guess.queries * guess.keys)
    return list(dict.fromkeys([*result, guess._replace(queries=size, keys=size)]))


_chosen: dict[Any, Tiles] = {}
MEASURING = ContextVar("MEASURING", default=True)
"""False where the first guess is to be taken: in the comparison with the reference, which is to be short."""


def choose(call: TritonCall, kind: str, launch: Callable[[Tiles], Any]) -> Tiles:
    """Measured once for each kind of call and process; a first guess where nothing can or may be measured.

    Other tiles add in another order, so that results differ in their last bits from one choice to the next. With
    torch.use_deterministic_algorithms(True), or HEADCODE_GPU_AUTOTUNE=0, the first guess is always taken.
    """
    if call.q.device.type != "cuda" or not may_measure():
        return first_guess(call, kind)
    key = (kind, *call.kind(), call.q.device.index)
    if key not in _chosen:
        if torch.cuda.is_current_stream_capturing():
            return first_guess(call, kind)
        _chosen[key] = fastest(candidates(call, kind), launch)
        logger.info("hyper_attention's %s kernel takes the tiles %s", kind, _chosen[key])
    return _chosen[key]


def may_measure() -> bool:
    switched_off = os.environ.get("HEADCODE_GPU_AUTOTUNE", "1") == "0"
    switched_off = switched_off or not MEASURING.get()
    return not (backend.INTERPRETED or switched_off or torch.are_deterministic_algorithms_enabled())


def fastest(
    tiles: Iterable[Tiles], launch: Callable[[Tiles], Any], measure: Callable[[Callable[[], Any]], float] | None = None
) -> Tiles:
    """The quickest of `tiles`, the first at a tie; those that do not fit the GPU or its assembler are passed over."""
    from triton.runtime.errors import OutOfResources, PTXASError

    tiles = list(tiles)
    times: dict[Tiles, float] = {}
    for candidate in tiles:
        try:
            times[candidate] = (measure or _measure)(lambda candidate=candidate: launch(candidate))  # type: ignore[misc]
        except (OutOfResources, PTXASError):
            continue
    return min(times, key=lambda candidate: times[candidate]) if times else tiles[0]


def _measure(run: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return do_bench(run, warmup=5, rep=20)


def float32_precision() -> str:
    """TF32 only on request, by any of torch's switches for its own products.

    The older of them, torch.set_float32_matmul_precision, cannot be asked once the newer one has been used.
    """
    wanted = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if wanted is None:  # torch 2.8 has the older one alone
        return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return "tf32" if wanted == "tf32" else "ieee"
