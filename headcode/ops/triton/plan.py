"""From a call to launches: arguments, compile-time constants, tiles, scratch memory.

Kept apart from the kernels so that ahead-of-time compilation (`headcode bench kernels`) sees what a launch would pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headcode.ops import dropout as dropout_hash
from headcode.ops.options import AttentionInputs, AttentionOptions
from headcode.ops.registry import RMS_EPSILON
from headcode.ops.triton import tuning
from headcode.ops.triton.tuning import SMALLEST_PRODUCT, Tiles

WIDE_FROM = SMALLEST_PRODUCT
"""Narrower heads go one dim at a time, without padding."""
MOST_HEADS_WIDE = 32
"""With 64 heads the smallest tile for matrix units, 16×16 pairs, takes more shared memory than an A100 has."""
PACK_FROM_LENGTH = 128
"""From this length on, inputs that are read one dim at a time are copied with their lengths innermost first, so that
neighbouring threads read neighbouring numbers. For shorter ones the copies would cost more than the reads; a guess."""
BAND_PROGRAMS = 1024
"""About how many programs share the band's gradient; more take more memory for parts."""


class Launch(NamedTuple):
    """One kernel, ready to start."""

    kernel: str
    programs: int
    arguments: dict[str, Any]
    constants: dict[str, Any]
    tiles: Tiles


class TritonCall:
    """One call of the op in the kernels' terms."""

    def __init__(self, inputs: AttentionInputs, options: AttentionOptions, saved: Tensor) -> None:
        q, k, v, mask, _, band, _ = inputs
        self.mask = None if mask is None else mask.view(torch.uint8)
        self.band = None if band is None else band.contiguous()
        self.options, self.saved = options, saved
        self.delta = saved
        self.batch, self.heads, self.queries, self.qk_width = q.shape
        self.keys, self.v_width = k.shape[2], v.shape[3]
        self.precision = tuning.float32_precision()
        # Float32 in full precision is not for matrix units; tiles of more heads do not fit beside them.
        on_matrix_units = (q.dtype != torch.float32 or self.precision != "ieee") and self.heads <= MOST_HEADS_WIDE
        self.qk_wide, self.v_wide = (on_matrix_units and w >= WIDE_FROM for w in (self.qk_width, self.v_width))
        self.q, self.k = self.laid_out(q, self.qk_wide), self.laid_out(k, self.qk_wide)
        self.v = self.laid_out(v, self.v_wide)
        self.grad = self.v
        mixes_wide = self.v_wide and options.value_net != "linear"
        self.padded_heads = max(power_of_2(self.heads), SMALLEST_PRODUCT if mixes_wide else 1)

    def laid_out(self, t: Tensor, wide: bool) -> Tensor:
        """`t` (B, H, T, D) with the strides that the kernels read best; any are right."""
        if wide:
            return t if t.stride(3) == 1 else t.contiguous()
        if max(self.queries, self.keys) < PACK_FROM_LENGTH:
            return t
        return t.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)

    def kind(self) -> tuple[Any, ...]:
        """What tiles may depend on; lengths and batch only by their order of magnitude."""
        sizes = tuple(power_of_2(size) for size in (self.batch, self.queries, self.keys))
        flags = (self.mask is None, self.band is None, self.options.causal, self.options.dropout > 0)
        names = (self.options.norm, self.options.value_net, self.q.dtype, self.precision)
        return (*sizes, self.heads, self.qk_width, self.v_width, *flags, *names)

    def outputs(self, kind: str) -> dict[str, Tensor]:
        """Tensors shaped like what a kernel writes, for compilation without a launch."""
        like = {"forward": {"out": self.v}, "query": {"grad_q": self.q}, "key": {"grad_k": self.k, "grad_v": self.v}}
        return like.get(kind, {})

    def run(self, kind: str, **outputs: Tensor) -> None:
        """Choose tiles, launch, and bring float32 sums that did not fit on the chip to the outputs."""
        tiles = tuning.choose(self, kind, lambda candidate: self._start(kind, candidate, outputs))
        for name, scratch in self._start(kind, tiles, outputs).items():
            outputs[name].copy_(scratch)

    def _start(self, kind: str, tiles: Tiles, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        targets, scratch = self.targets(tiles, outputs)
        start(self.plan(kind, tiles, targets), self.q)
        return scratch

    def targets(self, tiles: Tiles, outputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Where the kernel writes: the outputs, or zeroed float32 in their place where it adds chunk by chunk."""
        scratch = {}
        for name, output in outputs.items():
            limit = tiles.v_chunk if name in ("out", "grad_v") else tiles.qk_chunk
            if limit < output.shape[3]:
                scratch[name] = torch.zeros(output.shape, dtype=torch.float32, device=output.device)
        return {**outputs, **scratch}, scratch

    def band_gradient(self) -> Tensor:
        """(H, Tq+Tk-1), float32."""
        tiles = tuning.choose(self, "band", lambda candidate: self._band_parts(candidate))
        return sum_band(self._band_parts(tiles), self.queries, self.keys)

    def _band_parts(self, tiles: Tiles) -> Tensor:
        launch, parts = self.plan_band(tiles)
        start(launch, self.q)
        return parts

    def plan_band(self, tiles: Tiles) -> tuple[Launch, Tensor]:
        size = tiles.queries
        diagonals = -(-self.queries // size) - (-self.keys // size) - 1
        batch_step = max(1, self.batch * diagonals // BAND_PROGRAMS)
        groups = -(-self.batch // batch_step)
        parts = self.q.new_empty(groups, diagonals, self.heads, size, size, dtype=torch.float32)
        launch = self.plan("band", tiles, {"parts": parts})
        launch.arguments.update(num_batch=self.batch, batch_step=batch_step)
        return launch._replace(programs=groups * diagonals), parts

    def plan(self, kind: str, tiles: Tiles, targets: dict[str, Tensor]) -> Launch:
        """The launch of kernel `kind`: log_sums, forward, delta, query, key or band."""
        named = {"q": self.q, "k": self.k}
        if kind != "log_sums":
            named["v"] = self.v
        if kind not in ("log_sums", "forward"):
            named["grad"] = self.grad
        if kind == "delta":
            targets = {"grad_q": self.delta}
        arguments: dict[str, Any] = {**named, **targets}
        for name, tensor in arguments.copy().items():
            if name == "parts":
                continue
            strides = tensor.stride() if tensor.dim() == 4 else (0, 0, 0, 1)
            axes = ("b", "h", "t", "d") if name in named else ("b", "h", "t")
            arguments.update((f"{name}_{axis}", stride) for axis, stride in zip(axes, strides, strict=False))
        # Pointers that a variant does not use must still be pointers.
        mask_strides = (0, 0, 0, 0) if self.mask is None else broadcast_strides(self.mask)
        arguments.update(
            mask=self.q if self.mask is None else self.mask,
            mask_b=mask_strides[0],
            mask_q=mask_strides[2],
            mask_k=mask_strides[3],
            band=self.q if self.band is None else self.band,
            band_h=0 if self.band is None else self.band.stride(0),
            log_sums=self.saved,
            num_queries=self.queries,
            num_keys=self.keys,
            query_offset=self.options.query_offset,
            scale=self.options.scale,
        )
        constants: dict[str, Any] = {
            "H": self.heads,
            "HP": self.padded_heads,
            "D": self.qk_width,
            "DC": min(power_of_2(self.qk_width), tiles.qk_chunk),
            "CAUSAL": self.options.causal,
            "MASKED": self.mask is not None,
            "BAND": self.band is not None,
            "QK_WIDE": self.qk_wide,
            "PRECISION": self.precision,
            "BQ": tiles.queries,
            "BK": tiles.keys,
        }
        if kind != "log_sums":
            dropout = self.options.dropout
            arguments.update(
                stream=signed(dropout_hash.stream_number(self.options.dropout_seed)) if dropout > 0 else 0,
                threshold=signed(dropout_hash.threshold(dropout)) if dropout > 0 else 0,
                keep_scale=1 / (1 - dropout),
            )
            constants.update(
                DV=self.v_width,
                DVC=min(power_of_2(self.v_width), tiles.v_chunk),
                NORM=self.options.norm,
                NET=self.options.value_net,
                DROPOUT=dropout > 0,
                V_WIDE=self.v_wide,
                RMS_EPSILON=RMS_EPSILON,
            )
        if kind not in ("log_sums", "forward"):
            arguments["delta"] = self.delta
        if kind in ("query", "delta"):
            constants["TO_CODES"] = kind == "delta"
        if kind == "band":
            del constants["BAND"]
        length, size = (self.keys, tiles.keys) if kind == "key" else (self.queries, tiles.queries)
        return Launch(KERNELS[kind], self.batch * -(-length // size), arguments, constants, tiles)


KERNELS = {
    "log_sums": "log_sums_kernel",
    "forward": "forward_kernel",
    "delta": "query_kernel",
    "query": "query_kernel",
    "key": "key_kernel",
    "band": "band_kernel",
}


def start(launch: Launch, like: Tensor) -> None:
    """Launch on the device and current stream of `like`; under the interpreter, run."""
    kernel: Callable[..., Any] = load_kernel(launch.kernel)
    device = torch.cuda.device(like.device) if like.device.type == "cuda" else contextlib.nullcontext()
    with device:
        kernel[(launch.programs,)](  # type: ignore[index]
            **launch.arguments, **launch.constants, **compile_options(launch.tiles)
        )


def compile_options(tiles: Tiles) -> dict[str, Any]:
    registers = {} if tiles.registers is None else {"maxnreg": tiles.registers}
    return {"num_warps": tiles.warps, "num_stages": tiles.stages, **registers}


def load_kernel(name: str) -> Any:
    from headcode.ops.triton import kernels

    return getattr(kernels, name)


def sum_band(parts: Tensor, queries: int, keys: int) -> Tensor:
    """Sums along diagonals of `band_kernel`'s tiles (groups, diagonals, H, size, size): (H, Tq+Tk-1)."""
    from headcode.ops.chunked import dense_to_band

    _, diagonals, heads, size, _ = parts.shape
    lines = dense_to_band(parts.sum(0).transpose(0, 1).reshape(-1, size, size)).view(heads, diagonals, 2 * size - 1)
    # Neighbouring diagonals of tiles overlap by all but one of their distances.
    total = parts.new_zeros(heads, diagonals + 1, size)
    total[:, :-1] += lines[:, :, :size]
    total[:, 1:, : size - 1] += lines[:, :, size:]
    first = -(-queries // size) * size - queries
    return total.flatten(1)[:, first : first + queries + keys - 1]


def broadcast_strides(t: Tensor) -> tuple[int, ...]:
    return tuple(0 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True))


def power_of_2(number: int) -> int:
    """The smallest power of 2 that is not below `number`."""
    return 1 << (number - 1).bit_length()


def signed(word: int) -> int:
    """An unsigned 32-bit word as the signed one with the same bits: a launch then always passes 32 bits."""
    return word - 2**32 if word >= 2**31 else word
