"""Language modelling as a task: windows of a token stream, in an order that is a pure function of (seed, epoch)."""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headcode.files import read_object
from headcode.tasks.base import Batch, Task
from headcode.tasks.compositions import check_share
from headcode.tasks.language.shards import TOKENIZER_FILE, TokenShards, open_shards, remember
from headcode.tasks.language.shuffle import key_of, shuffled

SOURCE_FILE = "text.json"
# Logits are scored so many rows of tokens at a time: their probabilities in full would be the largest tensor of all.
ROWS_AT_ONCE = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelling(Task):
    """Predict the next token: x and y are (B, context) token numbers, y one place ahead of x.

    The text itself is not here, only the fingerprint of its token shards (see `prepare`), which `open_shards` finds
    again. Training instance n is window n mod W of epoch n div W, where the W windows of an epoch stand in an order
    that (seed, epoch) decides, and begin at an offset that (seed, epoch) decides, so that no tail is left out for good.
    Windows run across the ends of documents. Validation instances are its windows from the beginning, each once.
    `info` of a batch: `bytes` (B,) of text that y stands for, `start` (B,) place of x in the tokens, `instance` (B,).
    """

    name: ClassVar[str] = "lm"
    task_id: ClassVar[int] = 3
    version: ClassVar[int] = 1
    objective: ClassVar[str] = "classification"
    main_metric: ClassVar[str] = "bits_per_byte"
    derived_fields: ClassVar[tuple[str, ...]] = ("shards", "tokenizer_hash")
    causal: ClassVar[bool] = True
    reads_text: ClassVar[bool] = True
    scores_in_place: ClassVar[bool] = True

    tokenizer: Literal["bpe", "bytes", "file"] = "bpe"
    """bpe (byte-level, trained on the text), bytes, or file (one that exists: --tokenizer-file)."""
    vocab_size: int = 2048
    """Tokens of the vocabulary; of a BPE at most so many."""
    context: int = 128
    """Tokens that a model sees at once."""
    validation: float = 0.1
    """Share of the text that is kept for validation, if the text has no validation part of its own."""
    shards: str = ""
    """Fingerprint of the token shards; empty as long as no text was chosen."""
    tokenizer_hash: str = ""
    """SHA-256 of tokenizer.json."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("vocab_size", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}.")
        check_share("validation", self.validation)

    def with_text(self, shards: TokenShards) -> "LanguageModelling":
        """This task on a prepared text."""
        facts = shards.index["tokenizer"]
        bound = self.replace(
            shards=shards.fingerprint,
            tokenizer=facts["kind"],
            vocab_size=facts["vocab_size"],
            tokenizer_hash=facts["sha256"],
        )
        for split in shards.splits:
            if bound._num_windows(shards, split) < 1:
                raise ValueError(
                    f"The text is too short: its {split} part has {shards.count(split):,} tokens, and one window of "
                    f"context {self.context} needs {self.context + 1}; give more text, or a smaller --context."
                )
        return bound

    @functools.cached_property
    def text(self) -> TokenShards:
        """The token shards."""
        if not self.shards:
            raise ValueError("This run has no text yet: give --text FILE or FOLDER, or --dataset NAME.")
        shards = open_shards(self.shards)
        if shards.vocab_size != self.vocab_size:
            raise ValueError(
                f"The token shards {self.shards[:12]}… have {shards.vocab_size} different tokens, the run's vocab_size "
                f"is {self.vocab_size}; prepare the text again with that size."
            )
        return shards

    @property
    def splits(self) -> tuple[str, ...]:
        return self.text.splits if self.shards else ("train", "validation")

    @property
    def model_sizes(self) -> dict[str, int | None]:
        return {"input_dim": None, "output_dim": None, "vocab_size": self.vocab_size, "max_length": self.context}

    @property
    def input_dim(self) -> int:
        return self.vocab_size

    @property
    def output_dim(self) -> int:
        return self.vocab_size

    @property
    def sequence_length(self) -> int:
        return self.context

    @property
    def queries(self) -> slice:
        return slice(None)

    @property
    def epoch_size(self) -> int:
        """Training windows of one epoch."""
        return self._num_windows(self.text, "train")

    def split_size(self, split: str) -> int | None:
        return None if split == "train" else self._num_windows(self.text, self._checked_split(split))

    def missing(self) -> str:
        return "" if self.shards else "has no text"

    def run_files(self) -> dict[str, bytes]:
        shards = self.text
        memory = {"shards": self.shards, "folder": str(shards.folder.resolve()), "source": shards.index["source"]}
        return {
            SOURCE_FILE: (json.dumps(memory, indent=2) + "\n").encode(),
            TOKENIZER_FILE: shards.tokenizer.content,
        }

    def read_run_files(self, run_folder: Path) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            memory = read_object(run_folder / SOURCE_FILE)
            remember(str(memory["shards"]), str(memory["folder"]))

    def score(self, prediction: Tensor, batch: Batch) -> dict[str, float]:
        """Sums for `bits_per_byte` and `perplexity` from logits (B, context, vocab_size)."""
        y = batch.y.to(prediction.device)
        if prediction.shape != (*y.shape, self.vocab_size):
            expected = (*y.shape, self.vocab_size)
            raise ValueError(f"score takes logits {expected}, got shape {tuple(prediction.shape)}.")
        logits, targets = prediction.flatten(0, 1), y.flatten().long()
        nats = 0.0
        for first in range(0, len(targets), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            losses = F.cross_entropy(logits[rows].float(), targets[rows], reduction="none")
            nats += float(losses.double().sum())
        return {
            "count": float(len(y)),
            "loss": nats / y.shape[1],
            "nats": nats,
            "tokens": float(y.numel()),
            "bytes": float(batch.info["bytes"].sum()),
        }

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """`bits_per_byte`: what a byte of text costs, whatever the tokens; `perplexity`: per token."""
        per_token = sums["nats"] / sums["tokens"]
        perplexity = math.exp(per_token) if per_token < 700 else math.inf
        return {"bits_per_byte": sums["nats"] / math.log(2) / max(sums["bytes"], 1.0), "perplexity": perplexity}

    def _make(self, split: str, numbers: np.ndarray) -> Batch:
        shards, windows = self.text, self._num_windows(self.text, split)
        if split == "train":
            starts = self._training_starts(numbers, windows, shards.count("train"))
        elif len(numbers) and numbers.max() >= windows:
            raise ValueError(f"The {split} split has the windows 0..{windows - 1}, asked for {numbers.max()}.")
        else:
            starts = numbers * self.context
        tokens = shards.read(split, starts, self.context + 1)
        num_bytes = shards.read_bytes(split, starts + 1, tokens[:, 1:])
        info = {"bytes": num_bytes, "start": starts, "instance": numbers}
        return Batch(
            torch.from_numpy(tokens[:, :-1].copy()),
            torch.from_numpy(tokens[:, 1:].copy()),
            {name: torch.from_numpy(array) for name, array in info.items()},
        )

    def _training_starts(self, numbers: np.ndarray, windows: int, num_tokens: int) -> np.ndarray:
        epochs, places = numbers // windows, numbers % windows
        starts = np.empty(len(numbers), dtype=np.int64)
        spare = num_tokens - 1 - windows * self.context
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            offset = key_of(self.seed, "offset", epoch) % (spare + 1)
            order = shuffled(places[chosen], windows, key_of(self.seed, "epoch", epoch))
            starts[chosen] = offset + order * self.context
        return starts

    def _num_windows(self, shards: TokenShards, split: str) -> int:
        return (shards.count(split) - 1) // self.context

    def _checked_split(self, split: str) -> str:
        if split not in self.splits:
            known = ", ".join(map(repr, self.splits))
            raise ValueError(f"This text has no split {split!r}; its splits are {known}.")
        return split

    def identity(self, split: str, count: int, start: int = 0) -> dict[str, Any]:
        size = self.split_size(split)
        if size is not None and start + count > size:
            raise ValueError(f"The {split} split has {size} windows, asked for {count} from {start} on.")
        return super().identity(split, count, start)
