"""Whether a module's weights may be read in place of a call of the module, and its matrix where they may not.

A projection can be more than its weight: an adapter (LoRA) stands in its place, a hook watches or changes its output, a
parametrisation makes its weight, the weight is quantised, or is elsewhere until a call fetches it. Every fast path that
reads weights asks here first, and calls the module wherever the two could differ.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headcode.private_api import fake_tensor_type, has_global_hooks

_ORDINARY = (nn.Parameter, Tensor, fake_tensor_type())
"""Kinds of tensors whose products are torch's own; `torch.export` traces with fake ones."""
_PROBES = (1.0, -7.0, 49.0)
"""Sizes of the inputs at which a module is compared with its matrix: what is bent or cut off shows at one of them."""
_ROUNDINGS, _LARGEST_ERROR = 100, 0.03
"""Of that comparison: the relative error that is put down to rounding, in units of the precision and in all."""


def why_called(part: nn.Module | None, kind: type[nn.Module]) -> str | None:
    """Why `part` must be called; None if it is exactly of this kind, runs its own forward and nothing watches it."""
    if type(part) is not kind:
        return f"is a {full_name(part)}"
    if "forward" in part.__dict__:
        return "has another forward"
    if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
        return "has hooks"
    return None


def full_name(part: nn.Module | None) -> str:
    """The class with its module: adapters and quantised layers are called Linear too."""
    return f"{type(part).__module__}.{type(part).__qualname__}"


def own_weight(part: nn.Module | None, kind: type[nn.Module]) -> Tensor | None:
    """The weight of a module exactly of this kind, as its own forward reads it; None if only a call can tell.

    Hooks are another question: they change what goes in or comes out, and not the weight.
    """
    if type(part) is not kind or "forward" in part.__dict__:
        return None
    weight = part._parameters.get("weight")
    return weight if _is_ordinary(weight) else None


def _is_ordinary(weight: Tensor | None) -> bool:
    """Whether a weight can be computed with as it is: its numbers are here (not on the meta device), and plain."""
    return weight is not None and type(weight) in _ORDINARY and weight.device.type != "meta"


def are_plain_linears(projections: tuple[nn.Module, ...]) -> bool:
    """Whether calls of these come to products with their weights, plus biases that all or none of them have."""
    if has_global_hooks():
        return False
    without_bias = 0
    for projection in projections:
        if why_called(projection, nn.Linear) is not None or not _is_ordinary(projection._parameters.get("weight")):
            return False
        without_bias += projection._parameters.get("bias") is None
    return without_bias in (0, len(projections))


def apply_together(x: Tensor, projections: tuple[nn.Linear, ...]) -> tuple[Tensor, ...]:
    """Several projections of the same tokens, in one matrix product if all are plain Linear layers."""
    if not are_plain_linears(projections):
        return tuple([projection(x) for projection in projections])
    weight = torch.cat([p.weight for p in projections])
    bias = None if projections[0].bias is None else torch.cat([p.bias for p in projections])
    return F.linear(x, weight, bias).split([p.out_features for p in projections], -1)


def affine_map(name: str, module: nn.Module, width: int) -> tuple[Tensor, Tensor | None]:
    """Weight (out, in) and bias (out,) of a projection of `width` channels; differentiable, and without dropout.

    A plain Linear shows its own. Any other module is called on a basis, and compared with its matrix at other inputs;
    ValueError, which begins with `name`, if it is no linear map plus a bias.
    """
    if are_plain_linears((module,)):
        return module._parameters["weight"], module._parameters["bias"]  # type: ignore[return-value]
    numbers = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    device = torch.device("cpu") if numbers.is_meta else numbers.device
    basis = torch.eye(width, dtype=numbers.dtype, device=device)
    wave = torch.cos(1.7 * torch.arange(width, device=device)).to(basis.dtype)
    probes = torch.stack([size * wave for size in _PROBES])
    inputs = torch.cat([torch.zeros_like(basis[:1]), basis, probes])
    with _without_dropout(module):
        outputs = module(inputs[None])[0]
    bias, rows, seen = outputs.split([1, width, len(probes)])
    weight, bias = (rows - bias).T, bias[0]
    with torch.no_grad():
        error = (probes.to(weight) @ weight.T + bias - seen).norm(dim=1)
        tolerance = min(_ROUNDINGS * torch.finfo(seen.dtype).eps, _LARGEST_ERROR)
        if bool((error > tolerance * seen.norm(dim=1)).any()):
            raise ValueError(
                f"{name} is a {full_name(module)}, which is not a linear map plus a bias and so has no matrix to read; "
                f"use the model without it."
            )
    return weight, bias


@contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True
