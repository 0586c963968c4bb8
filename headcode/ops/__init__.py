"""`hyper_attention`: attention whose per-pair codes configure a value network. Checks, backend choice, and the call.

Layout (batch, head, length, dim) as in torch's scaled_dot_product_attention. See `reference.py` for the mathematics.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from headcode.ops import reference
from headcode.ops.backends import BackendChoice, choose_backend
from headcode.ops.options import AttentionInputs, Problem, check_call
from headcode.ops.recurrent import linear_attention_recurrent
from headcode.ops.registry import METHODS, NORMS, POOLINGS, VALUE_NETS, Method, Norm, ValueNet

__all__ = [
    "METHODS",
    "NORMS",
    "POOLINGS",
    "VALUE_NETS",
    "BackendChoice",
    "Method",
    "Norm",
    "ValueNet",
    "attention_codes",
    "explain_backend",
    "hyper_attention",
    "linear_attention_recurrent",
]


def hyper_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    relative_bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    norm: str = "rms_head",
    value_net: str = "relu",
    pooling: str = "sum",
    dropout: float = 0.0,
    dropout_seed: int | None = None,
    query_offset: int | None = None,
    middle: Tensor | None = None,
    window: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention as a hypernetwork: (B, H, Tq, Dv).

        s[h,q,k] = scale · q[h,q]·k[h,k] + bias          z = norm(s), the code of the pair (q, k)
        linear:     o[h,q] = Σ_k z[h,q,k] v[h,k]
        relu_value: o[h,q] = Σ_k z[h,q,k] relu(v[h,k])
        two-layer:  o[h,q] = Σ_k z[h,q,k] φ(Σ_g z[g,q,k] v[g,k])
        relu_relu:  o[h,q] = Σ_k z[h,q,k] relu(Σ_f z[f,q,k] (W[f] relu(Σ_g z[g,q,k] v[g,k]) + b[f])),  middle = (W, b)

    Shapes: q (B, H, Tq, Dk), k (B, H, Tk, Dk), v (B, H, Tk, Dv), or 2·Dv channels for value_net="swiglu".

    Args:
        mask: broadcastable to (B, 1, Tq, Tk), shared by the heads. Boolean: True means keep. Floating: added to the
            scores, and -inf (no other number) means masked. A masked pair has code 0; a query that sees no key has
            output 0.
        bias: added to the scores, broadcastable to (B, H, Tq, Tk).
        relative_bias: (H, Tq+Tk-1), added to the scores; entry [h, k - q + Tq - 1], q and k counted from 0.
        causal: query i, at position `query_offset + i`, sees the keys up to its own position.
        scale: 1/sqrt(Dk) unless given.
        norm: one of NORMS. value_net: one of VALUE_NETS.
        pooling: over keys, `sum` (the paper's), `mean`, `sqrt` (the sum divided by the root of the number of keys that
            the query sees) or `max`.
        dropout: the share of (query, key) pairs whose code is zeroed, the same pairs for every batch entry and head;
            the others are scaled by 1/(1-dropout). A hash of (dropout_seed, position, key) decides, so that every
            backend drops the same pairs. With no seed, one is drawn from torch's global generator.
        query_offset: the position of the first query among the keys. By default the last query stands at the last
            key: Tk - Tq.
        middle: (H, Dv, Dv+1), only for value_net="relu_relu": what each head adds to the generated middle layer, its
            weights (Dv, Dv) and in the last column its bias.
        window: a query sees the keys that are fewer positions away than this; with `causal` itself and the
            `window - 1` before it.
        backend: `auto`, `reference`, `chunked`, …; `explain_backend` says what `auto` takes and why.

    Example:
        >>> q = k = v = torch.randn(2, 8, 5, 4)
        >>> hyper_attention(q, k, v, norm="rms_head", value_net="relu").shape
        torch.Size([2, 8, 5, 4])
    """
    inputs, options = check_call(
        AttentionInputs(q, k, v, mask, bias, relative_bias, middle),
        causal=causal,
        scale=scale,
        norm=norm,
        value_net=value_net,
        pooling=pooling,
        dropout=dropout,
        dropout_seed=dropout_seed,
        query_offset=query_offset,
        window=window,
    )
    choice = choose_backend(Problem.of(inputs, options), backend)
    with _without_autocast(q.device.type):
        if choice.name == "reference":
            return reference.hyper_attention(inputs, options)
        from headcode.ops import eager, registration

        name = "checked" if choice.name == "triton" and backend == "auto" else choice.name
        if eager.is_plain(*inputs):
            return eager.hyper_attention(inputs, options, name, twice_by_reference=backend == "auto")
        return registration.hyper_attention(inputs, options, name)


def attention_codes(
    q: Tensor,
    k: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    relative_bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    norm: str = "rms_head",
    query_offset: int | None = None,
    window: int | None = None,
) -> Tensor:
    """The codes that `hyper_attention` would use, before dropout: (B, H, Tq, Tk), differentiable.

    The code of the pair (q, k) is `codes[b, :, q, k]`, H numbers. Half-precision inputs give float32 codes.
    """
    # The values have no part in the codes; the keys stand in for them.
    inputs, options = check_call(
        AttentionInputs(q, k, k, mask, bias, relative_bias),
        causal=causal,
        scale=scale,
        norm=norm,
        value_net="linear",
        query_offset=query_offset,
        window=window,
    )
    with _without_autocast(q.device.type):
        return reference.attention_codes(inputs, options)


def explain_backend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    relative_bias: Tensor | None = None,
    middle: Tensor | None = None,
    backend: str = "auto",
    **options: Any,
) -> BackendChoice:
    """Which backend `hyper_attention` would take with the same arguments, why, and why not the others.

    Example:
        >>> q = k = v = torch.randn(2, 8, 5, 4)
        >>> explain_backend(q, k, v, backend="reference").name
        'reference'
    """
    if options.get("dropout_seed") is None:
        options["dropout_seed"] = 0  # asking draws no number from torch's generator
    inputs = AttentionInputs(q, k, v, mask, bias, relative_bias, middle)
    return choose_backend(Problem.of(*check_call(inputs, **options)), backend)


def _without_autocast(device: str) -> AbstractContextManager:
    """The op chooses its own precision, float32 for half-precision inputs; autocast would undo that."""
    if device == "meta":  # of which autocast knows nothing, not even whether it is on
        return nullcontext()
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
