"""What training costs in arithmetic, and how fast this machine does it."""

import time

import torch
import torch.nn.functional as F

from headcode.run import RunConfig
from headcode.train.evaluate import evaluation_splits


def step_flops(config: RunConfig) -> int:
    """FLOPs of one training step: the forward pass, and twice as much backward."""
    return 3 * config.batch_size * config.model.forward_flops(config.task.sequence_length, config.task.queries)


def run_flops(config: RunConfig) -> int:
    """FLOPs of a whole run: its training steps, and the forward passes of its evaluations."""
    often = -(-config.steps // config.eval_every) if config.eval_every else 1
    evaluated = often * config.eval_size * len(evaluation_splits(config.task))
    forward = config.model.forward_flops(config.task.sequence_length, config.task.queries)
    return config.steps * step_flops(config) + evaluated * forward


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
