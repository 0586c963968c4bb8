"""The paper's initialisation: truncated normal weights with variance 1/fan_in, zero biases."""

import math

from torch import Tensor, nn

# The standard deviation of a unit normal cut at ±2: dividing by it restores the variance that the cut takes away.
_TRUNCATED_STD = 0.87962566103423978


def truncated_normal_(weight: Tensor, fan_in: int) -> Tensor:
    """Fill with a normal cut at ±2σ, σ corrected so that the variance is 1/fan_in."""
    sigma = math.sqrt(1 / fan_in) / _TRUNCATED_STD
    return nn.init.trunc_normal_(weight, std=sigma, a=-2 * sigma, b=2 * sigma)


def reset_linear(linear: nn.Linear) -> None:
    truncated_normal_(linear.weight, linear.in_features)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
