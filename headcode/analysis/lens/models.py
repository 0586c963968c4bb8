"""Models that the lens runs: one pass over a batch, its layers visited in order, their codes edited on the way.

    model = open_model("all-minilm-folder")          a folder, a hub name, a run of headcode's, or a module
    batch = model.batch([model.encode("The cat sat."), model.encode("It slept.")])
    model.run(batch, visit=lambda layer: print(layer.number, layer.codes.shape))

A layer is visited while its weights are in memory, and nothing of it is kept: what a visitor wants to keep it copies.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headcode.analysis.lens.layer import LayerReading, attention_output
from headcode.interop.huggingface import AttentionWeights

Visit = Callable[["Layer"], None]
Edit = Callable[["Layer"], Tensor | None]
"""New codes (B, H, query, key) for a layer, or None to leave it as it is."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Texts as token ids (B, T), filled up behind their ends; or images (B, channels, height, width)."""

    inputs: Tensor
    lengths: list[int]

    @property
    def mask(self) -> Tensor:
        """(B, T), True where there is a token."""
        return torch.arange(max(self.lengths)) < torch.tensor(self.lengths)[:, None]


@dataclasses.dataclass(frozen=True)
class Layer:
    """What one layer did on a batch; `reading` cuts out one text."""

    number: int
    codes: Tensor
    """(B, H, query, key)"""
    weights: AttentionWeights
    tokens: Tensor
    """(B, key, dim)"""
    lengths: list[int]
    output: Tensor | None = None
    """(B, query, dim): the model's own; not known yet when codes are edited."""
    share: Tensor | None = None

    def reading(self, text: int) -> LayerReading:
        length = self.lengths[text]
        assert self.output is not None
        return LayerReading(
            self.number,
            self.codes[text, :, :length, :length],
            self.weights,
            self.tokens[text, :length],
            self.output[text, :length],
            None if self.share is None else self.share[text, :length],
        )

    def change(self, codes: Tensor) -> Tensor:
        """(B, query, dim): what other codes add to the layer's output, pair by pair through their networks."""
        made = torch.zeros(*self.codes.shape[::2], self.weights.output.shape[1], dtype=torch.double)
        for text in torch.nonzero((codes != self.codes).flatten(1).any(1)).flatten().tolist():
            tokens, share = self.tokens[text], None if self.share is None else self.share[text]
            new, old = (attention_output(self.weights, c[text], tokens, share) for c in (codes, self.codes))
            made[text] = new - old
        return made


class LensModel(abc.ABC):
    """A transformer on the CPU, in evaluation mode while it runs."""

    name = "model"
    num_layers: int
    num_heads: int
    vocab_size: int | None
    """None for images."""
    max_length: int
    specials: frozenset[str] = frozenset()
    causal = False
    predicts = False
    """Whether it gives probabilities of a next token; otherwise its answer is an embedding of the text."""

    def __init__(self) -> None:
        self.unreadable: dict[int, str] = {}
        """Layers that cannot be read, with the reason; known after a run."""

    @property
    @abc.abstractmethod
    def has_tokenizer(self) -> bool: ...

    @abc.abstractmethod
    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text, with the model's special tokens around it or without."""

    @abc.abstractmethod
    def token_names(self, ids: Sequence[int]) -> list[str]: ...

    @abc.abstractmethod
    def untrained(self, seed: int) -> "LensModel":
        """The same configuration before any training."""

    @abc.abstractmethod
    def run(
        self,
        batch: Batch,
        visit: Visit | None = None,
        edit: Edit | None = None,
        layers: Iterable[int] | None = None,
        answer: bool = False,
    ) -> Tensor | None:
        """One forward pass; `visit` sees the chosen layers, and with `answer` it gives (B, …) what the model answers.

        An answer is a text's probabilities of the next token, or the mean of its tokens' last hidden states.
        """

    def batch(self, texts: Sequence[Any]) -> Batch:
        """Lists of token ids, filled up to one length; or images (channels, height, width) of one size."""
        if self.vocab_size is None:
            rows, columns = self.patch_grid(texts[0])
            return Batch(torch.stack(list(texts)), [1 + rows * columns] * len(texts))
        lengths = [len(ids) for ids in texts]
        inputs = torch.full((len(texts), max(lengths)), self._filler, dtype=torch.long)
        for row, ids in zip(inputs, texts, strict=True):
            row[: len(ids)] = torch.tensor(list(ids))
        return Batch(inputs, lengths)

    def patch_grid(self, image: Tensor) -> tuple[int, int]:
        """Rows and columns of patches in an image."""
        raise ValueError(f"{type(self).__name__} reads no images.")

    @property
    def _filler(self) -> int:
        return 0

    def check_layers(self, layers: Iterable[int] | None) -> set[int]:
        wanted = set(range(self.num_layers))
        if layers is None:
            return wanted
        if bad := [i for i in layers if not -self.num_layers <= i < self.num_layers]:
            raise ValueError(f"This model has layers 0 to {self.num_layers - 1}; there is no layer {bad[0]}.")
        return {i % self.num_layers for i in layers}


def mean_of_tokens(hidden: Tensor, batch: Batch) -> Tensor:
    """(B, dim) from (B, T, dim), without the filling."""
    kept = batch.mask[..., None].to(hidden)
    return (hidden * kept).sum(1) / kept.sum(1)


def last_token(hidden: Tensor, batch: Batch) -> Tensor:
    return hidden[torch.arange(len(batch.lengths)), torch.tensor(batch.lengths) - 1]


def distance(first: Tensor, second: Tensor, predicts: bool) -> Tensor:
    """(B,): total variation between probabilities, or 1 - cosine similarity of embeddings; 0 where nothing changed."""
    first, second = first.double(), second.double()
    if predicts:
        return (first - second).abs().sum(-1) / 2
    return 1 - nn.functional.cosine_similarity(first, second, dim=-1)


def open_model(
    model: str | Path | nn.Module | LensModel, *, tokenizer: Any = None, reads_text: bool = True
) -> LensModel:
    """A folder, a hub name or a module as a `LensModel`.

    Args:
        model: a folder or hub name of Hugging Face's; a run, a checkpoint or a model of headcode's; a module of either.
        tokenizer: for a module that is to read texts.
        reads_text: False leaves a folder's tokenizer alone; token ids are given then.
    """
    from headcode.analysis.lens.own_models import is_own_folder, is_own_model, open_own_folder, open_own_model
    from headcode.analysis.lens.pretrained_models import open_folder, open_pretrained

    if isinstance(model, LensModel):
        return model
    if isinstance(model, nn.Module):
        return open_own_model(model, tokenizer) if is_own_model(model) else open_pretrained(model, tokenizer)
    opened = (open_own_folder if is_own_folder(model) else open_folder)(model, reads_text)
    folder = Path(model).expanduser()
    opened.name = "/".join(folder.resolve().parts[-2:]) if folder.is_dir() else str(model)
    return opened
