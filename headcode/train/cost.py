"""What training costs in arithmetic."""

from headcode.nn import forward_flops
from headcode.run import RunConfig


def step_flops(config: RunConfig) -> int:
    """FLOPs of one training step: the forward pass, and twice as much backward."""
    return 3 * config.batch_size * forward_flops(config.model, config.task.sequence_length, config.task.queries)
