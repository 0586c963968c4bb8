"""What training costs in arithmetic, and how fast this machine does it."""

import time

import torch

from headcode.nn import forward_flops
from headcode.run import RunConfig


def step_flops(config: RunConfig) -> int:
    """FLOPs of one training step: the forward pass, and twice as much backward."""
    return 3 * config.batch_size * forward_flops(config.model, config.task.sequence_length, config.task.queries)


def product_speed(size: int = 1024, seconds: float = 0.5, dtype: torch.dtype = torch.float32) -> float:
    """FLOP/s of a square matrix product on this CPU, the best of many."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
