"""Codes by layer, query and key, of any model that has layers with codes inside, on every backend."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from headcode.nn.calls import CodedCall, CodedLayer, Positions


@contextmanager
def capture_codes(
    model: nn.Module,
    *,
    layers: int | Sequence[int] | None = None,
    queries: Positions = None,
    keys: Positions = None,
    detach: bool = True,
) -> Iterator[dict[int, Tensor]]:
    """Codes of every forward pass inside the `with`: `codes[layer]` is (B, H, queries, keys).

    Those of a `headcode.graph.HyperConv` are (edges, H), in the order of its edges.

    The codes are those before dropout, exact on every backend: they are recomputed from the layer's queries and keys,
    for the chosen positions alone. With several passes, the last one's codes are kept.

    Args:
        model: any module; its layers with codes (HyperAttention, HyperConv) are numbered in order of use (a
            Transformer) or of definition.
        layers, queries, keys: which ones; negative numbers count from the end. None means all. Where a model computes
            only some queries of its last layer, those are captured, and asking for others is an error.
        detach: False keeps the graph, so that a loss on codes trains the layer.

    Example:
        >>> import torch
        >>> from headcode.nn import ModelConfig, Transformer
        >>> model = Transformer(ModelConfig(input_dim=5, output_dim=1, max_length=16))
        >>> with capture_codes(model, layers=1, queries=-1) as codes:
        ...     _ = model(torch.randn(3, 16, 5))
        >>> codes[1].shape
        torch.Size([3, 8, 1, 16])
    """
    attentions = find_attentions(model)
    if not attentions:
        raise ValueError(f"{type(model).__name__} has no HyperAttention layer to capture codes from.")
    wanted = layer_numbers(layers, len(attentions))
    codes: dict[int, Tensor] = {}
    installed = []
    for attention in dict.fromkeys(attentions):
        observer = _Observer(
            [i for i, a in enumerate(attentions) if a is attention], wanted, queries, keys, detach, codes
        )
        attention.observers.append(observer)
        installed.append((attention, observer))
    try:
        yield codes
    finally:
        for attention, observer in installed:
            attention.observers.remove(observer)


class _Observer:
    """Records the codes of one attention module, which several layers may share."""

    def __init__(
        self,
        numbers: list[int],
        wanted: set[int],
        queries: Positions,
        keys: Positions,
        detach: bool,
        codes: dict[int, Tensor],
    ) -> None:
        self.numbers, self.wanted = numbers, wanted
        self.queries, self.keys, self.detach, self.codes = queries, keys, detach, codes

    def __call__(self, call: CodedCall) -> None:
        layer = self.numbers[call.use]
        if layer in self.wanted:
            codes = call.codes(self.queries, self.keys)
            self.codes[layer] = codes.detach() if self.detach else codes


def find_attentions(model: nn.Module) -> list[Any]:
    """The layers with codes, in order of use (a model with `attention_layers`) or of definition."""
    found: list[CodedLayer] = []
    for module in model.modules():  # parents come before their parts
        if callable(in_order := getattr(module, "attention_layers", None)):
            found += [] if set(layers := in_order()) <= set(found) else layers  # those of a part are there already
        elif isinstance(module, CodedLayer) and module not in found:
            found.append(module)
    return found


def layer_numbers(layers: int | Sequence[int] | None, count: int) -> set[int]:
    """Chosen layers, counted from 0; negative numbers count from the end and None means all."""
    if layers is None:
        return set(range(count))
    numbers = [layers] if isinstance(layers, int) else list(layers)
    if any(not isinstance(i, int) or not -count <= i < count for i in numbers):
        raise ValueError(f"layers must be numbers from 0 to {count - 1}, got {layers!r}.")
    return {i % count for i in numbers}
