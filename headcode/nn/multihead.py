"""`MultiheadHyperAttention`: HyperAttention with the signature and the habits of `nn.MultiheadAttention`."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from headcode.nn import ragged
from headcode.nn.attention import HyperAttention
from headcode.ops.options import check_flag
from headcode.private_api import functional_transforms_active

HIDING = -1e4
"""Added to the scores, so low a number hides a pair from any softmax, and -1e9 or a dtype's lowest number are meant to.
It would not hide it from a code that is normalised across heads."""


class MultiheadHyperAttention(nn.Module):
    """In the place of `nn.MultiheadAttention`: same arguments, same defaults, same meaning of masks, same results.

    `self.attention` is the HyperAttention that computes; codes are captured and edited there. A state_dict of
    `nn.MultiheadAttention` loads, and with `method="softmax"` gives the same outputs. What differs: a query whose keys
    are all masked has output 0 where torch gives NaN; dropout drops (query, key) pairs, the same for all heads, and not
    single weights; the weights that are returned are the codes, before dropout. In a floating mask -10,000 and less
    hide a pair under every norm, as they do from a softmax.

    Args:
        embed_dim, num_heads, dropout, bias, kdim, vdim, batch_first, device, dtype: as in `nn.MultiheadAttention`.
        add_bias_kv, add_zero_attn: refused.
        options: further ones of HyperAttention: `method`, `norm`, `value_net`, `pooling`, `num_kv_heads`, `window`, …

    Example:
        >>> layer = nn.TransformerEncoderLayer(64, 8, batch_first=True)
        >>> layer.self_attn = MultiheadHyperAttention(64, 8, batch_first=True)
        >>> layer(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    _qkv_same_embed_dim = False
    """Whether torch's encoder layers may pass the weights on to their own softmax kernel instead of a call."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        for name, given in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if given:
                raise ValueError(
                    f"{name}=True is not supported: append the key and value to the context, or leave it out."
                )
        check_flag("batch_first", batch_first)
        self.embed_dim, self.num_heads, self.dropout, self.batch_first = embed_dim, num_heads, dropout, batch_first
        self.kdim, self.vdim = (embed_dim if width is None else width for width in (kdim, vdim))
        options = {"dropout": dropout, "bias": bias, "context_dim": self.kdim, "value_dim": self.vdim, **options}
        self.attention = HyperAttention(embed_dim, num_heads, **options).to(device, dtype)
        self.head_dim = embed_dim // num_heads
        self.register_load_state_dict_pre_hook(_rename_weights)

    @property
    def in_proj_weight(self) -> Tensor:
        """The weights of queries, keys and values, one above the other, as torch's encoders look at them."""
        return torch.cat([projection.weight for projection in self._projections()])

    @property
    def in_proj_bias(self) -> Tensor | None:
        biases = [projection.bias for projection in self._projections()]
        return None if biases[0] is None else torch.cat(biases)

    def _projections(self) -> list[Any]:
        return [self.attention.query_proj, self.attention.key_proj, self.attention.value_proj]

    @property
    def out_proj(self) -> nn.Linear:
        return self.attention.output_proj

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Output, and the codes (B, Tq, Tk) averaged over the heads, (B, H, Tq, Tk) as they are, or None.

        Args:
            query, key, value: (T, B, dim), with `batch_first` (B, T, dim), or (T, dim) without a batch.
            key_padding_mask: (B, Tk); boolean: True is ignored; floating: added to the scores.
            attn_mask: (Tq, Tk) or (B·H, Tq, Tk); boolean: True is ignored; floating: added to the scores.
            is_causal: says that `attn_mask` is the causal one; it is believed.
        """
        tokens = [query, key, value]
        _check_tensors(tokens, {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask})
        itself = key is query and value is query
        if query.is_nested:
            others: dict[str, Any] = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
            others |= {"need_weights": need_weights or None, "is_causal": is_causal or None}
            keys, values = (None, None) if itself else (key, value)
            return ragged.run_padded(self.attention, query, keys, values, others), None
        batched = query.dim() == 3
        self._check_axes(tokens, key_padding_mask)
        tokens = tokens[:1] if itself else tokens
        if not batched:
            tokens = [t[None] for t in tokens]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            tokens = [t.transpose(0, 1) for t in tokens]
        num_queries, num_keys = tokens[0].shape[1], tokens[-1].shape[1]
        self._check_pairs(attn_mask, is_causal, len(tokens[0]), num_queries, num_keys)
        causal = is_causal and num_queries == num_keys  # else torch counts from the first key, and we from the last
        mask, bias = (None, None) if causal else self._pair_terms(attn_mask, tokens[0])
        padding, key_bias = self._split(key_padding_mask)
        if key_bias is not None:
            key_bias = key_bias[:, None, None]
            bias = key_bias if bias is None else bias + key_bias
        options = {"key_padding_mask": padding, "mask": mask, "bias": bias, "causal": causal or None}
        found = self.attention(*tokens, **options, return_codes=need_weights)
        out, codes = found if need_weights else (found, None)
        if codes is not None:
            codes = codes.to(out.dtype)
            codes = codes.mean(1) if average_attn_weights else codes
        if not batched:
            return out[0], None if codes is None else codes[0]
        return out if self.batch_first else out.transpose(0, 1), codes

    @staticmethod
    def _check_axes(tokens: list[Tensor], key_padding_mask: Tensor | None) -> None:
        axes = {t.dim() for t in tokens}
        if axes not in ({2}, {3}):
            given = ", ".join(str(tuple(t.shape)) for t in tokens)
            raise ValueError(f"query, key and value must have 3 axes, or 2 without a batch, got shapes {given}.")
        if key_padding_mask is not None and axes == {2} and key_padding_mask.dim() != 1:
            raise ValueError(
                f"key_padding_mask of tokens without a batch must have shape (keys,) = ({len(tokens[1])},), "
                f"got {tuple(key_padding_mask.shape)}."
            )

    def _check_pairs(
        self, attn_mask: Tensor | None, is_causal: bool, batch: int, num_queries: int, num_keys: int
    ) -> None:
        if attn_mask is None:
            if is_causal:
                raise ValueError(
                    "is_causal=True says that attn_mask is causal, and attn_mask is None: give the mask, "
                    "nn.Transformer.generate_square_subsequent_mask(T)."
                )
            return
        shapes = ((num_queries, num_keys), (batch * self.num_heads, num_queries, num_keys))
        if tuple(attn_mask.shape) not in shapes:
            raise ValueError(f"attn_mask must have shape {shapes[0]} or {shapes[1]}, got {tuple(attn_mask.shape)}.")

    def _pair_terms(self, attn_mask: Tensor | None, query: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """`attn_mask` as the mask, True where a pair is kept, and the bias of HyperAttention."""
        if attn_mask is None:
            return None, None
        ignored, bias = self._split(attn_mask)
        if attn_mask.dim() == 2:
            return ~ignored, bias
        ignored = ignored.unflatten(0, (-1, self.num_heads))
        bias = None if bias is None else bias.unflatten(0, (-1, self.num_heads))
        everywhere = ignored.all(1, keepdim=True)
        if _numbers_are_known() and bool((ignored == everywhere).all()):
            return ~everywhere, bias
        if self.attention.norm != "softmax":
            traced = "" if _numbers_are_known() else "; under torch.compile and vmap give it as (Tq, Tk)"
            raise ValueError(
                "attn_mask must hide the same pairs from all heads: a code is one vector over the heads; "
                f"per head, add finite numbers by a floating attn_mask, or use method='softmax'{traced}."
            )
        hidden = torch.zeros_like(ignored, dtype=query.dtype).masked_fill(ignored & ~everywhere, -math.inf)
        return ~everywhere, hidden if bias is None else bias + hidden

    def _split(self, mask: Tensor | None) -> tuple[Any, Tensor | None]:
        """What a mask of torch's kind ignores, and what it adds to the scores besides; None if nothing."""
        if mask is None or mask.dtype == torch.bool:
            return mask, None
        if not mask.is_floating_point():
            raise TypeError(
                f"A mask must be boolean (True is ignored) or floating (added to the scores), got {mask.dtype}."
            )
        ignored = mask <= (-math.inf if self.attention.norm == "softmax" else HIDING)
        added = mask.masked_fill(ignored, 0.0)
        # A bias costs the fused kernels: where a mask only hides, it is left out.
        return ignored, None if _numbers_are_known() and not bool(added.any()) else added


def _check_tensors(tokens: list[Any], masks: dict[str, Any]) -> None:
    given = dict(zip(("query", "key", "value"), tokens, strict=True))
    given |= {name: mask for name, mask in masks.items() if mask is not None}
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}.")
    if len({t.is_nested for t in tokens}) > 1:
        raise ValueError("Either all of query, key and value are nested tensors, or none: nest the others too.")


def _numbers_are_known() -> bool:
    """Whether Python can ask for what is in a tensor: not while a transform traces or batches the call."""
    return not (torch.compiler.is_compiling() or functional_transforms_active())


def _rename_weights(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Weights with the names of nn.MultiheadAttention get those of HyperAttention."""
    names = ("query", "key", "value")
    for kind in ("weight", "bias"):
        joined = state.pop(f"{prefix}in_proj_{kind}", None)
        if joined is not None:
            for name, part in zip(names, joined.chunk(3), strict=True):
                state[f"{prefix}attention.{name}_proj.{kind}"] = part
        if f"{prefix}out_proj.{kind}" in state:
            state[f"{prefix}attention.output_proj.{kind}"] = state.pop(f"{prefix}out_proj.{kind}")
    for name in names:
        if f"{prefix}{name[0]}_proj_weight" in state:
            state[f"{prefix}attention.{name}_proj.weight"] = state.pop(f"{prefix}{name[0]}_proj_weight")
