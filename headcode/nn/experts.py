"""A mixture of experts in place of a block's feed-forward network, and what keeps the experts equally busy."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headcode.nn.initialisation import reset_linear
from headcode.private_api import functional_transforms_active


class Routing(NamedTuple):
    """Where one call of a `MixtureOfExperts` sent its N tokens."""

    probabilities: Tensor
    """(N, E): the softmax of the router's logits over all experts."""
    experts: Tensor
    """(N, k): the experts of each token, the most probable one first."""


class MixtureOfExperts(nn.Module):
    """Several feed-forward networks, of which each token uses the k that its router prefers.

        g = W_router x            p = softmax(the k largest of g)            y = Σ_e p_e expert_e(x)

    Every token reaches all of its k experts, whatever the others choose: there is no capacity and nothing is dropped,
    and so the outputs of a sequence do not depend on the rest of the batch.

    Args:
        experts: modules from (N, dim) to (N, dim).
        dim: width of the tokens.
        experts_per_token: k.
    """

    def __init__(self, experts: list[nn.Module], dim: int, experts_per_token: int) -> None:
        super().__init__()
        self.experts_per_token = experts_per_token
        self.router = nn.Linear(dim, len(experts), bias=False)
        self.experts = nn.ModuleList(experts)
        self.observers: list[list[Routing]] = []
        """Lists that get the Routing of every call; `capture_routing` puts its own here."""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_linear(self.router)
        for expert in self.experts:
            expert.reset_parameters()  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # (N, dim)
        logits = self.router(tokens)  # (N, E)
        largest, chosen = logits.topk(self.experts_per_token)
        shares = largest.softmax(-1)
        for observer in self.observers:
            observer.append(Routing(logits.softmax(-1), chosen))
        if torch.compiler.is_compiling() or functional_transforms_active():
            mixed = self._mix_all(tokens, chosen, shares)
        else:
            mixed = self._mix_chosen(tokens, chosen, shares)
        return mixed.view_as(x)

    def _mix_chosen(self, tokens: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Each expert computes its own tokens alone. One without any computes none, and has gradients of 0."""
        order = chosen.flatten().argsort(stable=True)  # the N·k uses of experts, those of one expert together
        sizes = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        used = tokens[:, None].expand(-1, self.experts_per_token, -1).flatten(0, 1)
        parts = _Reorder.apply(used, order).split(sizes)
        outputs = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        outputs = _Reorder.apply(outputs, back).unflatten(0, chosen.shape)  # (N, k, dim)
        return (shares[..., None] * outputs).sum(1)

    def _mix_all(self, tokens: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """The same by every expert on every token: sizes in graphs and transforms cannot depend on numbers."""
        weights = shares.new_zeros(len(tokens), len(self.experts)).scatter(1, chosen, shares)
        outputs = torch.stack([expert(tokens) for expert in self.experts], 1)  # (N, E, dim)
        return (weights[..., None] * outputs).sum(1)


class _Reorder(torch.autograd.Function):
    """Rows in another order. Its gradient is the inverse order, where that of indexing would add row by row."""

    @staticmethod
    def forward(ctx, rows, order):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(order)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (order,) = ctx.saved_tensors
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return _Reorder.apply(grad, back), None


@contextmanager
def capture_routing(model: nn.Module) -> Iterator[list[Routing]]:
    """The Routing of every mixture of experts, in the order of the calls inside the `with`, with its graph.

    Example:
        >>> from headcode.nn import ModelConfig, Transformer
        >>> model = Transformer(ModelConfig(input_dim=5, output_dim=1, max_length=16, num_experts=4))
        >>> with capture_routing(model) as routings:
        ...     _ = model(torch.randn(3, 16, 5))
        >>> [tuple(routing.experts.shape) for routing in routings]  # two layers; 2 of 4 experts for each of 48 tokens
        [(48, 2), (48, 2)]
    """
    mixtures = [part for part in model.modules() if isinstance(part, MixtureOfExperts)]
    if not mixtures:
        raise ValueError(f"{type(model).__name__} has no mixture of experts: make it with num_experts of 2 or more.")
    routings: list[Routing] = []
    for mixture in mixtures:
        mixture.observers.append(routings)
    try:
        yield routings
    finally:
        for mixture in mixtures:
            mixture.observers = [observer for observer in mixture.observers if observer is not routings]


def balance_loss(routings: list[Routing]) -> Tensor:
    """How unequally experts are used: E Σ_e (share of uses) · (mean probability), the mean over the calls.

    1 if all are used alike, E if one is used alone. Its gradient lowers the probability of experts in proportion to
    how much they are used (the load-balancing loss of Switch transformers).
    """
    return torch.stack([_balance(*routing) for routing in routings]).mean()


def _balance(probabilities: Tensor, experts: Tensor) -> Tensor:
    num_experts = probabilities.shape[1]
    shares = F.one_hot(experts, num_experts).to(probabilities.dtype).mean((0, 1))
    return num_experts * shares @ probabilities.mean(0)
