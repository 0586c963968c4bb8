"""Codes by layer, query and key, of any model that has HyperAttention inside, on every backend."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headcode.nn.attention import AttentionCall, HyperAttention
from headcode.ops import NORMS, attention_codes

Positions = int | slice | Sequence[int] | Tensor | None


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

    The codes are those before dropout, exact on every backend: they are recomputed from the layer's queries and keys,
    for the chosen positions alone. With several passes, the last one's codes are kept.

    Args:
        model: any module; its HyperAttention layers are numbered in order of use (a Transformer) or of definition.
        layers, queries, keys: which ones; negative numbers count from the end. None means all. Where a model computes
            only some queries of its last layer, those are captured, and asking for others is an error.
        detach: False keeps the graph, so that a loss on codes trains the layer.

    Example:
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

    def __call__(self, call: AttentionCall) -> None:
        layer = self.numbers[call.use]
        if layer in self.wanted:
            codes = _codes(call, self.queries, self.keys)
            self.codes[layer] = codes.detach() if self.detach else codes


def _codes(call: AttentionCall, queries: Positions, keys: Positions) -> Tensor:
    num_queries, num_keys = call.q.shape[2], call.k.shape[2]
    device = call.q.device
    # Queries are numbered by their positions among the keys; those of another sequence from 0.
    first, length = call.query_offset, max(num_keys, call.query_offset + num_queries)
    if call.cross:
        first, length = 0, num_queries
    rows = _resolve("queries", queries, num_queries, first, length, device)
    columns = _resolve("keys", keys, num_keys, 0, num_keys, device)
    positions = rows + call.query_offset
    mask, bias = call.mask, call.bias
    mask = mask.index_select(-2, rows) if mask is not None and mask.shape[-2] > 1 else mask
    bias = bias.index_select(-2, rows) if bias is not None and bias.shape[-2] > 1 else bias
    if call.relative_bias is not None:
        places = torch.arange(num_keys, device=device) - rows[:, None] + num_queries - 1
        dense = call.relative_bias[:, places]  # (H, queries, Tk)
        bias = dense if bias is None else bias + dense
    if call.causal or call.window is not None:
        apart = positions[:, None] - torch.arange(num_keys, device=device)
        near = apart >= 0 if call.causal else apart == apart
        if call.window is not None:
            near = near & (apart.abs() < call.window)
        if mask is None:
            mask = near
        else:
            mask = mask & near if mask.dtype == torch.bool else mask.masked_fill(~near, float("-inf"))
    k = call.k
    early = keys is not None and NORMS[call.norm].over != "key"
    if early:
        k = k.index_select(2, columns)
        mask, bias = (t if t is None or t.shape[-1] == 1 else t.index_select(-1, columns) for t in (mask, bias))
    codes = attention_codes(call.q.index_select(2, rows), k, mask=mask, bias=bias, norm=call.norm)
    return codes if early or keys is None else codes.index_select(3, columns)


def _resolve(name: str, chosen: Positions, computed: int, first: int, length: int, device: torch.device) -> Tensor:
    """Chosen positions (of a sequence of `length`) as indices into the `computed` ones, which start at `first`."""
    if chosen is None:
        return torch.arange(computed, device=device)
    if isinstance(chosen, Tensor) and chosen.dtype == torch.bool:
        raise ValueError(f"{name} must be positions, got a boolean tensor; use mask.nonzero().")
    if isinstance(chosen, slice):
        positions = list(range(length))[chosen]
    else:
        numbers = [chosen] if isinstance(chosen, int) else [int(i) for i in chosen]
        positions = [i + length if i < 0 else i for i in numbers]
    outside = [i for i in positions if not first <= i < first + computed]
    if outside or not positions:
        raise ValueError(f"{name} must be positions from {first} to {first + computed - 1}, got {chosen!r}.")
    return torch.tensor(positions, device=device) - first


def find_attentions(model: nn.Module) -> list[HyperAttention]:
    """The HyperAttention of each layer, in order of use (a model with `attention_layers`) or of definition."""
    found: list[HyperAttention] = []
    for module in model.modules():  # parents come before their parts
        if callable(in_order := getattr(module, "attention_layers", None)):
            found += [] if set(layers := in_order()) <= set(found) else layers  # those of a part are there already
        elif isinstance(module, HyperAttention) and module not in found:
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
