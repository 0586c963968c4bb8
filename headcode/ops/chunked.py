"""The op on any device with bounded memory: a few queries at a time, everything recomputed in the backward pass.

Forward runs the reference on one chunk of (batch, query) rows at a time. Backward repeats the chunk's forward and
applies the chain rule by hand, so nothing of size Tq×Tk outlives a chunk.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headcode.ops import reference
from headcode.ops.options import AttentionGradients, AttentionInputs, AttentionOptions, compute_dtype
from headcode.ops.registry import NORMS, VALUE_NETS, ValueNet

CHUNK_ELEMENTS = 2**20
"""How many numbers one intermediate of a chunk may hold (at least one query row is always taken)."""


def saved_shape(batch: int, heads: int, queries: int, norm: str) -> list[int]:
    """Nothing is kept for the backward pass."""
    return [0]


def forward(inputs: AttentionInputs, options: AttentionOptions, *, out: Tensor, saved: Tensor) -> None:
    """Fill `out` (B, H, Tq, Dv)."""
    for batch, queries in _chunks(inputs, options):
        out[batch, :, queries] = reference.hyper_attention(*_chunk(inputs, options, batch, queries))


def backward(
    grad: Tensor,
    inputs: AttentionInputs,
    options: AttentionOptions,
    *,
    out: Tensor,
    saved: Tensor,
    gradients: AttentionGradients,
) -> None:
    """Fill the gradients of q, k, v and, where asked for, of the biases."""
    num_queries, num_keys = inputs.q.shape[2], inputs.k.shape[2]
    dtype = compute_dtype(inputs.q.dtype)
    totals: list[Any] = [
        None if t is None else torch.zeros(t.shape, dtype=dtype, device=t.device) for t in gradients[1:]
    ]
    total_k, total_v, total_bias, total_band, total_middle = totals
    for batch, queries in _chunks(inputs, options):
        chunk_q, chunk_k, chunk_v, grad_scores, chunk_middle = _chunk_backward(
            grad[batch, :, queries].to(dtype), *_chunk(inputs, options, batch, queries)
        )
        gradients.q[batch, :, queries] = chunk_q
        total_k[batch] += chunk_k
        total_v[batch] += chunk_v
        if total_bias is not None:
            _rows(total_bias, batch, queries).add_(grad_scores.sum_to_size(_rows(total_bias, batch, queries).shape))
        if total_band is not None:
            _band(total_band, num_queries, queries, num_keys).add_(dense_to_band(grad_scores.sum(0)))
        if total_middle is not None:
            total_middle += chunk_middle
    for gradient, total in zip(gradients[1:], totals, strict=True):
        if gradient is not None:
            gradient.copy_(total)


def _chunk_backward(
    grad: Tensor, inputs: AttentionInputs, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v, of the scores and of a middle layer, for queries that fit in memory."""
    inputs = inputs.to(grad.dtype)
    q, k, v = inputs[:3]
    visible = reference.visible_pairs(inputs, options)
    scores = reference.mask_scores(reference.scores(inputs, options.scale, visible), visible, options.norm)
    unmasked_codes = NORMS[options.norm].function(scores)
    codes = unmasked_codes if visible is None else unmasked_codes.masked_fill(~visible, 0.0)
    keep_scale = None
    if options.dropout > 0:
        keep_scale = reference.kept_pairs(inputs, options).to(codes.dtype) / (1 - options.dropout)
        codes = codes * keep_scale
    if visible is not None:  # as the forward pass does: nothing that is masked may reach a gradient
        codes, v = reference.spoil_codes(codes, v, visible)
        (q, _), (k, _) = reference.only_finite(q), reference.only_finite(k)
        grad = grad.masked_fill(~visible.any(-1, keepdim=True), 0.0)

    grad_codes, grad_v, grad_middle = _apply_codes_backward(grad, codes, v, inputs.middle, options, visible)
    if keep_scale is not None:
        grad_codes = grad_codes * keep_scale
    if visible is not None:
        grad_codes = grad_codes.masked_fill(~visible, 0.0)
    grad_scores = _norm_backward(options.norm, scores, unmasked_codes, grad_codes)
    if visible is not None:
        grad_scores = grad_scores.masked_fill(~visible, 0.0)
    grad_q = torch.einsum("bhqk,bhkd->bhqd", grad_scores, k) * options.scale
    grad_k = torch.einsum("bhqk,bhqd->bhkd", grad_scores, q) * options.scale
    return grad_q, grad_k, grad_v, grad_scores, grad_middle


def _apply_codes_backward(
    grad: Tensor,
    codes: Tensor,
    v: Tensor,
    middle: Tensor | None,
    options: AttentionOptions,
    visible: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of codes, v and a middle layer, through the value networks and the pooling over keys."""
    net, pooling = VALUE_NETS[options.value_net], options.pooling
    divisor = reference.pooling_divisor(pooling, visible, codes.shape[-1], grad)
    grad = grad if divisor is None else grad / divisor
    if net.activation is None:
        if pooling != "max":
            return torch.einsum("bhqd,bhkd->bhqk", grad, v), torch.einsum("bhqk,bhqd->bhkd", codes, grad), None
        share = _max_share(grad, codes[..., None] * v[:, :, None], visible)  # (B, H, Tq, Tk, Dv)
        return torch.einsum("bhqkd,bhkd->bhqk", share, v), torch.einsum("bhqk,bhqkd->bhkd", codes, share), None

    mixed = torch.einsum("bhqk,bhkd->bqkd", codes, v)
    hidden, derivative = _hidden_with_derivative(mixed, net)
    if middle is not None:
        weights, before = reference.generated_middle(codes, middle), reference.with_one(hidden)
        hidden, middle_derivative = _hidden_with_derivative((weights @ before[..., None]).squeeze(-1), net)
    if pooling != "max":
        grad_hidden = torch.einsum("bhqk,bhqd->bqkd", codes, grad)
        grad_codes = torch.einsum("bhqd,bqkd->bhqk", grad, hidden)
    else:
        share = _max_share(grad, codes[..., None] * hidden[:, None], visible)
        grad_hidden = torch.einsum("bhqk,bhqkd->bqkd", codes, share)
        grad_codes = torch.einsum("bhqkd,bqkd->bhqk", share, hidden)
    grad_middle = None
    if middle is not None:
        grad_hidden = middle_derivative(grad_hidden)
        grad_weights = grad_hidden[..., None] * before[..., None, :]  # (B, Tq, Tk, Dv, Dv+1)
        grad_codes = grad_codes + torch.einsum("bqked,hed->bhqk", grad_weights, middle)
        grad_middle = torch.einsum("bhqk,bqked->hed", codes, grad_weights)
        grad_hidden = (grad_hidden[..., None, :] @ weights[..., :-1]).squeeze(-2)
    grad_mixed = derivative(grad_hidden)
    grad_codes = grad_codes + torch.einsum("bqkd,bhkd->bhqk", grad_mixed, v)
    return grad_codes, torch.einsum("bhqk,bqkd->bhkd", codes, grad_mixed), grad_middle


def _hidden_with_derivative(mixed: Tensor, net: ValueNet) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The hidden layer u(mixed), and the function that pulls a gradient of u back to mixed."""
    activation = net.activation
    assert activation is not None
    gate, signal = mixed.chunk(2, -1) if net.gated else (mixed, None)
    activated = activation(gate)
    hidden = activated if signal is None else activated * signal

    def pull_back(grad: Tensor) -> Tensor:
        through = grad if signal is None else grad * signal
        if net.derivative is None:
            grad_gate = torch.func.vjp(activation, gate)[1](through)[0]
        else:
            grad_gate = through * net.derivative(gate)
        return grad_gate if signal is None else torch.cat((grad_gate, grad * activated), -1)

    return hidden, pull_back


def _norm_backward(norm: str, scores: Tensor, codes: Tensor, grad: Tensor) -> Tensor:
    entry = NORMS[norm]
    if entry.backward is None:
        return torch.func.vjp(entry.function, scores)[1](grad)[0]
    return entry.backward(scores, codes, grad)


def _max_share(grad: Tensor, contributions: Tensor, visible: Tensor | None) -> Tensor:
    """Each key's share of the gradient of a maximum over keys; ties share evenly, as torch.amax does."""
    if contributions.shape[3] == 0:  # no maximum
        return contributions
    if visible is not None:
        contributions = contributions.masked_fill(~visible[..., None], float("-inf"))
    wins = contributions == contributions.amax(3, keepdim=True)
    if visible is not None:
        wins = wins & visible[..., None]
    return grad[:, :, :, None] * wins / wins.sum(3, keepdim=True).clamp(min=1)


def _chunks(inputs: AttentionInputs, options: AttentionOptions) -> Iterator[tuple[slice, slice]]:
    """Slices of batch and queries whose intermediates stay below CHUNK_ELEMENTS."""
    batch, heads, num_queries, _ = inputs.q.shape
    _, _, num_keys, width = inputs.v.shape
    per_pair = heads * width if options.pooling == "max" else max(heads, width)
    if inputs.middle is not None:
        per_pair = max(per_pair, inputs.middle[0].numel())
    row = max(per_pair, 1) * max(num_keys, 1)
    rows = max(1, CHUNK_ELEMENTS // row)
    query_step = min(rows, max(num_queries, 1))
    batch_step = max(1, rows // max(num_queries, 1))
    for b in range(0, batch, batch_step):
        for i in range(0, num_queries, query_step):
            yield slice(b, min(b + batch_step, batch)), slice(i, min(i + query_step, num_queries))


def _chunk(
    inputs: AttentionInputs, options: AttentionOptions, batch: slice, queries: slice
) -> tuple[AttentionInputs, AttentionOptions]:
    """The call for some batch entries and queries alone."""
    q, k, v, mask, bias, relative_bias, middle = inputs
    chunk = AttentionInputs(
        q[batch, :, queries],
        k[batch],
        v[batch],
        None if mask is None else _rows(mask, batch, queries),
        None if bias is None else _rows(bias, batch, queries),
        None if relative_bias is None else _band(relative_bias, q.shape[2], queries, k.shape[2]),
        middle,
    )
    return chunk, replace(options, query_offset=options.query_offset + queries.start)


def _rows(t: Tensor, batch: slice, queries: slice) -> Tensor:
    """A view of the chunk's rows of a 4-D tensor whose batch and query axes may be broadcast."""
    t = t if t.shape[0] == 1 else t[batch]
    return t if t.shape[2] == 1 else t[:, :, queries]


def _band(band: Tensor, num_queries: int, queries: slice, num_keys: int) -> Tensor:
    """A view of the part of the band (H, Tq+Tk-1) that the chunk's queries see: (H, rows+Tk-1)."""
    start = num_queries - queries.stop
    return band[:, start : start + (queries.stop - queries.start) + num_keys - 1]


def dense_to_band(dense: Tensor) -> Tensor:
    """The transpose of `band_to_dense`: sums (H, Tq, Tk) along its diagonals, to (H, Tq+Tk-1)."""
    heads, num_queries, num_keys = dense.shape
    # Writing row q shifted by its place on the band turns diagonals into columns.
    shifted = dense.new_zeros(heads, num_queries, num_queries + num_keys)
    shifted[:, :, :num_keys] = dense.flip(1)
    return (
        shifted.view(heads, -1)[:, : num_queries * (num_queries + num_keys - 1)]
        .view(heads, num_queries, num_queries + num_keys - 1)
        .sum(1)
    )
