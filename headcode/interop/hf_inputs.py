"""What the masks and positions of a call of a Hugging Face model mean for our layers, or why they are refused."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headcode.nn import DecodingCache, FastWeightState, ModelConfig
from headcode.nn.generation import BOUNDED_POSITIONS

ABSOLUTE = ("learned", "sinusoidal", "relative_learned")
"""Kinds of position that are added to tokens; the others only know how far two tokens are apart."""
_BANDED = ("relative", "relative_learned")


class Inputs(NamedTuple):
    """Arguments of `Transformer.run_layers` and `Transformer.add_positions`."""

    padding: Tensor | None
    """(B, T), True where a token is padding: of all tokens so far, or with a state of the new ones."""
    positions: Tensor | None
    """(B or 1, T) of tokens that do not stand one after the other from the cache's end on."""
    options: dict[str, Any]
    """Further ones of every attention layer."""


_PLAIN = Inputs(None, None, {})


def is_compiling() -> bool:
    """Whether the call is traced, so that nothing may depend on the numbers in a tensor."""
    return torch.compiler.is_compiling() or torch.compiler.is_exporting()


def has_pairs(attention_mask: Tensor | None) -> bool:
    return attention_mask is not None and attention_mask.dim() == 4


def read_inputs(
    config: ModelConfig,
    shape: tuple[int, ...],
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: DecodingCache | None,
) -> Inputs:
    """For new tokens of `shape` (B, T)."""
    past, length = 0 if cache is None else cache.length, shape[1]
    if config.position in BOUNDED_POSITIONS:
        _check_length(config, past + length)
    if attention_mask is None and position_ids is None:
        return _PLAIN
    positions = _positions(config, shape, attention_mask, position_ids, past)
    options: dict[str, Any] = {}
    padding = segments = None
    if attention_mask is None:
        segments = None if position_ids is None else _segments(position_ids, cache)
        if segments is not None:
            options["mask"] = (segments[:, None, :, None] == segments[:, None, None, :]).expand(shape[0], -1, -1, -1)
    elif has_pairs(attention_mask):
        options |= {"mask": _pair_mask(attention_mask, config), "causal": False}
    elif attention_mask.dim() == 2:
        _check_mask(attention_mask, (shape[0], past + length))
        keeps_a_state = cache is not None and isinstance(cache.layers[0], FastWeightState)
        padding = _padding(attention_mask, config, position_ids is not None)
        # A state has the past's padding behind it already; keys and values are masked anew each time.
        padding = padding[:, -length:] if keeps_a_state and padding is not None else padding
    else:
        raise ValueError(
            f"attention_mask must be (batch, tokens so far) or (batch, 1, new tokens, tokens so far), "
            f"got {tuple(attention_mask.shape)}."
        )
    if config.position == "rotary" and positions is not None and segments is None:
        options["positions"] = positions
    return Inputs(padding, positions if config.position in ABSOLUTE else None, options)


def _check_length(config: ModelConfig, length: int) -> None:
    if length > config.max_length:
        raise ValueError(
            f"This model (position {config.position!r}) has places for {config.max_length} tokens, got {length}; "
            f"shorten the prompt or max_new_tokens."
        )


def _check_mask(mask: Tensor, expected: tuple[int, int]) -> None:
    if tuple(mask.shape) != expected:
        raise ValueError(
            f"attention_mask must be (batch, tokens so far) = {expected}, got {tuple(mask.shape)}; with a cache it "
            f"covers the tokens in the cache too."
        )
    if mask.is_floating_point() and not is_compiling() and bool((mask < 0).any()):
        raise ValueError(
            "attention_mask (batch, tokens so far) is 1 where a token counts and 0 where it is padding, got negative "
            "numbers; only a mask of pairs, (batch, 1, new tokens, tokens so far), can have the form added to scores."
        )


def _padding(mask: Tensor, config: ModelConfig, has_positions: bool) -> Tensor | None:
    padding = mask == 0
    if is_compiling():
        return padding
    if not bool(padding.any()):
        return None
    if config.position in ABSOLUTE and not has_positions and bool(padding[:, 0].any()):
        raise ValueError(
            f"Padding on the left would shift the places of a model with position {config.position!r}; "
            f"give position_ids, give prompts of one length, or pad on the right to train."
        )
    return padding


def _pair_mask(mask: Tensor, config: ModelConfig) -> Tensor:
    """A mask (B, 1, Tq, Tk) of the library's as the op takes it: True is kept, and so is 0 of a floating one."""
    if not mask.is_floating_point():
        return mask != 0
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    if is_compiling():
        return ~hidden
    if bool(((mask != 0) & ~hidden).any()):
        raise ValueError("A floating attention_mask must be 0 (kept) or its dtype's lowest number (masked) everywhere.")
    return ~hidden


def _positions(
    config: ModelConfig, shape: tuple[int, ...], mask: Tensor | None, position_ids: Tensor | None, past: int
) -> Tensor | None:
    """position_ids wherever they differ from the order of the tokens and the layers have to know."""
    if position_ids is None or config.position == "none":
        return None
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, shape[0]) or position_ids.shape[1] != shape[1]:
        raise ValueError(f"position_ids must be (batch, new tokens) = {tuple(shape)}, got {tuple(position_ids.shape)}.")
    if is_compiling():
        if config.position in _BANDED:
            raise ValueError("position_ids of a T5 band cannot be checked in a compiled graph; leave them out.")
        return position_ids
    if torch.equal(position_ids, _counted(position_ids, past)):
        return None
    if config.position in _BANDED and not _are_shifted(position_ids, mask, shape, past):
        raise ValueError(
            f"A model with position {config.position!r} counts tokens in their order; its position_ids may leave out "
            f"padding or begin anew for packed sequences, and nothing else."
        )
    return position_ids


def _counted(position_ids: Tensor, past: int) -> Tensor:
    places = torch.arange(past, past + position_ids.shape[1], device=position_ids.device, dtype=position_ids.dtype)
    return places.expand_as(position_ids)


def _are_shifted(position_ids: Tensor, mask: Tensor | None, shape: tuple[int, ...], past: int) -> bool:
    """Whether all distances between visible tokens are those of their order."""
    if mask is None:
        return past == 0  # every step other than 1 begins another sequence
    if mask.dim() != 2:
        return False
    visible = (mask != 0)[:, -shape[1] :]
    counted = ((mask != 0).long().cumsum(1) - 1)[:, -shape[1] :]
    # Without gaps, the count differs from the order by a constant in each row.
    has_gaps = ((mask != 0).long().diff(dim=1) != 0).sum(1) > 1 + (mask[:, 0] == 0).long()
    return not bool(has_gaps.any()) and bool((~visible | (position_ids.expand_as(visible) == counted)).all())


def _segments(position_ids: Tensor, cache: DecodingCache | None) -> Tensor | None:
    """The number (B, T) of the packed sequence of each token; None if there is one sequence in each row."""
    if is_compiling() and cache is not None:
        return None
    begins = torch.diff(position_ids, dim=1) != 1
    if not is_compiling() and not bool(begins.any()):
        return None
    if cache is not None:
        raise ValueError("position_ids that begin anew pack several sequences into a row: call with use_cache=False.")
    return torch.cat((torch.zeros_like(begins[:, :1]), begins), 1).long().cumsum(1)
