"""The optimiser and its schedule, equal to the authors' to rounding.

AdamW: p ← p - learning_rate · (m̂ / (sqrt(v̂) + ε) + decay · p). Every parameter but the 1-D ones is decayed. The query,
key and value biases are (head, dim) in the authors' code, and so they are decayed, as is the relative table.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headcode.private_api import fused_adamw
from headcode.run import OptimizationConfig
from headcode.train.distributed import reshard_like
from headcode.train.muon import Muon

_TWO_DIMENSIONAL_BIASES = ("query_proj.bias", "key_proj.bias", "value_proj.bias")


def learning_rate(config: OptimizationConfig, step: int, steps: int) -> float:
    """The learning rate of update number `step`, counted from 0: that of the first update is 0.

    >>> config = OptimizationConfig(learning_rate=1.0, warmup_steps=10)
    >>> [round(learning_rate(config, step, 100), 4) for step in (0, 5, 10, 55, 100)]
    [0.0, 0.5, 1.0, 0.55, 0.1]
    >>> config = OptimizationConfig(learning_rate=1.0, warmup_steps=10, schedule="stable", final_rate=0.0)
    >>> [round(learning_rate(config, step, 100), 4) for step in (0, 10, 75, 85, 100)]
    [0.0, 1.0, 1.0, 0.6, 0.0]
    """
    peak = config.learning_rate
    warmup = min(config.warmup_steps, steps // 10)
    if step < warmup:
        return peak * step / warmup
    if config.schedule == "stable":
        left = min((steps - step) / max(config.decay_share * steps, 1), 1.0)
        return peak * ((1 - config.final_rate) * left + config.final_rate)
    end = steps - warmup if config.authors_schedule else steps
    progress = min((step - warmup) / max(end - warmup, 1), 1.0)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return peak * ((1 - config.final_rate) * cosine + config.final_rate)


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies to a parameter of a Transformer."""
    return parameter.dim() > 1 or name.endswith(_TWO_DIMENSIONAL_BIASES)


def is_block_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon takes a parameter: the weight matrices inside the blocks, and no embedding or table."""
    return "blocks" in name.split(".") and name.endswith(".weight") and parameter.dim() == 2


class AdamW:
    """The bits of `torch.optim.AdamW(fused=True)`, for parameters that are whole and on one device.

    It is the same kernel of torch. What is left out is what torch does around it at each step, and its import of
    torch's compiler, more than a second of a run's start.
    """

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float], epsilon: float) -> None:
        self.param_groups = groups
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self.found_inf: Tensor | None = None
        self._betas, self._epsilon = betas, epsilon

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            entries = [self.state.get(parameter) or self._begin(parameter) for parameter in parameters]
            fused_adamw(
                parameters,
                [parameter.grad for parameter in parameters],
                *([entry[key] for entry in entries] for key in ("exp_avg", "exp_avg_sq", "step")),
                learning_rate=group["lr"],
                betas=self._betas,
                weight_decay=group["weight_decay"],
                epsilon=self._epsilon,
                found_inf=self.found_inf,
            )

    def _begin(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        moments = (torch.zeros_like(parameter, memory_format=torch.preserve_format) for _ in range(2))
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        self.state[parameter] = dict(zip(("step", "exp_avg", "exp_avg_sq"), (step, *moments), strict=True))
        return self.state[parameter]


class Optimizer:
    """AdamW over all parameters, or Muon over the blocks' matrices and AdamW over the rest.

    State goes in and out as named tensors (`NAME.exp_avg`, …), so that it fits in a safetensors file.
    """

    def __init__(self, model: nn.Module, config: OptimizationConfig, *, sharded: bool = False) -> None:
        parameters = dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        muon = {n: p for n, p in parameters.items() if config.optimizer == "muon" and is_block_matrix(n, p)}
        adamw = {n: p for n, p in parameters.items() if n not in muon}
        self.parts: list[AdamW | torch.optim.Optimizer] = [_make_adamw(adamw, config, sharded)]
        if muon:
            self.parts.append(Muon(muon.values(), lr=config.learning_rate, weight_decay=config.weight_decay))
        self.parameters = list(parameters.values())

    @property
    def skips_on_device(self) -> bool:
        """Whether `step` can be skipped by a tensor on the device, which the host does not have to read."""
        return len(self.parts) == 1 and isinstance(self.parts[0], AdamW)

    def step(self, learning_rate: float, skip: Tensor | None = None) -> None:
        """One update. Where `skip` (a float scalar on the parameters' device, 0 or 1) is 1, nothing changes."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = learning_rate
            if skip is not None:
                part.found_inf = skip  # type: ignore[union-attr]
            part.step()

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """All state by name; sharded if the parameters are."""
        for part in self.parts:
            for parameter, entries in part.state.items():
                for key, value in entries.items():
                    yield f"{self._names[id(parameter)]}.{key}", value

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Load state by name, unsharded and from any device."""
        by_parameter: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            parameter_name, _, key = name.rpartition(".")
            by_parameter.setdefault(parameter_name, {})[key] = tensor
        known = set(self._names.values())
        if by_parameter and set(by_parameter) != known:
            odd = sorted(set(by_parameter) ^ known)[0]
            raise ValueError(f"The optimiser's state does not belong to this model: {odd} differs.")
        for part in self.parts:
            part.state.clear()
            for group in part.param_groups:
                for parameter in group["params"]:
                    if by_parameter:
                        entries = by_parameter[self._names[id(parameter)]]
                        part.state[parameter] = {key: _placed(key, entries[key], parameter, part) for key in entries}


def _placed(key: str, value: Tensor, parameter: Tensor, part: Any) -> Tensor:
    """An entry of the state on the device that is expected; the step count is on the CPU unless AdamW is fused."""
    if key != "step":
        if value.shape != parameter.shape:
            raise ValueError(f"The optimiser's state does not belong to this model: a {key:.80} has another shape.")
        return reshard_like(value, parameter)
    return value.to(parameter.device) if isinstance(part, AdamW) else value


def _make_adamw(
    parameters: dict[str, nn.Parameter], config: OptimizationConfig, sharded: bool
) -> "AdamW | torch.optim.AdamW":
    decayed = [p for name, p in parameters.items() if is_decayed(name, p)]
    others = [p for name, p in parameters.items() if not is_decayed(name, p)]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    if not sharded:
        return AdamW(groups, betas, config.epsilon)
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=False, foreach=True
    )
