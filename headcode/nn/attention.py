"""`HyperAttention`: the drop-in layer."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headcode.nn.cache import FastWeightState, KeyValueCache, LayerCache
from headcode.nn.initialisation import reset_linear
from headcode.nn.position import RelativeBias, rotate
from headcode.ops import METHODS, NORMS, POOLINGS, VALUE_NETS, hyper_attention, linear_attention_recurrent


class AttentionCall(NamedTuple):
    """What one call of a layer hands to the op; observers of codes read it."""

    q: Tensor
    k: Tensor
    mask: Tensor | None
    bias: Tensor | None
    relative_bias: Tensor | None
    causal: bool
    norm: str
    query_offset: int
    """Position of the first query among the keys."""
    cross: bool
    """The queries are another sequence than the keys."""


class HyperAttention(nn.Module):
    """Multi-head attention whose codes configure a value network per (query, key) pair.

        z[q,k] = norm_h(q[h]·k[h] / sqrt(Dk) + position bias)                       the code, H numbers
        linear value net:     y[q] = b_out + Σ_k (Σ_h z_h W_out[h] W_value[h]) x[k]
        two-layer value net:  y[q] = b_out + Σ_k (Σ_h z_h W_out[h]) φ(Σ_h z_h W_value[h] x[k])

    For users of `nn.MultiheadAttention`: batches come first, `key_padding_mask` means the same (True is ignored),
    a boolean `mask` means the opposite (True is kept, as in `scaled_dot_product_attention`), and the result is the
    output alone; codes come from `capture_codes`.

    Args:
        dim: width of the queries' tokens and of the output.
        num_heads: H, the length of the code.
        method: a named (norm, value_net) pair, one of METHODS; `norm` and `value_net` override its parts.
        qk_dim, v_dim: total widths over all heads of queries and keys, and of values; `dim` unless given.
        context_dim: width of the keys' tokens, for cross-attention; `dim` unless given.
        position: `none`, `relative` (T5 band with `num_buckets` buckets) or `rotary`.
        causal: the default of `forward`.
        dropout: share of (query, key) pairs dropped while training.
        qk_norm: RMS-normalise queries and keys per head, with learned scales.
        recurrent: compute the `linear` method as a fast-weight programmer, with a (Dk, Dv) state per head and no T×T.
        backend: of `hyper_attention`.

    Example:
        >>> layer = HyperAttention(64, 8, method="hyla")
        >>> layer(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        method: str = "hyla",
        norm: str | None = None,
        value_net: str | None = None,
        pooling: str = "sum",
        qk_dim: int | None = None,
        v_dim: int | None = None,
        context_dim: int | None = None,
        position: str = "none",
        num_buckets: int | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        qk_norm: bool = False,
        recurrent: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        qk_dim, v_dim, context_dim = (dim if width is None else width for width in (qk_dim, v_dim, context_dim))
        sizes = {"dim": dim, "num_heads": num_heads, "qk_dim": qk_dim, "v_dim": v_dim, "context_dim": context_dim}
        check_sizes(sizes)
        norm, value_net = resolve_method(method, norm, value_net)
        check_choice("pooling", pooling, POOLINGS)
        check_choice("position", position, ("none", "relative", "rotary"))
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}.")
        if position == "relative" and num_buckets is None:
            raise ValueError("position='relative' needs num_buckets: the longest sequence length is a good choice.")
        if position == "rotary" and (qk_dim // num_heads) % 2:
            raise ValueError(
                f"position='rotary' needs an even head width, got qk_dim / num_heads = {qk_dim // num_heads}."
            )
        self.dim, self.num_heads = dim, num_heads
        self.norm, self.value_net, self.pooling = norm, value_net, pooling
        self.causal, self.dropout, self.position = causal, dropout, position
        self.recurrent, self.backend = recurrent, backend
        if recurrent and (reason := why_not_recurrent(norm, value_net, pooling, causal, position, dropout)):
            raise ValueError(f"recurrent=True is not possible: {reason}.")

        value_width = 2 * v_dim if VALUE_NETS[value_net].gated else v_dim
        self.query_proj = nn.Linear(dim, qk_dim, bias=bias)
        self.key_proj = nn.Linear(context_dim, qk_dim, bias=bias)
        self.value_proj = nn.Linear(context_dim, value_width, bias=bias)
        self.output_proj = nn.Linear(v_dim, dim, bias=bias)
        self.relative_bias = RelativeBias(num_heads, num_buckets) if position == "relative" and num_buckets else None
        self.query_norm = nn.RMSNorm(qk_dim // num_heads, eps=1e-6) if qk_norm else None
        self.key_norm = nn.RMSNorm(qk_dim // num_heads, eps=1e-6) if qk_norm else None
        self.observers: list[Callable[[AttentionCall], None]] = []
        """Called with every AttentionCall; `capture_codes` puts its own here."""
        self.editor: Callable[[AttentionCall, Tensor], Tensor] | None = None
        """Takes the place of the op, with the AttentionCall and the values; `edit_codes` puts its own here."""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for linear in (self.query_proj, self.key_proj, self.value_proj, self.output_proj):
            reset_linear(linear)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        causal: bool | None = None,
        queries: slice | None = None,
        cache: LayerCache | None = None,
        dropout_seed: int | None = None,
    ) -> Tensor:
        """(B, Tq, dim) to (B, Tq, dim).

        Args:
            query: tokens (B, Tq, dim). key: tokens (B, Tk, context_dim), by default `query` (self-attention).
            value: tokens (B, Tk, context_dim), by default `key`.
            key_padding_mask: boolean (B, Tk), True where a key is to be ignored.
            mask, bias: as in `hyper_attention`.
            queries: for self-attention, a contiguous range of positions whose outputs alone are computed.
            cache: keys and values of earlier calls, which this call extends; self-attention only.
            dropout_seed: decides which pairs are dropped in training; drawn from torch's generator unless given.
        """
        causal = self.causal if causal is None else causal
        self._check_inputs(query, key, value, key_padding_mask, queries, cache)
        q, k, v, start = self._project(query, key, value, queries)
        past = 0 if cache is None else cache.length
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        query_offset = past + start if key is None else k.shape[2] - q.shape[2]
        if self.position == "rotary":
            q, k = rotate(q, query_offset), rotate(k, past)
        q, k = q.to(v.dtype), k.to(v.dtype)
        if isinstance(cache, KeyValueCache):
            k, v = cache.append(k, v)

        if self.recurrent or isinstance(cache, FastWeightState):
            out = self._attend_recurrently(q, k, v, key_padding_mask, mask, bias, causal, start, cache)
        else:
            band = None
            if self.relative_bias is not None:
                band = self.relative_bias(q.shape[2], k.shape[2], query_offset).to(q.dtype)
            mask = merge_padding(mask, key_padding_mask, query.shape[0], k.shape[2])
            call = AttentionCall(q, k, mask, bias, band, causal, self.norm, query_offset, key is not None)
            for observer in self.observers:
                observer(call)
            out = self._attend(call, v, dropout_seed) if self.editor is None else self.editor(call, v)
        return self.output_proj(out.transpose(1, 2).flatten(2))

    def _attend(self, call: AttentionCall, v: Tensor, dropout_seed: int | None) -> Tensor:
        return hyper_attention(
            call.q,
            call.k,
            v,
            mask=call.mask,
            bias=call.bias,
            relative_bias=call.relative_bias,
            causal=call.causal,
            norm=self.norm,
            value_net=self.value_net,
            pooling=self.pooling,
            dropout=self.dropout if self.training else 0.0,
            dropout_seed=dropout_seed,
            query_offset=call.query_offset,
            backend=self.backend,
        )

    def _project(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, queries: slice | None
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        """Queries, keys and values (B, H, T, D), and the position of the first query in this call's tokens."""
        projections = (self.query_proj, self.key_proj, self.value_proj)
        start = 0
        if key is None and queries is None:
            joined = _joined(query, projections)
        else:
            if queries is not None:
                start, stop, _ = queries.indices(query.shape[1])
            selected = query if queries is None else query[:, start:stop]
            context = query if key is None else key
            if value is None:
                joined = (self.query_proj(selected), *_joined(context, projections[1:]))
            else:
                joined = (self.query_proj(selected), self.key_proj(context), self.value_proj(value))
        q, k, v = (t.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for t in joined)
        return q, k, v, start

    def _attend_recurrently(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        mask: Tensor | None,
        bias: Tensor | None,
        causal: bool,
        start: int,
        cache: LayerCache | None,
    ) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        reason = why_not_recurrent(self.norm, self.value_net, self.pooling, causal, self.position, dropout)
        if mask is not None or bias is not None:
            reason = "a mask or bias per pair has no finite state; use key_padding_mask"
        if self.observers or self.editor is not None:
            reason = "codes are not formed; capture or edit them with recurrent=False"
        if reason:
            raise ValueError(f"The recurrent form is not possible: {reason}.")
        if key_padding_mask is not None:
            v = v.masked_fill(key_padding_mask[:, None, :, None], 0.0)
        read = slice(start, start + q.shape[2])
        if q.shape[2] != k.shape[2]:
            q = F.pad(q, (0, 0, start, k.shape[2] - read.stop))
        state = cache.state if isinstance(cache, FastWeightState) else None
        out, state = linear_attention_recurrent(q, k, v, state=state)
        if isinstance(cache, FastWeightState):
            cache.state, cache.length = state, cache.length + k.shape[2]
        return out[:, :, read]

    def _check_inputs(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None,
        queries: slice | None,
        cache: LayerCache | None,
    ) -> None:
        _check_tokens("query", query, self.query_proj)
        if key is not None:
            _check_tokens("key", key, self.key_proj)
        elif self.key_proj.in_features != self.dim:
            widths = f"context_dim {self.key_proj.in_features}, dim {self.dim}"
            raise ValueError(f"This layer is for cross-attention ({widths}): give key.")
        if value is not None:
            if key is None:
                raise ValueError("value was given without key; give both, or neither for self-attention.")
            _check_tokens("value", value, self.value_proj)
            if value.shape[:2] != key.shape[:2]:
                raise ValueError(
                    f"value must have key's batch and length {tuple(key.shape[:2])}, got {tuple(value.shape)}."
                )
        if key is not None and key.shape[0] != query.shape[0]:
            raise ValueError(f"key must have query's batch of {query.shape[0]}, got {key.shape[0]}.")
        if queries is not None:
            if key is not None:
                raise ValueError("queries is for self-attention; for cross-attention slice the query tokens.")
            if not isinstance(queries, slice) or queries.step not in (None, 1):
                raise ValueError(f"queries must be a slice with step 1, for example slice(-4, None), got {queries!r}.")
            if queries.indices(query.shape[1])[0] >= queries.indices(query.shape[1])[1]:
                raise ValueError(f"queries must name at least one of {query.shape[1]} positions, got {queries!r}.")
        if cache is not None and key is not None:
            raise ValueError("A cache is for self-attention; the keys of cross-attention do not grow.")
        if key_padding_mask is not None:
            length = (query if key is None else key).shape[1]
            if isinstance(cache, KeyValueCache):
                length += cache.length
            expected = (query.shape[0], length)
            if not isinstance(key_padding_mask, Tensor) or key_padding_mask.dtype != torch.bool:
                raise TypeError("key_padding_mask must be a boolean tensor, True where a key is to be ignored.")
            if tuple(key_padding_mask.shape) != expected:
                raise ValueError(
                    f"key_padding_mask must have shape (batch, keys) = {expected}, got {tuple(key_padding_mask.shape)}."
                )

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, norm={self.norm!r}, value_net={self.value_net!r}, causal={self.causal}"


def _joined(x: Tensor, projections: tuple[nn.Linear, ...]) -> tuple[Tensor, ...]:
    """Several projections of the same tokens as one matrix product."""
    weight = torch.cat([p.weight for p in projections])
    bias = None if projections[0].bias is None else torch.cat([p.bias for p in projections])
    return F.linear(x, weight, bias).split([p.out_features for p in projections], -1)


def merge_padding(mask: Tensor | None, padding: Tensor | None, batch: int, num_keys: int) -> Tensor | None:
    """The op's mask with the ignored keys taken out."""
    if padding is None:
        return mask
    visible = ~padding[:, None, None, :]
    if mask is None:
        return visible
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -math.inf)


def resolve_method(method: str, norm: str | None, value_net: str | None) -> tuple[str, str]:
    """The norm and value net of a method, with overrides."""
    check_choice("method", method, METHODS)
    norm = METHODS[method].norm if norm is None else norm
    value_net = METHODS[method].value_net if value_net is None else value_net
    check_choice("norm", norm, NORMS)
    check_choice("value_net", value_net, VALUE_NETS)
    return norm, value_net


def why_not_recurrent(
    norm: str, value_net: str, pooling: str, causal: bool, position: str, dropout: float
) -> str | None:
    """Why a (Dk, Dv) state per head cannot stand for the past of such a layer; None if it can."""
    if norm != "none" or value_net != "linear" or pooling != "sum":
        return (
            "only the method 'linear' (norm 'none', value net 'linear', pooling 'sum') is a sum of outer products, "
            f"this layer has norm {norm!r}, value net {value_net!r} and pooling {pooling!r}"
        )
    if not causal:
        return "a state only carries the past; set causal=True"
    if position == "relative":
        return (
            "the T5 band adds a bias to every (query, key) pair, which no finite state carries; "
            "use position 'none' or 'rotary'"
        )
    if dropout > 0:
        return "attention dropout acts on (query, key) pairs, which are not formed; set dropout=0"
    return None


def check_choice(name: str, given: Any, allowed: Any) -> None:
    if not isinstance(given, str) or given not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {given!r}.")


def check_sizes(sizes: dict[str, Any]) -> None:
    """Every size is a positive integer, and the head widths are whole."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be an integer, got {size!r}.")
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}.")
    for name in ("qk_dim", "v_dim"):
        if sizes[name] % sizes["num_heads"]:
            raise ValueError(
                f"{name} must be divisible by num_heads, got {name}={sizes[name]} and num_heads={sizes['num_heads']}."
            )


def _check_tokens(name: str, tokens: Tensor, projection: nn.Linear) -> None:
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tokens).__name__}.")
    if tokens.dim() != 3 or tokens.shape[2] != projection.in_features:
        raise ValueError(
            f"{name} must have shape (batch, length, {projection.in_features}), got {tuple(tokens.shape)}."
        )
