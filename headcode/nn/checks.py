"""Checks of the layers' arguments. Every error says what was given, what is allowed and how to fix it."""

from typing import Any

import torch
from torch import Tensor, nn

from headcode.nn.plain import own_weight
from headcode.ops import METHODS, NORMS, VALUE_NETS
from headcode.ops.backends import CANDIDATES
from headcode.ops.options import check_choice

BACKEND_NAMES = ("auto", *CANDIDATES)
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


def why_not_recurrent(
    norm: str, value_net: str, pooling: str, causal: bool, position: str, dropout: float
) -> str | None:
    """Why a (Dk, Dv) state per head cannot replace the past keys and values of such a layer; None if it can."""
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
