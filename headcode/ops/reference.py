"""The op as the paper writes it: the readable truth that every kernel is held to.

With scores s = q·k / sqrt(Dk) + bias, the code of a pair is z = norm(s), H numbers. The code configures the network
that turns key k's token into a contribution to query q:

    linear      o[h, q] = Σ_k z[h, q, k] v[h, k]
    relu_value  o[h, q] = Σ_k z[h, q, k] relu(v[h, k])      (for every backend the linear one, see `options.check_call`)
    two-layer   u[q, k] = φ(Σ_h z[h, q, k] v[h, k])        o[h, q] = Σ_k z[h, q, k] u[q, k]
    three-layer u[q, k] = φ(Σ_h z[h, q, k] (W[h] φ(Σ_g z[g, q, k] v[g, k]) + b[h])),        o as before

Everything here materialises (B, H, Tq, Tk), two-layer nets (B, Tq, Tk, Dv), and three-layer ones (B, Tq, Tk, Dv, Dv).

A masked pair has code 0 and adds nothing to output or gradients, whatever its key and value hold. But 0 · NaN is NaN:
where there is a mask, products are formed from finite numbers alone, and the visible pairs of a number that is not
finite are made NaN afterwards.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from headcode.ops.dropout import keep_mask
from headcode.ops.options import AttentionInputs, AttentionOptions, compute_dtype
from headcode.ops.registry import NORMS, VALUE_NETS


def band_to_dense(band: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """(H, Tq+Tk-1) -> (H, Tq, Tk): entry [h, q, k] is band[h, k - q + Tq - 1]."""
    if num_queries == 0 or num_keys == 0:
        return band.new_zeros(band.shape[0], num_queries, num_keys)
    return band.unfold(1, num_keys, 1).flip(1)


def visible_pairs(inputs: AttentionInputs, options: AttentionOptions) -> Tensor | None:
    """The boolean mask of pairs that take part, broadcastable to (B, 1, Tq, Tk); None when all do."""
    q, k, visible = inputs.q, inputs.k, inputs.mask
    if not options.causal and options.window is None:
        return visible
    positions = torch.arange(q.shape[2], device=q.device) + options.query_offset
    apart = positions[:, None] - torch.arange(k.shape[2], device=q.device)  # (Tq, Tk)
    if options.causal:
        visible = apart >= 0 if visible is None else (apart >= 0) & visible
    if options.window is not None:
        near = apart.abs() < options.window
        visible = near if visible is None else near & visible
    return visible


def only_finite(t: Tensor) -> tuple[Tensor, Tensor]:
    """`t` (B, H, T, D) with 0 for every number that is not finite, and which rows (B, H, T) had one."""
    finite = t.isfinite()
    return t.masked_fill(~finite, 0.0), ~finite.all(-1)


def scores(inputs: AttentionInputs, scale: float, visible: Tensor | None) -> Tensor:
    """(B, H, Tq, Tk)"""
    q, k, _, _, bias, relative_bias, _ = inputs
    if visible is None:
        result = torch.einsum("bhqd,bhkd->bhqk", q * scale, k)
    else:
        (q, spoilt_q), (k, spoilt_k) = only_finite(q), only_finite(k)
        result = torch.einsum("bhqd,bhkd->bhqk", q * scale, k)
        result = result.masked_fill(spoilt_q[:, :, :, None] | spoilt_k[:, :, None], float("nan"))
    if relative_bias is not None:
        result = result + band_to_dense(relative_bias, q.shape[2], k.shape[2])
    return result if bias is None else result + bias


def normalise(score: Tensor, visible: Tensor | None, norm: str) -> Tensor:
    """Scores to codes. A masked pair has code exactly 0; a row with no visible key is all 0, never NaN."""
    codes = NORMS[norm].function(mask_scores(score, visible, norm))
    return codes if visible is None else codes.masked_fill(~visible, 0.0)


def mask_scores(score: Tensor, visible: Tensor | None, norm: str) -> Tensor:
    """What the norm's function sees at masked pairs: -inf if it mixes keys, otherwise 0."""
    if visible is None:
        return score
    if NORMS[norm].over != "key":
        return score.masked_fill(~visible, 0.0)
    # A row of only -inf has no softmax: such rows see zeros instead, and their codes are zeroed afterwards.
    blind = ~visible.any(-1, keepdim=True)
    return score.masked_fill(~visible, float("-inf")).masked_fill(blind, 0.0)


def hidden_layer(codes: Tensor, v: Tensor, value_net: str, middle: Tensor | None = None) -> Tensor:
    """The last hidden activations u[q, k] of every pair's value network: (B, Tq, Tk, Dv)."""
    net = VALUE_NETS[value_net]
    assert net.activation is not None
    mixed = torch.einsum("bhqk,bhkd->bqkd", codes, v)
    if net.gated:
        gate, signal = mixed.chunk(2, -1)
        return net.activation(gate) * signal
    hidden = net.activation(mixed)
    if middle is None:
        return hidden
    weights, biased = generated_middle(codes, middle), with_one(hidden)
    return net.activation((weights @ biased[..., None]).squeeze(-1))


def generated_middle(codes: Tensor, middle: Tensor) -> Tensor:
    """The middle layer of every pair's value network, weights and bias: (B, Tq, Tk, Dv, Dv+1)."""
    return torch.einsum("bhqk,hed->bqked", codes, middle)


def with_one(hidden: Tensor) -> Tensor:
    """With a last channel of ones, which a bias is the weight of."""
    return F.pad(hidden, (0, 1), value=1.0)


def apply_codes(
    codes: Tensor, v: Tensor, value_net: str, pooling: str, visible: Tensor | None, middle: Tensor | None = None
) -> Tensor:
    """Run the value network that each pair's code configures and pool over the keys: (B, H, Tq, Dv)."""
    if visible is not None:
        codes, v = spoil_codes(codes, v, visible)
    linear = VALUE_NETS[value_net].activation is None
    values = v if linear else hidden_layer(codes, v, value_net, middle)
    layout = "bhkd" if linear else "bqkd"
    if pooling != "max":
        out = torch.einsum(f"bhqk,{layout}->bhqd", codes, values)
        divisor = pooling_divisor(pooling, visible, codes.shape[-1], out)
        out = out if divisor is None else out / divisor
    else:
        contributions = codes[..., None] * (values[:, :, None] if linear else values[:, None])  # (B, H, Tq, Tk, Dv)
        if visible is not None:
            contributions = contributions.masked_fill(~visible[..., None], float("-inf"))
        out = contributions.amax(3) if contributions.shape[3] else contributions.sum(3)
    # A query that sees no key has output 0, and the gradient of that output goes nowhere.
    return out if visible is None else out.masked_fill(~visible.any(-1, keepdim=True), 0.0)


def spoil_codes(codes: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Finite values, and codes that are NaN where a visible value was not finite."""
    v, spoilt = only_finite(v)
    return codes.masked_fill(visible & spoilt[:, :, None], float("nan")), v


DIVISORS: dict[str, Callable[[Tensor], Tensor]] = {"mean": lambda count: count, "sqrt": torch.sqrt}
"""pooling -> what a sum over so many keys is divided by."""


def pooling_divisor(pooling: str, visible: Tensor | None, num_keys: int, like: Tensor) -> Tensor | None:
    """What the sum over keys is divided by, broadcastable to (B, H, Tq, Dv); None if by nothing."""
    return DIVISORS[pooling](key_count(visible, num_keys, like)) if pooling in DIVISORS else None


def key_count(visible: Tensor | None, num_keys: int, like: Tensor) -> Tensor:
    """How many keys each query sees, at least 1, broadcastable to (B, H, Tq, Dv)."""
    if visible is None:
        return torch.full((), max(num_keys, 1), dtype=like.dtype, device=like.device)
    visible = visible.expand(*visible.shape[:-1], num_keys)
    return visible.sum(-1).clamp(min=1).to(like.dtype)[..., None]


def attention_codes(inputs: AttentionInputs, options: AttentionOptions) -> Tensor:
    """The codes z of every pair: (B, H, Tq, Tk)."""
    inputs = inputs.to(compute_dtype(inputs.q.dtype))
    visible = visible_pairs(inputs, options)
    return normalise(scores(inputs, options.scale, visible), visible, options.norm)


def kept_pairs(inputs: AttentionInputs, options: AttentionOptions) -> Tensor:
    """The boolean mask (Tq, Tk) of pairs that dropout keeps."""
    q, k = inputs.q, inputs.k
    return keep_mask(options.dropout, options.dropout_seed, q.shape[2], k.shape[2], options.query_offset, q.device)


def hyper_attention(inputs: AttentionInputs, options: AttentionOptions) -> Tensor:
    """The whole op: scores, codes, dropout, value networks, pooling."""
    codes = attention_codes(inputs, options)
    if options.dropout > 0:
        codes = codes * kept_pairs(inputs, options) / (1 - options.dropout)
    visible = visible_pairs(inputs, options)
    v, middle = inputs.v.to(codes.dtype), inputs.middle if inputs.middle is None else inputs.middle.to(codes.dtype)
    return apply_codes(codes, v, options.value_net, options.pooling, visible, middle).to(inputs.q.dtype)
