"""`HyperAttention`: the drop-in layer."""

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headcode.nn.cache import FastWeightState, KeyValueCache, LayerCache, unchanged_on_error
from headcode.nn.calls import AttentionCall, CodedLayer
from headcode.nn.checks import (
    BACKEND_NAMES,
    check_padding,
    check_queries,
    check_rotary,
    check_sizes,
    check_tokens,
    resolve_method,
    why_not_recurrent,
)
from headcode.nn.initialisation import reset_linear, truncated_normal_
from headcode.nn.plain import are_plain_linears
from headcode.nn.position import RelativeBias, rotate
from headcode.ops import POOLINGS, VALUE_NETS, hyper_attention, linear_attention_recurrent
from headcode.ops.options import (
    AttentionInputs,
    check_call,
    check_choice,
    check_dropout,
    check_flag,
    check_pair_terms,
    check_tensors,
)
from headcode.ops.reference import apply_codes, visible_pairs


class HyperAttention(nn.Module, CodedLayer):
    """Multi-head attention whose codes configure a value network per (query, key) pair.

        z[q,k] = norm_h(q[h]·k[h] / sqrt(Dk) + position bias)                       the code, H numbers
        linear value net:     y[q] = b_out + Σ_k (Σ_h z_h W_out[h] W_value[h]) x[k]
        two-layer value net:  y[q] = b_out + Σ_k (Σ_h z_h W_out[h]) φ(Σ_h z_h W_value[h] x[k])

    The value net `relu_relu` (method `hyla_deeper`) has one more generated layer, from weights of its own:
    Σ_k (Σ_h z_h W_out[h]) relu(Σ_h z_h (W_middle[h] relu(Σ_h z_h W_value[h] x[k]) + b_middle[h])).

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

    middle_weight: nn.Parameter | None
    middle_bias: nn.Parameter | None

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
        check_choice("backend", backend, BACKEND_NAMES)
        check_dropout("dropout", dropout)
        check_flag("causal", causal)
        if position == "relative" and num_buckets is None:
            raise ValueError("position='relative' needs num_buckets: the longest sequence length is a good choice.")
        check_rotary(position, qk_dim, num_heads)
        self.dim, self.context_dim, self.v_dim, self.num_heads = dim, context_dim, v_dim, num_heads
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
        width = v_dim // num_heads
        deeper = VALUE_NETS[value_net].middle
        self.register_parameter("middle_weight", nn.Parameter(torch.empty(num_heads, width, width)) if deeper else None)
        self.register_parameter("middle_bias", nn.Parameter(torch.empty(num_heads, width)) if deeper and bias else None)
        self.relative_bias = None
        if position == "relative" and num_buckets is not None:
            self.relative_bias = RelativeBias(num_heads, num_buckets)
        self.query_norm = nn.RMSNorm(qk_dim // num_heads, eps=1e-6) if qk_norm else None
        self.key_norm = nn.RMSNorm(qk_dim // num_heads, eps=1e-6) if qk_norm else None
        self.observers, self.editor = [], None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for linear in (self.query_proj, self.key_proj, self.value_proj, self.output_proj):
            reset_linear(linear)
        self.reset_middle_layer()
        for part in (self.relative_bias, self.query_norm, self.key_norm):
            if part is not None:
                part.reset_parameters()

    def reset_middle_layer(self) -> None:
        if self.middle_weight is not None:
            # A hidden unit is summed up over heads and channels, as an output is.
            truncated_normal_(self.middle_weight, self.v_dim)
        if self.middle_bias is not None:
            nn.init.zeros_(self.middle_bias)

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
        query_offset: int | None = None,
        use: int = 0,
        positions: Tensor | None = None,
    ) -> Tensor:
        """(B, Tq, dim) to (B, Tq, dim).

        Args:
            query: tokens (B, Tq, dim). key: tokens (B, Tk, context_dim), by default `query` (self-attention).
            value: tokens (B, Tk, context_dim), by default `key`.
            key_padding_mask: boolean (B, Tk), True where a key is to be ignored; with a KeyValueCache, for all keys
                so far.
            mask, bias: as in `hyper_attention`.
            queries: for self-attention, a contiguous range of positions whose outputs alone are computed.
            cache: keys and values of earlier calls, which this call extends; self-attention only.
            dropout_seed: decides which pairs are dropped in training; drawn from torch's generator unless given.
            query_offset: of cross-attention whose two sequences have a common order: the position of the first query
                among the keys, Tk if it follows the last one. By default the last query stands at the last key.
            use: which use of this layer in one pass it is, for models that apply a layer several times.
            positions: of rotary self-attention, the position of each token (B or 1, T); by default they are counted.
        """
        causal = self.causal if causal is None else causal
        self._check_inputs(query, key, value, key_padding_mask, queries, cache)
        if query_offset is not None and key is None:
            raise ValueError("query_offset is for cross-attention; queries of self-attention stand where they stand.")
        apart = key is not None and query_offset is None
        recurrent = isinstance(cache, FastWeightState) or (self.recurrent and cache is None)
        if recurrent and (reason := self._why_not_recurrent(key, mask, bias, causal)):
            raise ValueError(f"The recurrent form is not possible: {reason}.")
        q, k, v, start = self._project(query, key, value, queries)
        past = 0 if cache is None else cache.length
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if query_offset is None:
            query_offset = past + start if key is None else k.shape[2] - q.shape[2]
        if self.position == "rotary" and positions is not None:
            q, k = rotate(q, positions[:, start : start + q.shape[2]]), rotate(k, positions)
        elif self.position == "rotary":
            q, k = rotate(q, query_offset), rotate(k, past)
        q, k = q.to(v.dtype), k.to(v.dtype)
        with nullcontext() if cache is None else unchanged_on_error([cache]):
            if recurrent:
                out = self._attend_recurrently(q, k, v, key_padding_mask, start, cache)
            else:
                if isinstance(cache, KeyValueCache):
                    k, v = cache.append(k, v)
                mask, bias = self._pair_terms(mask, bias, q, k)
                mask = merge_padding(mask, key_padding_mask)
                band = None
                if self.relative_bias is not None:
                    band = self.relative_bias(q.shape[2], k.shape[2], query_offset).to(q.dtype)
                call = AttentionCall(q, k, mask, bias, band, causal, self.norm, query_offset, apart, use)
                for observer in self.observers:
                    observer(call)
                out = self._attend(call, v, dropout_seed) if self.editor is None else self.editor(call, v)
        return self.output_proj(out.transpose(1, 2).flatten(2))

    def _pair_terms(
        self, mask: Tensor | None, bias: Tensor | None, q: Tensor, k: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """mask and bias with 4 axes and, where they are floating, in q's dtype (autocast may have chosen another)."""
        mask, bias = (t.to(q.dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in (mask, bias))
        check_tensors(q, k, None, bias)
        return check_pair_terms(mask, bias, q, k)

    def _attend(self, call: AttentionCall, v: Tensor, dropout_seed: int | None) -> Tensor:
        return hyper_attention(
            call.q,
            call.k,
            v,
            **call.code_arguments(),
            value_net=self.value_net,
            pooling=self.pooling,
            dropout=self.dropout if self.training else 0.0,
            dropout_seed=dropout_seed,
            middle=self.middle_layer(v.dtype),
            backend=self.backend,
        )

    def apply_codes(self, call: AttentionCall, codes: Tensor, v: Tensor) -> Tensor:
        """The op's result with these codes in place of the call's own, by the readable reference."""
        inputs, options = check_call(
            AttentionInputs(call.q, call.k, v, call.mask, middle=self.middle_layer(v.dtype)),
            causal=call.causal,
            value_net=self.value_net,
            pooling=self.pooling,
            query_offset=call.query_offset,
        )
        visible = visible_pairs(inputs, options)
        inputs = inputs.to(codes.dtype)
        pooled = apply_codes(codes, inputs.v, options.value_net, options.pooling, visible, inputs.middle)
        return pooled.to(v.dtype)

    def middle_layer(self, dtype: torch.dtype) -> Tensor | None:
        """Each head's part of the generated middle layer (H, Dv, Dv+1), the last column its bias; None without one."""
        if self.middle_weight is None:
            return None
        if self.middle_bias is None:
            return F.pad(self.middle_weight, (0, 1)).to(dtype)
        return torch.cat((self.middle_weight, self.middle_bias[..., None]), -1).to(dtype)

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

    def _why_not_recurrent(
        self, key: Tensor | None, mask: Tensor | None, bias: Tensor | None, causal: bool
    ) -> str | None:
        if key is not None:
            return "the queries of cross-attention are not steps of the keys' sequence; use recurrent=False"
        if mask is not None or bias is not None:
            return "a mask or bias per pair has no finite state; use key_padding_mask"
        if self.observers or self.editor is not None:
            return "codes are not formed; capture or edit them with recurrent=False"
        dropout = self.dropout if self.training else 0.0
        return why_not_recurrent(self.norm, self.value_net, self.pooling, causal, self.position, dropout)

    def _attend_recurrently(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        start: int,
        cache: LayerCache | None,
    ) -> Tensor:
        if key_padding_mask is not None:
            k, v = (t.masked_fill(key_padding_mask[:, None, :, None], 0.0) for t in (k, v))
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
        check_tokens("query", query, self.dim, self.query_proj)
        if key is not None:
            check_tokens("key", key, self.context_dim, self.key_proj)
        elif self.context_dim != self.dim:
            widths = f"context_dim {self.context_dim}, dim {self.dim}"
            raise ValueError(f"This layer is for cross-attention ({widths}): give key.")
        if value is not None:
            if key is None:
                raise ValueError("value was given without key; give both, or neither for self-attention.")
            check_tokens("value", value, self.context_dim, self.value_proj)
            if value.shape[:2] != key.shape[:2]:
                raise ValueError(
                    f"value must have key's batch and length {tuple(key.shape[:2])}, got {tuple(value.shape)}."
                )
        if key is not None and key.shape[0] != query.shape[0]:
            raise ValueError(f"key must have query's batch of {query.shape[0]}, got {key.shape[0]}.")
        if queries is not None and key is not None:
            raise ValueError("queries is for self-attention; for cross-attention slice the query tokens.")
        check_queries(queries, query.shape[1])
        if cache is not None and not isinstance(cache, (KeyValueCache, FastWeightState)):
            raise TypeError(f"cache must be a KeyValueCache or a FastWeightState, got {type(cache).__name__}.")
        if cache is not None and key is not None:
            raise ValueError("A cache is for self-attention; the keys of cross-attention do not grow.")
        past = cache.length if isinstance(cache, KeyValueCache) else 0
        check_padding(key_padding_mask, query.shape[0], past + (query if key is None else key).shape[1])

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, norm={self.norm!r}, value_net={self.value_net!r}, causal={self.causal}"


def _joined(x: Tensor, projections: tuple[nn.Linear, ...]) -> tuple[Tensor, ...]:
    """Several projections of the same tokens, in one matrix product if all are plain Linear layers."""
    if not are_plain_linears(projections):
        return tuple([projection(x) for projection in projections])
    weight = torch.cat([p.weight for p in projections])
    bias = None if projections[0].bias is None else torch.cat([p.bias for p in projections])
    return F.linear(x, weight, bias).split([p.out_features for p in projections], -1)


def merge_padding(mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
    """The op's mask (4 axes) without the keys that `padding` (B, Tk) marks."""
    if padding is None:
        return mask
    visible = ~padding[:, None, None, :]
    if mask is None:
        return visible
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -math.inf)
