"""Checks of the layers' arguments. Every error says what was given, what is allowed and how to fix it."""

from typing import Any

import torch
from torch import Tensor, nn

from headcode.nn.cache import ContextCache, FastWeightState, KeyValueCache
from headcode.nn.plain import own_weight
from headcode.ops import METHODS, NORMS, POOLINGS, VALUE_NETS
from headcode.ops.backends import CANDIDATES
from headcode.ops.options import check_choice

BACKEND_NAMES = ("auto", *CANDIDATES)
DEFAULT_POOLING = "mean"
"""Of layers whose codes are not normalised over keys."""
LARGEST_SIZE = 2**31 - 1


def check_sizes(sizes: dict[str, Any]) -> None:
    """Every size is a positive integer, and the head widths are whole."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be an integer, got {size!r}.")
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}.")
        if size > LARGEST_SIZE:
            raise ValueError(f"{name} must be at most {LARGEST_SIZE}, got {size}.")
    if "num_kv_heads" in sizes and sizes["num_heads"] % sizes["num_kv_heads"]:
        raise ValueError(
            f"num_heads must be divisible by num_kv_heads, got num_heads={sizes['num_heads']} and "
            f"num_kv_heads={sizes['num_kv_heads']}."
        )
    for name in ("qk_dim", "v_dim"):
        if name in sizes and sizes[name] % sizes["num_heads"]:
            raise ValueError(
                f"{name} must be divisible by num_heads, got {name}={sizes[name]} and num_heads={sizes['num_heads']}."
            )


def check_cross(cross_layers: int, num_layers: int, causal: bool) -> None:
    if not 0 <= cross_layers <= num_layers:
        raise ValueError(f"cross_layers must lie in 0..{num_layers}, the number of layers, got {cross_layers}.")
    if cross_layers and causal:
        raise ValueError(
            "cross_layers divides a sequence into context and answers, which a causal model does not have: "
            "use causal=False."
        )


def check_auxiliary(auxiliary_dims: tuple[int, ...], num_layers: int, cross_layers: int) -> None:
    depth = len(auxiliary_dims)
    if any(size < 1 for size in auxiliary_dims):
        raise ValueError(f"auxiliary_dims must be 1 or more each, got {auxiliary_dims}.")
    if depth and (num_layers <= depth or cross_layers):
        raise ValueError(
            f"Auxiliary targets that reach {depth} layers back need num_layers of {depth + 1} or more and "
            f"cross_layers=0, got {num_layers} and {cross_layers}: change these, or train with auxiliary_weight=0."
        )


def check_experts(num_experts: int, experts_per_token: int) -> None:
    """With one expert there is nothing to choose, and the default of experts_per_token says nothing."""
    if num_experts > 1 and not 2 <= experts_per_token <= num_experts:
        raise ValueError(
            f"experts_per_token must lie in 2..{num_experts}, the number of experts, got {experts_per_token}: "
            f"a softmax over one expert is 1 and teaches the router nothing."
        )
    if num_experts == 1 and experts_per_token != 2:
        raise ValueError(f"experts_per_token={experts_per_token} needs num_experts of 2 or more, got 1.")


def check_rotary(position: str, qk_dim: int, num_heads: int) -> None:
    if position == "rotary" and (qk_dim // num_heads) % 2:
        raise ValueError(f"position 'rotary' needs an even head width, got qk_dim / num_heads = {qk_dim // num_heads}.")


def check_tokens(name: str, tokens: Tensor, width: int, projection: nn.Module) -> None:
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tokens).__name__}.")
    if tokens.is_nested:
        raise ValueError(f"{name} is a nested tensor, and query is none: nest all tokens, or none.")
    if tokens.dim() != 3 or tokens.shape[2] != width:
        raise ValueError(f"{name} must have shape (batch, length, {width}), got {tuple(tokens.shape)}.")
    weight = own_weight(projection, nn.Linear)  # another kind of projection knows itself what it takes
    if weight is None or tokens.dtype == weight.dtype:
        return
    if not (tokens.is_floating_point() and torch.is_autocast_enabled(tokens.device.type)):
        dtype = weight.dtype
        raise TypeError(
            f"{name} must have the layer's dtype {dtype}, got {tokens.dtype}; convert it with .to({dtype})."
        )


def check_queries(queries: slice | None, length: int) -> None:
    """A contiguous range that names at least one position."""
    if queries is None:
        return
    if not isinstance(queries, slice) or queries.step not in (None, 1):
        raise ValueError(f"queries must be a slice with step 1, for example slice(-4, None), got {queries!r}.")
    if any(end is not None and not isinstance(end, (int, torch.SymInt)) for end in (queries.start, queries.stop)):
        raise ValueError(f"queries must be a slice of integers, for example slice(-4, None), got {queries!r}.")
    start, stop, _ = queries.indices(length)
    if start >= stop:
        raise ValueError(f"queries must name at least one of {length} positions, got {queries!r}.")


def check_answers(queries: slice | None, length: int) -> int:
    """How many positions the second sequence of a model with cross-attention has: the answers, at the end."""
    if queries is None:
        raise ValueError(
            "A model with cross_layers needs queries, the positions of its second sequence, such as slice(-4, None)."
        )
    start, stop, _ = queries.indices(length)
    if stop != length or start == 0:
        raise ValueError(
            f"The queries of a model with cross_layers are the last positions, after at least one of context, "
            f"got {queries!r} of {length}."
        )
    return length - start


def check_padding(key_padding_mask: Tensor | None, batch: int, num_keys: int) -> None:
    if key_padding_mask is None:
        return
    if not isinstance(key_padding_mask, Tensor) or key_padding_mask.dtype != torch.bool:
        raise TypeError("key_padding_mask must be a boolean tensor, True where a key is to be ignored.")
    if tuple(key_padding_mask.shape) != (batch, num_keys):
        given = tuple(key_padding_mask.shape)
        raise ValueError(f"key_padding_mask must have shape (batch, keys) = {(batch, num_keys)}, got {given}.")


def resolve_method(method: str, norm: str | None, value_net: str | None) -> tuple[str, str]:
    """The norm and value net of a method, with overrides."""
    check_choice("method", method, METHODS)
    norm = METHODS[method].norm if norm is None else norm
    value_net = METHODS[method].value_net if value_net is None else value_net
    check_choice("norm", norm, NORMS)
    check_choice("value_net", value_net, VALUE_NETS)
    return norm, value_net


def resolve_pooling(pooling: str | None, norm: str) -> str:
    """The pooling itself; where none is given, what keeps the scale of a layer's output at any length."""
    if pooling is None:
        return "sum" if NORMS[norm].over == "key" else DEFAULT_POOLING
    check_choice("pooling", pooling, POOLINGS)
    return pooling


def check_attention_inputs(
    layer: Any,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    key_padding_mask: Tensor | None,
    queries: slice | None,
    cache: Any,
    positions: Any,
) -> None:
    """Of a HyperAttention layer."""
    check_tokens("query", query, layer.dim, layer.query_proj)
    num_keys = _check_cache(layer, query, key, queries, cache)
    if key is not None:
        check_tokens("key", key, layer.context_dim, layer.key_proj)
        if key.shape[0] != query.shape[0]:
            raise ValueError(f"key must have query's batch of {query.shape[0]}, got {key.shape[0]}.")
        num_keys += key.shape[1]
    elif not isinstance(cache, ContextCache):
        if {layer.context_dim, layer.value_dim} != {layer.dim}:
            widths = f"context_dim {layer.context_dim}, dim {layer.dim}"
            raise ValueError(f"This layer is for cross-attention ({widths}): give key.")
        num_keys += query.shape[1]
    if value is not None:
        if key is None:
            raise ValueError("value was given without key; give both, or neither for self-attention.")
        check_tokens("value", value, layer.value_dim, layer.value_proj)
        if value.shape[:2] != key.shape[:2]:
            raise ValueError(
                f"value must have key's batch and length {tuple(key.shape[:2])}, got {tuple(value.shape)}."
            )
    elif key is not None and layer.value_dim != layer.context_dim:
        widths = f"value_dim {layer.value_dim}, context_dim {layer.context_dim}"
        raise ValueError(f"This layer has values of their own ({widths}): give value.")
    if queries is not None and key is not None:
        raise ValueError("queries is for self-attention; for cross-attention slice the query tokens.")
    check_queries(queries, query.shape[1])
    check_padding(key_padding_mask, query.shape[0], num_keys)
    if positions is not None:
        _check_positions(layer, positions, query, key is not None or isinstance(cache, ContextCache))


def _check_positions(layer: Any, positions: Any, query: Tensor, crossing: bool) -> None:
    if crossing or layer.position != "rotary":
        raise ValueError("positions is for self-attention of a layer with position='rotary'.")
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions must be a torch.Tensor, got {type(positions).__name__}.")
    batch, length = query.shape[:2]
    if positions.dim() != 2 or positions.shape[0] not in (1, batch) or positions.shape[1] != length:
        shapes = f"{(batch, length)} or {(1, length)}"
        raise ValueError(f"positions must have shape (batch, length) = {shapes}, got {tuple(positions.shape)}.")


def _check_cache(layer: Any, query: Tensor, key: Tensor | None, queries: slice | None, cache: Any) -> int:
    """That this cache can be used so; returns how many keys it has already."""
    if cache is None:
        return 0
    held = None if isinstance(cache, FastWeightState) else getattr(cache, "keys", None)
    if isinstance(held, Tensor) and held.shape[1] != layer.num_kv_heads:
        raise ValueError(
            f"The cache holds keys of {held.shape[1]} heads, this layer has {layer.num_kv_heads}: "
            "each layer needs a cache of its own."
        )
    if isinstance(cache, ContextCache):
        if (key is None) == (cache.keys is None):
            raise ValueError(
                "An empty ContextCache needs key, the context that fills it."
                if key is None
                else "The ContextCache holds a context already: leave key out, or start a new cache."
            )
        if queries is not None:
            raise ValueError("queries is for self-attention; for cross-attention slice the query tokens.")
        if cache.batch_size not in (None, query.shape[0]):
            raise ValueError(f"The cache holds a batch of {cache.batch_size}, got {query.shape[0]}; start a new cache.")
        return cache.length
    if not isinstance(cache, (KeyValueCache, FastWeightState)):
        kinds = "a KeyValueCache, a FastWeightState or a ContextCache"
        raise TypeError(f"cache must be {kinds}, got {type(cache).__name__}.")
    if key is not None:
        raise ValueError(
            "Such a cache is for self-attention; the keys of cross-attention do not grow: use a ContextCache."
        )
    return cache.length if isinstance(cache, KeyValueCache) else 0


def why_not_recurrent(
    norm: str,
    value_net: str,
    pooling: str,
    causal: bool,
    position: str,
    dropout: float,
    window: int | None = None,
) -> str | None:
    """Why a (Dk, Dv) state per head cannot replace the past keys and values of such a layer; None if it can."""
    if norm != "none" or value_net != "linear" or pooling == "max":
        return (
            "only the method 'linear' (norm 'none', value net 'linear', any pooling but 'max') is a sum of outer "
            f"products, this layer has norm {norm!r}, value net {value_net!r} and pooling {pooling!r}"
        )
    if window is not None:
        return "a state forgets no key when it leaves the window; set window=None"
    if not causal:
        return "a state only carries the past; set causal=True"
    if position in ("relative", "alibi"):
        band = "the T5 band" if position == "relative" else "ALiBi"
        return (
            f"{band} adds a bias to every (query, key) pair, which no finite state carries; "
            "use position 'none' or 'rotary'"
        )
    if dropout > 0:
        return "attention dropout acts on (query, key) pairs, which are not formed; set dropout=0"
    return None
