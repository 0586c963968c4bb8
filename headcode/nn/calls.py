"""What observers and editors of codes see of a layer's call, and the base of the layers that have codes.

Layers derive from `CodedLayer`, whatever their pairs are: pairs of tokens (`HyperAttention`) or the edges of a graph.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from headcode.ops import NORMS, attention_codes

Positions = int | slice | Sequence[int] | Tensor | None


class CodedCall(Protocol):
    """One call of a layer with codes."""

    @property
    def use(self) -> int:
        """Which use of the layer in one pass this is: 0, unless a model applies it several times."""

    def codes(self, queries: Positions = None, keys: Positions = None) -> Tensor:
        """The codes of chosen pairs, before dropout and before any edit; None means all."""


class CodedLayer:
    """Base of the layers whose codes can be captured and edited. `value_network` reads their projections."""

    num_heads: int
    num_kv_heads: int
    """Heads of keys and values, each shared by as many neighbouring heads of queries."""
    value_dim: int
    """Width of what the value projection reads of a key."""
    v_dim: int
    num_poolings: int = 1
    """How many ways of pooling the output projection reads side by side."""
    norm: str
    value_net: str
    value_proj: nn.Linear
    output_proj: nn.Linear
    middle_weight: nn.Parameter | None
    middle_bias: nn.Parameter | None
    observers: list[Callable[[Any], None]]
    """Called with the CodedCall of every pass; `capture_codes` puts its own here."""
    editor: Callable[[Any, Tensor], Tensor] | None
    """Takes the place of codes and value networks, with CodedCall and values; `edit_codes` puts its own here."""

    def shared_by_heads(self, t: Tensor, axis: int) -> Tensor:
        """Keys, values or weights of every head of queries, from those of every head of keys and values."""
        group = self.num_heads // self.num_kv_heads
        return t if group == 1 else t.repeat_interleave(group, axis)

    def apply_codes(self, call: Any, codes: Tensor, v: Tensor) -> Tensor:
        """What the layer's output projection gets if these are the codes of the call."""
        raise NotImplementedError


class AttentionCall(NamedTuple):
    """What one call of a HyperAttention passes to the op."""

    q: Tensor
    k: Tensor
    mask: Tensor | None
    bias: Tensor | None
    relative_bias: Tensor | None
    causal: bool
    norm: str
    query_offset: int
    """Position of the first query among the keys."""
    window: int | None
    """Keys so many positions away from the query, or more, are not seen."""
    cross: bool
    """The queries are another sequence than the keys, with positions of their own."""
    use: int
    """Which use of the layer in one pass this is: 0, unless a model applies it several times."""

    def code_arguments(self) -> dict[str, Any]:
        """What decides the codes beside q and k, as arguments of `hyper_attention` and `attention_codes`."""
        names = ("mask", "bias", "relative_bias", "causal", "norm", "query_offset", "window")
        return {name: getattr(self, name) for name in names}

    def codes(self, queries: Positions = None, keys: Positions = None) -> Tensor:
        """(B, H, queries, keys), recomputed for the chosen positions alone."""
        if queries is None and keys is None:
            return attention_codes(self.q, self.k, **self.code_arguments())
        num_queries, num_keys = self.q.shape[2], self.k.shape[2]
        device = self.q.device
        # Queries are numbered by their positions among the keys; those of another sequence from 0.
        first, length = self.query_offset, max(num_keys, self.query_offset + num_queries)
        if self.cross:
            first, length = 0, num_queries
        rows = resolve_positions("queries", queries, num_queries, first, length, device)
        columns = resolve_positions("keys", keys, num_keys, 0, num_keys, device)
        positions = rows + self.query_offset
        mask, bias = self.mask, self.bias
        mask = mask.index_select(-2, rows) if mask is not None and mask.shape[-2] > 1 else mask
        bias = bias.index_select(-2, rows) if bias is not None and bias.shape[-2] > 1 else bias
        if self.relative_bias is not None:
            places = torch.arange(num_keys, device=device) - rows[:, None] + num_queries - 1
            dense = self.relative_bias[:, places]  # (H, queries, Tk)
            bias = dense if bias is None else bias + dense
        if self.causal or self.window is not None:
            apart = positions[:, None] - torch.arange(num_keys, device=device)
            near = apart >= 0 if self.causal else apart == apart
            if self.window is not None:
                near = near & (apart.abs() < self.window)
            if mask is None:
                mask = near
            else:
                mask = mask & near if mask.dtype == torch.bool else mask.masked_fill(~near, float("-inf"))
        k = self.k
        early = keys is not None and NORMS[self.norm].over != "key"
        if early:
            k = k.index_select(2, columns)
            mask, bias = (t if t is None or t.shape[-1] == 1 else t.index_select(-1, columns) for t in (mask, bias))
        codes = attention_codes(self.q.index_select(2, rows), k, mask=mask, bias=bias, norm=self.norm)
        return codes if early or keys is None else codes.index_select(3, columns)


def resolve_positions(
    name: str, chosen: Positions, computed: int, first: int, length: int, device: torch.device
) -> Tensor:
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
