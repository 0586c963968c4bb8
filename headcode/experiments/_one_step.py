"""One layer of linear attention is one step of gradient descent (von Oswald et al., ICML 2023, arXiv 2212.07677).

In-context linear regression: tokens (x_i, y_i) with y_i = W x_i, and a query token (x, ŷ) whose ŷ is a first guess. A
layer without softmax adds Σ_i (k_i·q) v_i to the query token. With keys and queries that read x, and values that read
the residual y_i - W₀x_i, the part of ŷ becomes

    ŷ = W₀x + η/n Σ_i (y_i - W₀x_i)(x_i·x) = (W₀ - η ∇L(W₀)) x,    L(W) = 1/(2n) Σ_i |W x_i - y_i|²

which is the prediction after one gradient step with learning rate η: `constructed_layer` has exactly these weights.
`train` starts from random weights instead, and is watched on its way there.
"""

import dataclasses

import torch
from torch import Tensor, nn

from headcode.nn import HyperAttention


@dataclasses.dataclass(frozen=True)
class Setting:
    """Linear regression with inputs uniform in -1..1 and weights from a standard normal distribution."""

    num_inputs: int = 5
    num_points: int = 11
    steps: int = 3000
    batch_size: int = 256
    rate: float = 3e-3
    test_size: int = 4096


def constructed_layer(start: Tensor, rate: float, num_points: int) -> HyperAttention:
    """Linear attention whose residual update is one gradient step from the weights `start` (outputs, inputs)."""
    outputs, inputs = start.shape
    layer = HyperAttention(
        inputs + outputs,
        1,
        method="linear",
        qk_dim=inputs,
        v_dim=outputs,
        bias=False,
        pooling="sum",
        backend="reference",
    ).to(start.dtype)
    identity = torch.eye(inputs, dtype=start.dtype)
    with torch.no_grad():
        for projection in (layer.query_proj, layer.key_proj):
            projection.weight.copy_(torch.cat([identity, torch.zeros(inputs, outputs, dtype=start.dtype)], 1))
        layer.query_proj.weight.mul_(inputs**0.5)  # the op divides scores by the root of the width
        layer.value_proj.weight.copy_(torch.cat([-start, torch.eye(outputs, dtype=start.dtype)], 1))
        layer.output_proj.weight.zero_()
        layer.output_proj.weight[inputs:] = rate / num_points * torch.eye(outputs, dtype=start.dtype)
    return layer


def attention_prediction(layer: HyperAttention, x: Tensor, y: Tensor, query: Tensor, start: Tensor) -> Tensor:
    """(B, outputs): what the query token's guess becomes; x (B, n, inputs), y (B, n, outputs), query (B, inputs)."""
    tokens = torch.cat([x, y], -1)
    slot = torch.cat([query, query @ start.T], -1)[:, None]
    return (slot + layer(slot, tokens))[:, 0, x.shape[2] :]


def step_prediction(x: Tensor, y: Tensor, query: Tensor, start: Tensor, rate: float) -> Tensor:
    """(B, outputs): predictions after one gradient step, the gradient taken by automatic differentiation."""
    weights = start.expand(len(x), *start.shape).clone().requires_grad_()
    loss = (x @ weights.mT - y).square().sum((1, 2)) / (2 * x.shape[1])
    (gradient,) = torch.autograd.grad(loss.sum(), weights)
    return ((start - rate * gradient) @ query[..., None])[..., 0]


def identity_error(seed: int = 0, size: int = 64) -> float:
    """The largest difference between the constructed layer and a gradient step, over sizes and starting points."""
    generator = torch.Generator().manual_seed(seed)
    largest = 0.0
    for inputs, outputs, points in ((1, 1, 2), (3, 2, 7), (5, 1, 11), (13, 3, 5)):
        x, query, truth, start = (
            torch.randn(*shape, dtype=torch.float64, generator=generator)
            for shape in ((size, points, inputs), (size, inputs), (size, outputs, inputs), (outputs, inputs))
        )
        y = x @ truth.mT
        for rate in (0.1, 1.0):
            layer = constructed_layer(start, rate, points)
            with torch.no_grad():
                found = attention_prediction(layer, x, y, query, start)
            largest = max(largest, float((found - step_prediction(x, y, query, start, rate)).abs().max()))
    return largest


def regressions(setting: Setting, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (B, n, inputs), y (B, n), the query (B, inputs) and its y (B,)."""
    x = torch.rand(size, setting.num_points + 1, setting.num_inputs, generator=generator) * 2 - 1
    weights = torch.randn(size, setting.num_inputs, 1, generator=generator)
    y = (x @ weights)[..., 0]
    return x[:, :-1], y[:, :-1], x[:, -1], y[:, -1]


def best_rate(setting: Setting, seed: int, size: int = 65536) -> float:
    """The learning rate at which one gradient step from zero has the least squared error, in closed form."""
    x, y, query, target = regressions(setting, size, torch.Generator().manual_seed(seed))
    unit = one_step(x, y, query, 1.0)
    return float((unit * target).sum() / unit.square().sum())


def one_step(x: Tensor, y: Tensor, query: Tensor, rate: float) -> Tensor:
    """(B,): predictions after one step from zero."""
    return rate * (query * (x * y[..., None]).mean(1)).sum(1)


def train(setting: Setting, seed: int, num_looks: int = 12) -> list[dict[str, float]]:
    """Train one layer of linear attention on linear regression; at several steps, how like one gradient step it is.

    loss, step_loss: mean squared error of the layer and of one tuned gradient step, on the same held-back regressions.
    difference: root mean square of the difference of their predictions, over that of the step's predictions.
    cosine: of their sensitivities ∂ŷ/∂x at the query, the mean over regressions; ratio: of the lengths of these.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = HyperAttention(setting.num_inputs + 1, 1, method="linear", bias=False, pooling="sum")
    optimizer = torch.optim.Adam(layer.parameters(), lr=setting.rate)
    rate = best_rate(setting, seed + 1000)
    test = regressions(setting, setting.test_size, torch.Generator().manual_seed(seed + 2000))
    generator = torch.Generator().manual_seed(seed)
    looks = {0} | {round(setting.steps ** (i / (num_looks - 1))) for i in range(num_looks)}
    found = []
    for step in range(setting.steps + 1):
        if step in looks:
            found.append({"seed": seed, "step": step, "rate": rate, **_likeness(layer, test, rate)})
        if step == setting.steps:
            break
        optimizer.param_groups[0]["lr"] = setting.rate * (1 - step / setting.steps)
        x, y, query, target = regressions(setting, setting.batch_size, generator)
        loss = (_predict(layer, x, y, query) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
    return found


def _predict(layer: HyperAttention, x: Tensor, y: Tensor, query: Tensor) -> Tensor:
    """(B,): the last channel of the query token, which came in as 0; the token itself is among the keys."""
    tokens = torch.cat([torch.cat([x, query[:, None]], 1), nn.functional.pad(y, (0, 1))[..., None]], -1)
    return layer(tokens, queries=slice(-1, None))[:, 0, -1]


def _likeness(layer: HyperAttention, test: tuple[Tensor, Tensor, Tensor, Tensor], rate: float) -> dict[str, float]:
    x, y, query, target = test
    query = query.clone().requires_grad_()
    ours, theirs = _predict(layer, x, y, query), one_step(x, y, query, rate)
    mine, other = (torch.autograd.grad(p.sum(), query)[0] for p in (ours, theirs))
    ours, theirs = ours.detach(), theirs.detach()
    return {
        "loss": float((ours - target).square().mean()),
        "step_loss": float((theirs - target).square().mean()),
        "difference": float((ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt()),
        "cosine": float(nn.functional.cosine_similarity(mine, other, dim=1).mean()),
        "ratio": float(mine.norm(dim=1).mean() / other.norm(dim=1).mean()),
    }
