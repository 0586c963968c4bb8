"""What the op costs in arithmetic and memory, and what a GPU could reach at best: the roofline of the Triton kernels.

Counted as the kernels compute, recomputation included, so that a time can be judged. One multiplication with its
addition is two operations.
"""

from typing import NamedTuple

from headcode.ops import METHODS

BYTES = {"float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2}


class Device(NamedTuple):
    """Peak rates from the vendor's data sheets: operations and bytes per second."""

    name: str
    float32: float
    tf32: float
    half: float
    bandwidth: float


DEVICES = {
    "A100": Device("A100 SXM 80 GB", 19.5e12, 156e12, 312e12, 2.04e12),
    "H100": Device("H100 SXM", 67e12, 494e12, 989e12, 3.35e12),
}


class Work(NamedTuple):
    """Operations, and bytes that must cross the memory bus at least once."""

    operations: float
    bytes: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.operations / self.bytes


def work(
    method: str, batch: int, heads: int, length: int, width: int, dtype: str, backward: bool = True, band: bool = False
) -> Work:
    """Forward, or forward plus backward, of one call without masks."""
    norm, value_net, _ = METHODS[method]
    softmax, deep = norm == "softmax", value_net != "linear"
    # In products of length `width` for each pair and head.
    forward = 1 + (2 if deep else 1) + softmax
    # Scores again, and the gradient of the codes: g·v, or m, ∂u, g·u and ∂m·v.
    recomputed = 1 + (4 if deep else 1)
    passes = {"query": recomputed + 1, "key": recomputed + 2}
    if softmax and deep:
        passes["delta"] = recomputed
    if band:
        passes["band"] = recomputed
    products = forward + (sum(passes.values()) if backward else 0)
    pairs = batch * length**2
    tokens = batch * length * heads * width * BYTES[dtype]
    # q, k, v and the output; then each pass reads q, k, v and the output's gradient and writes what it is for.
    streams = 4 + (sum({"query": 5, "key": 6}.get(name, 4) for name in passes) if backward else 0)
    return Work(2.0 * products * pairs * heads * width, float(streams * tokens))


def best_seconds(task: Work, device: Device, dtype: str, width: int) -> tuple[float, str]:
    """The roofline: no kernel is faster; and what sets it. Narrow heads and full float32 are off the matrix units."""
    wide = width >= 16
    peak = device.float32
    if wide and dtype == "tf32":
        peak = device.tf32
    elif wide and dtype != "float32":
        peak = device.half
    arithmetic, memory = task.operations / peak, task.bytes / device.bandwidth
    return (arithmetic, "arithmetic") if arithmetic >= memory else (memory, "memory")
