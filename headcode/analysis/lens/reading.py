"""One text under the lens: every layer's reading, and the files that keep it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from headcode.analysis.files import write_arrays
from headcode.analysis.kinds import token_kinds
from headcode.analysis.lens.layer import LayerReading
from headcode.analysis.lens.models import Layer, LensModel, open_model


@dataclasses.dataclass(frozen=True)
class Reading:
    """What the lens saw in one text."""

    tokens: list[str]
    kinds: list[str]
    layers: list[LayerReading]
    unreadable: dict[int, str]
    """Layers that the lens cannot read, with the reason."""


def read_model(
    model: str | Path | nn.Module | LensModel,
    text: str | Sequence[int] | Tensor,
    *,
    tokenizer: Any = None,
    layers: Sequence[int] | None = None,
    max_tokens: int = 128,
) -> Reading:
    """Read a transformer's attention on a text, on token ids or, for ViT, on an image (channels, height, width).

    Args:
        model: a folder, a hub name, a run of headcode's, or a module: a base model of transformers loaded with
            attn_implementation="eager", a Transformer or a HeadcodeForCausalLM.
        tokenizer: for a model that is loaded already, when `text` is a string.
        layers: which ones, negative numbers from the end; None means all.
        max_tokens: a longer text is cut.
    """
    opened = open_model(model, tokenizer=tokenizer, reads_text=isinstance(text, str))
    read = read_text(opened, text, max_tokens)
    readings: list[LayerReading] = []

    def keep(layer: Layer) -> None:
        readings.append(layer.reading(0))

    opened.unreadable.clear()
    opened.run(opened.batch([read.ids]), visit=keep, layers=layers)
    return Reading(read.names, read.kinds, readings, dict(sorted(opened.unreadable.items())))


@dataclasses.dataclass(frozen=True)
class Text:
    """A passage, a built sentence or an image, in tokens."""

    ids: Sequence[int] | Tensor
    """An image's pixels (channels, height, width) where the model sees images."""
    names: list[str]
    kinds: list[str]

    @property
    def length(self) -> int:
        return len(self.names)


def read_text(model: LensModel, text: str | Sequence[int] | Tensor, max_tokens: int) -> Text:
    """A text, token ids or an image as the model gets it."""
    if model.vocab_size is None:
        if not isinstance(text, Tensor):
            raise ValueError(f"{model.name} sees images and no text: give pixels (channels, height, width).")
        rows, columns = model.patch_grid(text)
        names = ["[CLS]", *(f"{row},{column}" for row in range(rows) for column in range(columns))]
        return Text(text, names, ["special", *["patch"] * (len(names) - 1)])
    ids = token_ids(model, text, max_tokens)
    names = model.token_names(ids)
    return Text(ids, names, token_kinds(names, model.specials))


def token_ids(model: LensModel, text: str | Sequence[int] | Tensor, max_tokens: int) -> list[int]:
    """The ids of a text, at most `max_tokens` and as many as the model has positions for."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}.")
    assert model.vocab_size is not None
    length = min(max_tokens, model.max_length)
    if not isinstance(text, str):
        numbers = [int(i) for i in text][:length]
        if not numbers or min(numbers) < 0 or max(numbers) >= model.vocab_size:
            raise ValueError(f"Token ids must be from 0 to {model.vocab_size - 1}, at least one.")
        return numbers
    if not model.has_tokenizer:
        raise ValueError("A text needs a tokenizer; give one, or token ids.")
    ids = cut(model.encode(text), model.encode(text, special=False), length)
    if not ids:
        raise ValueError("The text has no tokens.")
    if max(ids) >= model.vocab_size:
        raise ValueError(f"The tokenizer gives ids up to {max(ids)}, the model knows {model.vocab_size} tokens.")
    return ids


def cut(ids: list[int], plain: list[int], length: int) -> list[int]:
    """The first `length` tokens, special ones at the end included; `plain` are the ids without special tokens."""
    if len(ids) <= length:
        return ids
    start = start_of(ids, plain)
    closing = len(ids) - start - len(plain)
    return ids[: length - closing] + ids[len(ids) - closing :] if 0 <= closing < length else ids[:length]


def start_of(ids: list[int], plain: list[int]) -> int:
    """How many special tokens stand before the text's own."""
    spare = len(ids) - len(plain)
    return next((start for start in range(spare + 1) if ids[start : start + len(plain)] == plain), 0)


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
