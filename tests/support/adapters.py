"""Projections that are more than their weight, and models made of them."""

import copy

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune


def linears(model):
    return {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}


def replace(model, made, only=nn.Linear):
    """Every projection of the model by what `made` makes of it."""
    for parent in list(model.modules()):
        for name, part in list(parent.named_children()):
            if type(part) is only:
                setattr(parent, name, made(part))
    return model


class LowRank(nn.Module):
    """A Linear and a low-rank term beside it, with none of a Linear's attributes."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(0.3 * torch.randn(3, base.in_features))
        self.up = nn.Parameter(0.3 * torch.randn(base.out_features, 3))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T

    def merged(self):
        merged = copy.deepcopy(self.base)
        with torch.no_grad():
            merged.weight.add_(self.up @ self.down)
        return merged


class LowRankTable(nn.Module):
    """The same of an Embedding."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(0.3 * torch.randn(base.num_embeddings, 3))
        self.up = nn.Parameter(0.3 * torch.randn(3, base.embedding_dim))

    def forward(self, tokens):
        return self.base(tokens) + self.down[tokens] @ self.up

    def merged(self):
        merged = copy.deepcopy(self.base)
        with torch.no_grad():
            merged.weight.add_(self.down @ self.up)
        return merged


def adapted(model):
    torch.manual_seed(1)
    return replace(replace(copy.deepcopy(model), LowRank), LowRankTable, nn.Embedding)


def merged(model):
    model = replace(copy.deepcopy(model), LowRank.merged, LowRank)
    return replace(model, LowRankTable.merged, LowRankTable)


def spread(module):
    """weight_norm with lengths that are not the weight's own, so that leaving it out shows."""
    parametrizations.weight_norm(module, "weight")
    with torch.no_grad():
        lengths = module.parametrizations.weight.original0
        lengths.mul_(torch.linspace(0.5, 2, len(lengths)).reshape(lengths.shape))
    return module


def halved(module):
    prune.l1_unstructured(module, "weight", amount=0.5)
    return module


def turned(module):
    return parametrizations.orthogonal(module)


def hooked(module):
    module.register_forward_hook(lambda module, arguments, output: 1.5 * output + 1)
    return module


def patched(module):
    module.forward = lambda x, forward=module.forward: 1.5 * forward(x) + 1
    return module


def quantised(module):
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(module), {nn.Linear})[0]


CHANGES = [spread, turned, halved, hooked, patched, quantised, LowRank]
