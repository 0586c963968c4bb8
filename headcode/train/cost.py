"""What training costs in arithmetic, and how fast this machine does it."""

import time

import torch
import torch.nn.functional as F

from headcode.nn import forward_flops
from headcode.run import RunConfig


def step_flops(config: RunConfig) -> int:
    """FLOPs of one training step: the forward pass, and twice as much backward."""
    return 3 * config.batch_size * forward_flops(config.model, config.task.sequence_length, config.task.queries)


@torch.no_grad()
def product_speed(
    size: int = 1024, seconds: float = 0.5, dtype: torch.dtype = torch.float32, onednn: bool = False
) -> float:
    """FLOP/s of a square matrix product on this CPU, the best of many; by torch's default library, or by oneDNN."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    if onednn:
        a, b = a.to_mkldnn(), b.to_mkldnn()
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        F.linear(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
