"""One layer on one text: its codes, what they configure, and the check that all of it is the layer's own output.

    W[q,k] = Σ_h z[h,q,k] W_out[h] W_value[h]                                 the value network of a pair
    y[q]   = Σ_k (W[q,k] x[k] + Σ_h z[h,q,k] W_out[h] b_value[h]) + b_out     the layer's output

A layer of headcode's with a two-layer value net has φ(Σ_h z_h W_value[h] x[k] + …) in place of the first product.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headcode.interop.huggingface import AttentionWeights
from headcode.ops import VALUE_NETS

TOLERANCE = 1e-5
_NUMBERS_AT_A_TIME = 1 << 22


def contributions(weights: AttentionWeights, codes: Tensor, tokens: Tensor) -> Tensor:
    """(query, key, dim): what each key's token adds to each query, for codes (H, query, key) and tokens (key, dim)."""
    codes, values = codes.double(), head_values(weights, tokens)
    net = VALUE_NETS[weights.value_net]
    if net.activation is None:
        made = values @ weights.output.transpose(1, 2)  # (H, key, dim)
        return (codes.permute(2, 1, 0) @ made.transpose(0, 1)).transpose(0, 1)
    hidden = (codes.permute(2, 1, 0) @ values.transpose(0, 1)).transpose(0, 1)  # (query, key, Dv)
    if net.gated:
        gate, signal = hidden.chunk(2, -1)
        hidden = net.activation(gate) * signal
    else:
        hidden = net.activation(hidden)
    total = torch.zeros(*codes.shape[1:], weights.output.shape[1], dtype=torch.double)
    for head, output in enumerate(weights.output):
        total += codes[head, ..., None] * (hidden @ output.T)
    return total


def head_values(weights: AttentionWeights, tokens: Tensor) -> Tensor:
    """(H, key, Dv)"""
    values = tokens.double() @ weights.value.transpose(1, 2)
    return values if weights.value_bias is None else values + weights.value_bias[:, None]


def in_parts(weights: AttentionWeights, codes: Tensor, tokens: Tensor) -> Iterator[Tensor]:
    """`contributions`, a few queries at a time."""
    step = max(1, _NUMBERS_AT_A_TIME // max(1, tokens.shape[0] * weights.output.shape[1]))
    for first in range(0, codes.shape[1], step):
        yield contributions(weights, codes[:, first : first + step], tokens)


def attention_output(weights: AttentionWeights, codes: Tensor, tokens: Tensor, share: Tensor | None = None) -> Tensor:
    """(query, dim): all pairs together, without the output bias; `share` (query,) is what pooling leaves of it."""
    if VALUE_NETS[weights.value_net].activation is None:  # the sum over keys may come first
        total = (codes.double() @ head_values(weights, tokens) @ weights.output.transpose(1, 2)).sum(0)
    else:
        total = torch.cat([made.sum(1) for made in in_parts(weights, codes, tokens)])
    return total if share is None else total * share[:, None]


@dataclasses.dataclass(frozen=True)
class LayerReading:
    """One layer's codes on one text, and the weights that they configure (float64)."""

    layer: int
    codes: Tensor
    """(H, query, key)"""
    weights: AttentionWeights
    tokens: Tensor
    """(key, dim): what the layer attends to, after its norm."""
    own_output: Tensor
    """(query, dim): the model's own attention output."""
    share: Tensor | None = None
    """(query,): what a layer that pools otherwise than by a sum leaves of the sum over keys."""

    def value_network(self, query: int, key: int) -> Tensor:
        """The generated matrix W[q,k], (dim, dim)."""
        self._check_linear()
        scaled = self.codes[:, query, key].double()[:, None, None] * self.weights.output  # (H, dim, Dv)
        return scaled.transpose(0, 1).flatten(1) @ self.weights.value.flatten(0, 1)

    def contributions(self, query: int) -> Tensor:
        """(key, dim): what each key adds to a query, W[q,k] x[k] and the value bias that enters with the code."""
        return contributions(self.weights, self.codes[:, query : query + 1], self.tokens)[0]

    def sizes(self) -> Tensor:
        """(query, key): the length of what each pair's generated network adds to the query."""
        if not self.is_linear:
            return torch.cat([made.norm(dim=-1) for made in in_parts(self.weights, self.codes, self.tokens)])
        made = (head_values(self.weights, self.tokens) @ self.weights.output.transpose(1, 2)).transpose(0, 1)
        codes = self.codes.double().permute(2, 1, 0)  # (key, query, H)
        squares = ((codes @ (made @ made.transpose(1, 2))) * codes).sum(-1)
        return squares.clamp(min=0).sqrt().T

    def norms(self) -> Tensor:
        """(query, key): Frobenius norms of all W[q,k], from the heads' inner products, without forming them."""
        self._check_linear()
        out = torch.einsum("adv,bdw->abvw", self.weights.output, self.weights.output)
        val = torch.einsum("avd,bwd->abvw", self.weights.value, self.weights.value)
        gram = (out * val).sum((2, 3))  # <W_out[a] W_value[a], W_out[b] W_value[b]>
        codes = self.codes.double()
        return torch.einsum("aqk,ab,bqk->qk", codes, gram, codes).clamp(min=0).sqrt()

    def effective_rank(self, query: int, key: int) -> float:
        """exp of the entropy of the singular values of W[q,k]; 0 for a pair whose code is 0."""
        sizes = torch.linalg.svdvals(self.value_network(query, key).float())
        if not sizes.any():
            return 0.0
        share = sizes[sizes > 0] / sizes.sum()
        return float(torch.exp(-(share * share.log()).sum()))

    @property
    def is_linear(self) -> bool:
        """Whether each pair's network is one matrix, as in softmax attention."""
        return VALUE_NETS[self.weights.value_net].activation is None

    @property
    def error(self) -> float:
        """The largest difference between Σ_k W[q,k] x[k] (plus biases) and the model's own output."""
        return self._errors[0]

    @property
    def relative_error(self) -> float:
        """The same, root mean square, relative to the output's."""
        return self._errors[1]

    @property
    def _errors(self) -> tuple[float, float]:
        return reproduce(self.weights, self.codes, self.tokens, self.own_output, self.share)

    def _check_linear(self) -> None:
        if not self.is_linear:
            raise ValueError(
                f"Layer {self.layer} generates two-layer networks ({self.weights.value_net}), and no single matrix; "
                f"headcode.nn.value_network has both of their matrices."
            )


def reproduce(
    weights: AttentionWeights, codes: Tensor, tokens: Tensor, output: Tensor, share: Tensor | None = None
) -> tuple[float, float]:
    """How far Σ_k W[q,k] x[k] plus biases is from a layer's own output: largest difference, and relative RMS.

    Every pair's network is applied to its key, in float64, a few queries at a time.
    """
    total = torch.cat([made.sum(1) for made in in_parts(weights, codes, tokens)])
    if share is not None:
        total = total * share[:, None]
    if weights.output_bias is not None:
        total = total + weights.output_bias
    difference, scale = total - output.double(), output.double().square().sum()
    relative = float((difference.square().sum() / scale).sqrt()) if scale else 0.0
    return float(difference.abs().max()), relative


def summarise(reading: LayerReading, *, pairs: int = 16, seed: int = 0) -> dict[str, Any]:
    """Numbers of one layer: the check, norms of all W[q,k], effective ranks of `pairs` pairs drawn by `seed`.

    Norms and ranks are None where the generated networks have two layers.
    """
    if pairs < 1:
        raise ValueError(f"pairs must be 1 or more, got {pairs}.")
    error, relative = reading._errors
    facts: dict[str, Any] = {
        "layer": reading.layer,
        "heads": int(reading.codes.shape[0]),
        "error": error,
        "relative_error": relative,
        "reproduces": bool(relative <= TOLERANCE),
    }
    names = ("norm_mean", "norm_max", "rank_mean", "rank_min", "rank_max", "rank_pairs")
    if not reading.is_linear:
        return facts | dict.fromkeys(names)
    norms = reading.norms()
    seen = torch.nonzero(reading.codes.abs().sum(0) > 0)
    rng = np.random.default_rng(seed)
    chosen = seen[rng.permutation(len(seen))[:pairs]].tolist()
    ranks = [reading.effective_rank(q, k) for q, k in chosen]
    drawn = [[q, k, rank] for (q, k), rank in zip(chosen, ranks, strict=True)]
    averages = (float(np.mean(ranks)), float(np.min(ranks)), float(np.max(ranks))) if ranks else (None, None, None)
    values = (float(norms[seen[:, 0], seen[:, 1]].mean()), float(norms.max()), *averages, drawn)
    return facts | dict(zip(names, values, strict=True))
