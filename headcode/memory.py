"""The alignment of tensors in memory, which decides the last bits of their products."""

from torch import Tensor

ALIGNMENT = 64
"""Bytes: torch's own tensors start at a multiple of it."""


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, copied if it starts where torch would not have put it.

    The CPU's matrix products take other paths, and round differently, for memory that is not aligned. NumPy and
    safetensors put their arrays wherever there is room, so that a run would not end with the same bits every time.
    """
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()
