"""`HyperAttention`: the drop-in layer."""

import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headcode.nn import ragged
from headcode.nn.cache import ContextCache, FastWeightState, KeyValueCache, LayerCache, unchanged_on_error
from headcode.nn.calls import AttentionCall, CodedLayer
from headcode.nn.checks import (
    BACKEND_NAMES,
    check_attention_inputs,
    check_rotary,
    check_sizes,
    resolve_method,
    resolve_pooling,
    why_not_recurrent,
)
from headcode.nn.initialisation import reset_linear, truncated_normal_
from headcode.nn.plain import apply_together
from headcode.nn.position import RelativeBias, alibi_band, rotate
from headcode.ops import VALUE_NETS, hyper_attention, linear_attention_recurrent
from headcode.ops.options import (
    AttentionInputs,
    check_call,
    check_choice,
    check_dropout,
    check_flag,
    check_pair_terms,
    check_tensors,
    check_window,
)
from headcode.ops.reference import DIVISORS, apply_codes, visible_pairs


class HyperAttention(nn.Module, CodedLayer):
    """Multi-head attention whose codes configure a value network per (query, key) pair.

        z[q,k] = norm_h(q[h]·k[h] / sqrt(Dk) + position bias)                       the code, H numbers
        linear value net:     y[q] = b_out + Σ_k (Σ_h z_h W_out[h] W_value[h]) x[k]
        two-layer value net:  y[q] = b_out + Σ_k (Σ_h z_h W_out[h]) φ(Σ_h z_h W_value[h] x[k])

    The value net `relu_relu` (method `hyla_deeper`) has one more generated layer, from weights of its own:
    Σ_k (Σ_h z_h W_out[h]) relu(Σ_h z_h (W_middle[h] relu(Σ_h z_h W_value[h] x[k]) + b_middle[h])).

    For users of `nn.MultiheadAttention`: batches come first, `key_padding_mask` means the same (True is ignored),
    a boolean `mask` means the opposite (True is kept, as in `scaled_dot_product_attention`), and the result is the
    output alone, unless `return_codes` asks for more. `MultiheadHyperAttention` keeps all of that layer's habits.

    Args:
        dim: width of the queries' tokens and of the output.
        num_heads: H, the length of the code.
        method: a named (norm, value_net) pair, one of METHODS; `norm` and `value_net` override its parts.
        pooling: how contributions of keys are combined, one of POOLINGS. Unless given, `sum` for softmax, whose codes
            sum to 1, and DEFAULT_POOLING for the other norms, so that the output's scale does not grow with the length.
            The paper's is `sum` for all.
        qk_dim, v_dim: total widths over all heads of queries and keys, and of values; `dim` unless given.
        context_dim: width of the keys' tokens, for cross-attention; `dim` unless given.
        value_dim: width of the values' tokens, where these are others than the keys'; `context_dim` unless given.
        num_kv_heads: so many heads of keys and values, each shared by as many neighbouring heads of queries. Every head
            keeps its own score, so that a code still has H numbers; what generates the first layer of a value network
            is the sums of its codes over the heads of each group.
        position: `none`, `relative` (T5 band with `num_buckets` buckets), `alibi` (a slope for each head) or `rotary`.
        causal: the default of `forward`.
        window: a query sees the keys that are fewer positions away; with `causal` itself and the window - 1 before it.
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
        pooling: str | None = None,
        qk_dim: int | None = None,
        v_dim: int | None = None,
        context_dim: int | None = None,
        value_dim: int | None = None,
        num_kv_heads: int | None = None,
        position: str = "none",
        num_buckets: int | None = None,
        causal: bool = False,
        window: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        qk_norm: bool = False,
        recurrent: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        qk_dim, v_dim, context_dim = (dim if width is None else width for width in (qk_dim, v_dim, context_dim))
        value_dim = context_dim if value_dim is None else value_dim
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"dim": dim, "num_heads": num_heads, "qk_dim": qk_dim, "v_dim": v_dim, "context_dim": context_dim}
        check_sizes({**sizes, "value_dim": value_dim, "num_kv_heads": num_kv_heads})
        norm, value_net = resolve_method(method, norm, value_net)
        pooling = resolve_pooling(pooling, norm)
        check_choice("position", position, ("none", "relative", "alibi", "rotary"))
        check_window(window)
        check_choice("backend", backend, BACKEND_NAMES)
        check_dropout("dropout", dropout)
        check_flag("causal", causal)
        if position == "relative" and num_buckets is None:
            raise ValueError("position='relative' needs num_buckets: the longest sequence length is a good choice.")
        check_rotary(position, qk_dim, num_heads)
        self.dim, self.context_dim, self.value_dim, self.v_dim = dim, context_dim, value_dim, v_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.norm, self.value_net, self.pooling = norm, value_net, pooling
        self.causal, self.window, self.dropout, self.position = causal, window, dropout, position
        self.recurrent, self.backend = recurrent, backend
        if recurrent and (reason := why_not_recurrent(norm, value_net, pooling, causal, position, dropout, window)):
            raise ValueError(f"recurrent=True is not possible: {reason}.")

        value_width = (2 * v_dim if VALUE_NETS[value_net].gated else v_dim) // num_heads * num_kv_heads
        self.query_proj = nn.Linear(dim, qk_dim, bias=bias)
        self.key_proj = nn.Linear(context_dim, qk_dim // num_heads * num_kv_heads, bias=bias)
        self.value_proj = nn.Linear(value_dim, value_width, bias=bias)
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
        cache: LayerCache | ContextCache | None = None,
        dropout_seed: int | None = None,
        query_offset: int | None = None,
        return_codes: bool = False,
        use: int = 0,
        positions: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(B, Tq, dim) to (B, Tq, dim). Nested tensors, of sequences of different lengths, give nested ones.

        Args:
            query: tokens (B, Tq, dim). key: tokens (B, Tk, context_dim), by default `query` (self-attention).
            value: tokens (B, Tk, value_dim), by default `key`.
            key_padding_mask: boolean (B, Tk), True where a key is to be ignored; with a KeyValueCache, for all keys
                so far.
            mask, bias: as in `hyper_attention`.
            queries: for self-attention, a contiguous range of positions whose outputs alone are computed.
            cache: keys and values of earlier calls: for self-attention those that this call extends (a KeyValueCache
                or a FastWeightState); for cross-attention a ContextCache, which the first call fills from its key and
                value, and the others read without being given them.
            dropout_seed: decides which pairs are dropped in training; drawn from torch's generator unless given.
            query_offset: of cross-attention whose two sequences have a common order: the position of the first query
                among the keys, Tk if it follows the last one. By default the last query stands at the last key.
            return_codes: give (output, codes), the codes (B, H, Tq, Tk) before dropout; differentiable.
            use: which use of this layer in one pass it is, for models that apply a layer several times.
            positions: of rotary self-attention, the position of each token (B or 1, T); by default they are counted.
        """
        if isinstance(query, Tensor) and query.is_nested:
            others: dict[str, Any] = {"key_padding_mask": key_padding_mask, "mask": mask, "bias": bias}
            others |= {"queries": queries, "cache": cache, "return_codes": return_codes or None, "positions": positions}
            options = {"causal": causal, "dropout_seed": dropout_seed, "query_offset": query_offset}
            return ragged.run_padded(self, query, key, value, others, **options)
        causal = self.causal if causal is None else causal
        check_attention_inputs(self, query, key, value, key_padding_mask, queries, cache, positions)
        crossing = key is not None or isinstance(cache, ContextCache)
        if query_offset is not None and not crossing:
            raise ValueError("query_offset is for cross-attention; queries of self-attention stand where they stand.")
        check_flag("return_codes", return_codes)
        apart = crossing and query_offset is None
        recurrent = isinstance(cache, FastWeightState) or (self.recurrent and cache is None)
        if recurrent and (reason := self._why_not_recurrent(key, mask, bias, causal, return_codes)):
            raise ValueError(f"The recurrent form is not possible: {reason}.")
        past = cache.length if isinstance(cache, (KeyValueCache, FastWeightState)) else 0
        with nullcontext() if cache is None else unchanged_on_error([cache]):
            q, k, v, start = self._heads(query, key, value, queries, cache)
            if query_offset is None:
                query_offset = k.shape[2] - q.shape[2] if crossing else past + start
            if self.position == "rotary" and positions is not None:
                q, k = rotate(q, positions[:, start : start + q.shape[2]]), rotate(k, positions)
            elif self.position == "rotary":
                q, k = rotate(q, query_offset), rotate(k, past)
            q, k = q.to(v.dtype), k.to(v.dtype)
            if recurrent:
                out = self._attend_recurrently(q, k, v, key_padding_mask, start, cache)
            else:
                if isinstance(cache, KeyValueCache):
                    k, v = cache.append(k, v)
                k, v = self.shared_by_heads(k, 1), self.shared_by_heads(v, 1)
                mask, bias = self._pair_terms(mask, bias, q, k)
                mask = merge_padding(mask, key_padding_mask)
                band = self._band(q, k, query_offset)
                call = AttentionCall(q, k, mask, bias, band, causal, self.norm, query_offset, self.window, apart, use)
                for observer in self.observers:
                    observer(call)
                out = self._attend(call, v, dropout_seed) if self.editor is None else self.editor(call, v)
        out = self.output_proj(out.transpose(1, 2).flatten(2))
        return (out, call.codes()) if return_codes else out

    def _heads(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        queries: slice | None,
        cache: LayerCache | ContextCache | None,
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        """`_project`, with queries and keys normalised, and keys and values from the cache of a context."""
        if not isinstance(cache, ContextCache):
            q, k, v, start = self._project(query, key, value, queries)
            return self._normalised(self.query_norm, q), self._normalised(self.key_norm, k), v, start
        if cache.keys is None or cache.values is None:
            q, k, v, _ = self._project(query, key, value, None)
            cache.keys, cache.values = self._normalised(self.key_norm, k), v
        else:
            q = self.query_proj(query).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        return self._normalised(self.query_norm, q), cache.keys, cache.values, 0

    @staticmethod
    def _normalised(norm: nn.Module | None, t: Tensor) -> Tensor:
        return t if norm is None else norm(t)

    def _band(self, q: Tensor, k: Tensor, query_offset: int) -> Tensor | None:
        """The relative bias (H, Tq+Tk-1)."""
        if self.relative_bias is not None:
            return self.relative_bias(q.shape[2], k.shape[2], query_offset).to(q.dtype)
        if self.position == "alibi":
            return alibi_band(self.num_heads, q.shape[2], k.shape[2], query_offset, q.device).to(q.dtype)
        return None

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
            window=call.window,
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
            joined = apply_together(query, projections)
        else:
            if queries is not None:
                start, stop, _ = queries.indices(query.shape[1])
            selected = query if queries is None else query[:, start:stop]
            context = query if key is None else key
            if value is None:
                joined = (self.query_proj(selected), *apply_together(context, projections[1:]))
            else:
                joined = (self.query_proj(selected), self.key_proj(context), self.value_proj(value))
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = (t.unflatten(2, (n, -1)).transpose(1, 2) for t, n in zip(joined, counts, strict=True))
        return q, k, v, start

    def _why_not_recurrent(
        self, key: Tensor | None, mask: Tensor | None, bias: Tensor | None, causal: bool, return_codes: bool
    ) -> str | None:
        if key is not None:
            return "the queries of cross-attention are not steps of the keys' sequence; use recurrent=False"
        if mask is not None or bias is not None:
            return "a mask or bias per pair has no finite state; use key_padding_mask"
        if self.observers or self.editor is not None or return_codes:
            return "codes are not formed; capture, edit or return them with recurrent=False"
        dropout = self.dropout if self.training else 0.0
        return why_not_recurrent(self.norm, self.value_net, self.pooling, causal, self.position, dropout, self.window)

    def _attend_recurrently(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        start: int,
        cache: LayerCache | ContextCache | None,
    ) -> Tensor:
        k, v = self.shared_by_heads(k, 1), self.shared_by_heads(v, 1)
        if key_padding_mask is not None:
            k, v = (t.masked_fill(key_padding_mask[:, None, :, None], 0.0) for t in (k, v))
        read = slice(start, start + q.shape[2])
        if q.shape[2] != k.shape[2]:
            q = F.pad(q, (0, 0, start, k.shape[2] - read.stop))
        state = cache.state if isinstance(cache, FastWeightState) else None
        out, state = linear_attention_recurrent(q, k, v, state=state)
        if self.pooling in DIVISORS:
            counted = torch.ones_like(k[:, 0, :, 0]) if key_padding_mask is None else (~key_padding_mask).to(k.dtype)
            seen = counted.double().cumsum(1)
            if isinstance(cache, FastWeightState):
                seen = seen if cache.seen is None else seen + cache.seen[:, None]
                cache.seen = seen[:, -1]
            out = out / DIVISORS[self.pooling](seen.clamp(min=1))[:, None, :, None].to(out.dtype)
        if isinstance(cache, FastWeightState):
            cache.state, cache.length = state, cache.length + k.shape[2]
        return out[:, :, read]

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, norm={self.norm!r}, value_net={self.value_net!r}, causal={self.causal}"


def merge_padding(mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
    """The op's mask (4 axes) without the keys that `padding` (B, Tk) marks."""
    if padding is None:
        return mask
    visible = ~padding[:, None, None, :]
    if mask is None:
        return visible
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -math.inf)
