"""The per-token network of a block: GELU with biases, or SwiGLU without."""

import torch.nn.functional as F
from torch import Tensor, nn

from headcode.nn.initialisation import reset_linear
from headcode.ops.activation import gelu


class GeluFeedForward(nn.Module):
    """W₂ gelu(W₁ x + b₁) + b₂, with the tanh form of GELU."""

    def __init__(self, dim: int, hidden_dim: int, backend: str = "auto") -> None:
        super().__init__()
        self.backend = backend
        self.hidden_proj = nn.Linear(dim, hidden_dim)
        self.output_proj = nn.Linear(hidden_dim, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_linear(self.hidden_proj)
        reset_linear(self.output_proj)

    def forward(self, x: Tensor) -> Tensor:
        return self.output_proj(gelu(self.hidden_proj(x), self.backend))


class SwigluFeedForward(nn.Module):
    """W₃ (silu(W₁ x) · W₂ x), no biases."""

    def __init__(self, dim: int, hidden_dim: int, backend: str = "auto") -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.signal_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.output_proj = nn.Linear(hidden_dim, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for linear in (self.gate_proj, self.signal_proj, self.output_proj):
            reset_linear(linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.output_proj(F.silu(self.gate_proj(x)) * self.signal_proj(x))


FEEDFORWARDS = {"gelu": GeluFeedForward, "swiglu": SwigluFeedForward}
