"""From a source of text to token shards in the store; what was prepared before is found again and not made anew."""

import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from headcode.tasks.language.corpus import Document, Source
from headcode.tasks.language.shards import FORMAT, ShardWriter, TokenShards, find_recipe, locked_store
from headcode.tasks.language.tokenizer import ByteTokenizer, Tokenizer, train_bpe

BPE_SAMPLE_BYTES = 10**8
"""A BPE is trained on at most so much of the training text."""
PIECES_AT_ONCE = 64
MIN_BPE = 257


def prepare(
    source: Source,
    *,
    tokenizer: str | Tokenizer = "bpe",
    vocab_size: int = 2048,
    validation: float = 0.1,
    max_tokens: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> TokenShards:
    """The token shards of a source.

    Args:
        tokenizer: `bpe` (trained on the training text), `bytes`, or a tokenizer that exists.
        vocab_size: tokens of a BPE, at most; a small text may not have so many.
        validation: share of the text that is not trained on, unless the source has a validation split of its own.
        max_tokens: the training part ends after so many; if no validation text was read until then, as much of it
            follows as is in proportion.
        say: gets a line now and then.
    """
    if not 0 <= validation < 1:
        raise ValueError(f"validation is the share of text that is kept for validation, 0..1, got {validation}.")
    if tokenizer == "bpe" and vocab_size < MIN_BPE:
        raise ValueError(f"A byte-level BPE has at least {MIN_BPE} tokens, got vocab_size={vocab_size}.")
    recipe = _recipe(source, tokenizer, vocab_size, validation, max_tokens)
    if (found := find_recipe(recipe)) is not None:
        return found
    with locked_store() as folder:
        if (found := find_recipe(recipe)) is not None:  # another process made it while this one waited
            return found
        chosen = _tokenizer(source, tokenizer, vocab_size, validation, say)
        with ShardWriter(folder / f".prepare-{os.getpid()}", chosen) as writer:
            _encode(source.documents(validation), writer, max_tokens, validation, say)
            if writer.counts["train"]["tokens"] == 0:
                raise ValueError(
                    "No training text is left after the validation part; give more text or a smaller validation."
                )
            return TokenShards(writer.finish(recipe, source.words()))


def prepared(
    source: Source,
    *,
    tokenizer: str | Tokenizer = "bpe",
    vocab_size: int = 2048,
    validation: float = 0.1,
    max_tokens: int | None = None,
) -> TokenShards | None:
    """What `prepare` would find without any work, or None."""
    return find_recipe(_recipe(source, tokenizer, vocab_size, validation, max_tokens))


def _recipe(source: Source, tokenizer: str | Tokenizer, vocab_size: int, validation: float, limit: int | None) -> str:
    settings: dict[str, Any] = {
        "format": FORMAT,
        "source": source.identity(),
        "tokenizer": tokenizer if isinstance(tokenizer, str) else tokenizer.sha256,
        "vocab_size": vocab_size if tokenizer == "bpe" else None,
        "validation": validation,
        "max_tokens": limit,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _tokenizer(
    source: Source, tokenizer: str | Tokenizer, vocab_size: int, validation: float, say: Callable[[str], None]
) -> Tokenizer:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if tokenizer == "bytes":
        return ByteTokenizer()
    say(f"training a BPE tokenizer with {vocab_size:,} tokens")
    return train_bpe(_sample(source.documents(validation), BPE_SAMPLE_BYTES), vocab_size)


def _sample(documents: Iterable[Document], num_bytes: int) -> Iterator[str]:
    """Training text for a tokenizer, up to so many bytes."""
    for document in documents:
        for piece in document.pieces if document.split == "train" else ():
            yield piece
            num_bytes -= len(piece.encode())
            if num_bytes <= 0:
                return


def _encode(
    documents: Iterable[Document],
    writer: ShardWriter,
    max_tokens: int | None,
    validation: float,
    say: Callable[[str], None],
) -> None:
    room = _Room(writer.counts, max_tokens, validation)
    stream = room.pieces_of(documents)
    said = 0
    while batch := list(itertools.islice(stream, PIECES_AT_ONCE)):
        pieces = [piece for _, piece in batch if piece is not None]
        encoded = iter(_with_lengths(writer.tokenizer, pieces))
        for split, piece in batch:
            left = room.left(split)
            if piece is None:
                if left:
                    writer.end_document(split)
                continue
            tokens, lengths = next(encoded)
            num_bytes = len(piece.encode())
            if len(tokens) > left:
                tokens = tokens[: int(left)]
                lengths = None if lengths is None else lengths[: int(left)]
                num_bytes = _num_bytes(writer.tokenizer, tokens, lengths)
            writer.add(split, tokens, lengths, num_bytes)
        count = writer.counts["train"]["tokens"]
        if count - said >= 10**7:
            say(f"{count:,} training tokens")
            said = count


class _Room:
    """How many tokens each side still takes, where the training part has an end."""

    def __init__(self, counts: dict[str, dict[str, int]], max_tokens: int | None, validation: float) -> None:
        self._counts, self._max_tokens = counts, max_tokens
        self._share = 0 if max_tokens is None else math.ceil(max_tokens * validation / (1 - validation))

    def left(self, split: str) -> float:
        """Without an end as long as the training part is not full; then validation gets no more than its share."""
        if self._max_tokens is None:
            return math.inf
        train = self._max_tokens - self._counts["train"]["tokens"]
        if split == "train":
            return train
        return math.inf if train else max(self._share - self._counts["validation"]["tokens"], 0)

    def pieces_of(self, documents: Iterable[Document]) -> Iterator[tuple[str, str | None]]:
        """Pieces, and None behind each document, of the documents that there is room for."""
        for document in documents:
            for piece in document.pieces:
                if not self.left(document.split):
                    break
                yield document.split, piece
            yield document.split, None
            if not self.left("train") and (self._counts["validation"]["tokens"] or not self._share):
                return  # what follows may be very long, or a stream without an end


def _with_lengths(tokenizer: Tokenizer, pieces: list[str]) -> list[tuple[np.ndarray, np.ndarray | None]]:
    if tokenizer.byte_lengths is not None:
        return [(tokens, None) for tokens in tokenizer.encode(pieces)]
    return [(tokens, lengths) for tokens, lengths in tokenizer.encode_with_lengths(pieces)]


def _num_bytes(tokenizer: Tokenizer, tokens: np.ndarray, lengths: np.ndarray | None) -> int:
    if lengths is None:
        assert tokenizer.byte_lengths is not None
        lengths = tokenizer.byte_lengths[tokens]
    return int(lengths.sum())
