"""Nested tensors: sequences of different lengths as one tensor, with torch's `jagged` or `strided` layout.

Layers compute with padding, which the kernels leave out, and give back what they got.
"""

from typing import Any

import torch
from torch import Tensor


def run_padded(
    layer: Any, query: Tensor, key: Tensor | None, value: Tensor | None, others: dict[str, Any], **options: Any
) -> Tensor:
    """An attention layer, with options, on nested tokens; `others` are arguments that cannot be given with them."""
    if given := [name for name, argument in others.items() if argument is not None]:
        raise ValueError(
            f"Nested tensors go without {', '.join(given)}: give None or False for it, or pad the tensors "
            "(torch.nested.to_padded_tensor)."
        )
    padded, padding = pad("query", query)
    context, context_padding = (None, padding) if key is None else pad("key", key)
    values = None if value is None else pad("value", value)[0]
    out: Tensor = layer(padded, context, values, key_padding_mask=context_padding, **options)
    return unpad(out, padding, query)


def pad(name: str, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (B, longest, dim) with zeros at the ends, and what of them is padding (B, longest)."""
    if not tokens.is_nested:
        raise ValueError(f"{name} must be a nested tensor as the other tokens are, got shape {tuple(tokens.shape)}.")
    lengths = torch.tensor([part.shape[0] for part in tokens.unbind()], device=tokens.device)
    padded = torch.nested.to_padded_tensor(tokens, 0.0)
    return padded, torch.arange(padded.shape[1], device=tokens.device) >= lengths[:, None]


def unpad(out: Tensor, padding: Tensor, like: Tensor) -> Tensor:
    """The tokens of out (B, longest, dim) that are no padding, nested as `like` is."""
    if like.layout == torch.jagged:
        nested: Any = like
        # With the very same offsets, the result can be added to `like`.
        return torch.nested.nested_tensor_from_jagged(out[~padding], nested.offsets())
    lengths = (~padding).sum(1).tolist()
    return torch.nested.as_nested_tensor([sequence[:n] for sequence, n in zip(out, lengths, strict=True)])
