"""The lens: a pretrained transformer's attention read as a hypernetwork.

In every layer the attention weights of a (query, key) pair across the heads are its code z, and

    W[q,k] = Σ_h z[h,q,k] W_out[h] W_value[h]          the value network of the pair
    y[q]   = Σ_k (W[q,k] x[k] + Σ_h z[h,q,k] W_out[h] b_value[h]) + b_out

is the layer's attention output. The lens checks that this equals what the model itself computed.

    reading = read_model("all-minilm-folder", "The cat sat on the mat.")
    reading.layers[0].codes                            (H, query, key)
    reading.layers[0].value_network(3, 5)              W[3, 5], (dim, dim)
    reading.layers[0].error                            distance to the model's own output
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headcode.analysis.files import write_arrays
from headcode.analysis.kinds import token_kinds
from headcode.interop.huggingface import (
    Architecture,
    AttentionWeights,
    architecture_of,
    load_pretrained,
    longest_text,
    part,
    read_attention,
)

TOLERANCE = 1e-5


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
    error: float
    """The largest difference between Σ_k W[q,k] x[k] (plus biases) and the model's own output."""
    relative_error: float
    """The same, root mean square, relative to the output's."""

    def value_network(self, query: int, key: int) -> Tensor:
        """The generated matrix W[q,k], (dim, dim)."""
        scaled = self.codes[:, query, key].double()[:, None, None] * self.weights.output  # (H, dim, Dv)
        return scaled.transpose(0, 1).flatten(1) @ self.weights.value.flatten(0, 1)

    def contributions(self, query: int) -> Tensor:
        """(key, dim): what each key adds to a query, W[q,k] x[k] and the value bias that enters with the code."""
        values = torch.einsum("hvd,kd->khv", self.weights.value, self.tokens.double())
        if self.weights.value_bias is not None:
            values = values + self.weights.value_bias
        return torch.einsum("hk,khv,hdv->kd", self.codes[:, query].double(), values, self.weights.output)

    def norms(self) -> Tensor:
        """(query, key): Frobenius norms of all W[q,k], from the heads' inner products, without forming them."""
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


@dataclasses.dataclass(frozen=True)
class Reading:
    """What the lens saw in one text."""

    tokens: list[str]
    kinds: list[str]
    layers: list[LayerReading]
    unreadable: dict[int, str]
    """Layers that the lens cannot read, with the reason."""


def read_model(
    model: str | Path | nn.Module,
    text: str | Sequence[int],
    *,
    tokenizer: Any = None,
    layers: Sequence[int] | None = None,
    max_tokens: int = 128,
) -> Reading:
    """Read a transformer's attention on a text (or on token ids).

    Args:
        model: a folder, a hub name, or a base model loaded with attn_implementation="eager".
        tokenizer: for a model that is loaded already, when `text` is a string.
        layers: which ones, negative numbers from the end; None means all.
        max_tokens: a longer text is cut.
    """
    if not isinstance(model, nn.Module):
        model, tokenizer = load_pretrained(model, tokenizer=isinstance(text, str))
    config: Any = model.config
    architecture = architecture_of(config)
    ids, names = _tokens(text, tokenizer, min(max_tokens, longest_text(model)), config)
    found = part(model, architecture.layers)
    if found is None:
        raise ValueError(f"{type(model).__name__} has no {architecture.layers}: give the base model (AutoModel).")
    blocks = list(found)  # type: ignore[call-overload]
    if getattr(config, "_attn_implementation", "eager") != "eager":
        raise ValueError("Attention weights are only seen with attn_implementation='eager'; load the model with it.")
    wanted = set(range(len(blocks)))
    if layers is not None:
        if bad := [i for i in layers if not -len(blocks) <= i < len(blocks)]:
            raise ValueError(f"This model has layers 0 to {len(blocks) - 1}; there is no layer {bad[0]}.")
        wanted = {i % len(blocks) for i in layers}
    unreadable: dict[int, str] = {}
    weights: dict[int, AttentionWeights] = {}
    for index in sorted(wanted):
        try:
            weights[index] = read_attention(blocks[index], architecture, config)
        except ValueError as error:
            unreadable[index] = str(error)
    seen = _run(model, ids, blocks, architecture, sorted(weights))
    readings = []
    for index, attention in weights.items():
        tokens, codes, output = (seen[index].get(name) for name in ("tokens", "codes", "output"))
        if tokens is None or codes is None or output is None:
            lacking = [name for name in ("tokens", "codes", "output") if seen[index].get(name) is None]
            unreadable[index] = f"its attention did not show its {lacking[0]} in the forward pass"
        elif codes.shape[0] != attention.value.shape[0] or codes.shape[2] != tokens.shape[0]:
            unreadable[index] = f"its attention weights have shape {tuple(codes.shape)}, not (heads, queries, keys)"
        else:
            largest, relative = reproduce(attention, codes, tokens, output)
            readings.append(LayerReading(index, codes, attention, tokens, output, largest, relative))
    specials = set(getattr(tokenizer, "all_special_tokens", []) or [])
    return Reading(names, token_kinds(names, specials), readings, unreadable)


def reproduce(weights: AttentionWeights, codes: Tensor, tokens: Tensor, output: Tensor) -> tuple[float, float]:
    """How far Σ_k W[q,k] x[k] plus biases is from a layer's own output: largest difference, and relative RMS.

    Pair by pair: every pair's network is applied to its key, in float64, a few queries at a time.
    """
    values = torch.einsum("hvd,kd->khv", weights.value, tokens.double())
    if weights.value_bias is not None:
        values = values + weights.value_bias
    flat_output = weights.output.transpose(0, 1).flatten(1)  # (dim, H·Dv)
    largest, squared, scale = 0.0, 0.0, 0.0
    chunk = max(1, (1 << 24) // max(values.numel(), 1))
    for first in range(0, codes.shape[1], chunk):
        part_codes = codes[:, first : first + chunk].double().permute(1, 2, 0)  # (q, k, H)
        hidden = (part_codes[..., None] * values).flatten(2)  # (q, k, H·Dv)
        total = (hidden @ flat_output.T).sum(1)
        if weights.output_bias is not None:
            total = total + weights.output_bias
        difference = total - output[first : first + chunk].double()
        largest = max(largest, float(difference.abs().max()))
        squared += float(difference.square().sum())
        scale += float(output[first : first + chunk].double().square().sum())
    return largest, (squared / scale) ** 0.5 if scale else 0.0


def summarise(reading: LayerReading, *, pairs: int = 16, seed: int = 0) -> dict[str, Any]:
    """Numbers of one layer: the check, norms of all W[q,k], effective ranks of `pairs` pairs drawn by `seed`."""
    if pairs < 1:
        raise ValueError(f"pairs must be 1 or more, got {pairs}.")
    norms = reading.norms()
    seen = torch.nonzero(reading.codes.abs().sum(0) > 0)
    rng = np.random.default_rng(seed)
    chosen = seen[rng.permutation(len(seen))[:pairs]].tolist()
    ranks = [reading.effective_rank(q, k) for q, k in chosen]
    return {
        "layer": reading.layer,
        "heads": int(reading.codes.shape[0]),
        "error": reading.error,
        "relative_error": reading.relative_error,
        "reproduces": bool(reading.relative_error <= TOLERANCE),
        "norm_mean": float(norms[seen[:, 0], seen[:, 1]].mean()),
        "norm_max": float(norms.max()),
        "rank_mean": float(np.mean(ranks)) if ranks else None,
        "rank_min": float(np.min(ranks)) if ranks else None,
        "rank_max": float(np.max(ranks)) if ranks else None,
        "rank_pairs": [[q, k, rank] for (q, k), rank in zip(chosen, ranks, strict=True)],
    }


def write_reading(reading: Reading, path: str | Path, card: dict[str, Any]) -> Path:
    """The codes of every pair, `codes_layer_i` (query, key, head), and the tokens with their kinds."""
    codes = {
        f"codes_layer_{layer.layer}": layer.codes.permute(1, 2, 0).contiguous().numpy() for layer in reading.layers
    }
    return write_arrays(path, {**codes, "tokens": np.array(reading.tokens), "kinds": np.array(reading.kinds)}, card)


def write_networks(reading: Reading, numbers: Sequence[int], path: str | Path, card: dict[str, Any]) -> Path:
    """The generated matrices of chosen pairs, `layer_i` (pair, dim, dim); numbers are query key query key …"""
    length = len(reading.tokens)
    if len(numbers) % 2 or not all(-length <= n < length for n in numbers):
        raise ValueError(f"Pairs are given as query key query key …, positions from 0 to {length - 1}.")
    pairs = np.array(numbers).reshape(-1, 2) % length
    networks = {
        f"layer_{layer.layer}": np.stack([layer.value_network(int(q), int(k)).float().numpy() for q, k in pairs])
        for layer in reading.layers
    }
    return write_arrays(path, {**networks, "pairs": pairs}, card)


def _tokens(text: str | Sequence[int], tokenizer: Any, max_tokens: int, config: Any) -> tuple[Tensor, list[str]]:
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}.")
    if isinstance(text, str):
        if tokenizer is None:
            raise ValueError("A text needs a tokenizer; give one, or token ids.")
        ids = tokenizer(text, truncation=True, max_length=max_tokens)["input_ids"]
        if not ids:
            raise ValueError("The text has no tokens.")
        if max(ids) >= config.vocab_size:
            raise ValueError(f"The tokenizer gives ids up to {max(ids)}, the model knows {config.vocab_size} tokens.")
        return torch.tensor([ids]), [str(t) for t in tokenizer.convert_ids_to_tokens(ids)]
    numbers = [int(i) for i in text][:max_tokens]
    if not numbers or min(numbers) < 0 or max(numbers) >= config.vocab_size:
        raise ValueError(f"Token ids must be from 0 to {config.vocab_size - 1}, at least one.")
    return torch.tensor([numbers]), [str(i) for i in numbers]


def _run(
    model: nn.Module, ids: Tensor, blocks: Sequence[nn.Module], architecture: Architecture, layers: Sequence[int]
) -> dict[int, dict[str, Tensor]]:
    """One forward pass with hooks on the chosen layers: their tokens, attention weights and outputs."""
    seen: dict[int, dict[str, Tensor]] = {index: {} for index in layers}
    handles = []
    for index in layers:
        attention, output = (part(blocks[index], path) for path in (architecture.attention, architecture.output))
        if attention is None or output is None:
            continue  # named as unreadable by `read_attention`

        def note(module: nn.Module, arguments: Any, options: Any, result: Any, index: int = index) -> None:
            tokens = arguments[0] if arguments else options.get("hidden_states", options.get("query"))
            if tokens is not None:
                seen[index]["tokens"] = tokens[0].detach()
            if isinstance(result, tuple) and len(result) > 1 and isinstance(result[1], Tensor):
                seen[index]["codes"] = result[1][0].detach()

        def keep(module: nn.Module, arguments: Any, result: Tensor, index: int = index) -> None:
            seen[index]["output"] = result[0].detach()

        handles.append(attention.register_forward_hook(note, with_kwargs=True))
        handles.append(output.register_forward_hook(keep))
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(ids, output_attentions=True)  # dropout would show in the codes
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return seen
