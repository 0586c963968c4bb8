"""From a source of text to token shards in the store; what was prepared before is found again and not made anew."""

import hashlib
import itertools
import json
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
        max_tokens: stop reading when the training part has so many.
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
            _encode(source.documents(validation), writer, max_tokens, say)
            _refuse_nothing(writer.counts)
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
    documents: Iterable[Document], writer: ShardWriter, max_tokens: int | None, say: Callable[[str], None]
) -> None:
    stream = ((document.split, piece) for document in documents for piece in itertools.chain(document.pieces, (None,)))
    said = 0
    while batch := list(itertools.islice(stream, PIECES_AT_ONCE)):
        pieces = [piece for _, piece in batch if piece is not None]
        encoded = iter(_with_lengths(writer.tokenizer, pieces))
        for split, piece in batch:
            if piece is None:
                writer.end_document(split)
            else:
                writer.add(split, *next(encoded), len(piece.encode()))
        tokens = writer.counts["train"]["tokens"]
        if max_tokens is not None and tokens >= max_tokens:
            return
        if tokens - said >= 10**7:
            say(f"{tokens:,} training tokens")
            said = tokens


def _with_lengths(tokenizer: Tokenizer, pieces: list[str]) -> list[tuple[np.ndarray, np.ndarray | None]]:
    if tokenizer.byte_lengths is not None:
        return [(tokens, None) for tokens in tokenizer.encode(pieces)]
    return [(tokens, lengths) for tokens, lengths in tokenizer.encode_with_lengths(pieces)]


def _refuse_nothing(counts: dict[str, dict[str, int]]) -> None:
    if counts["train"]["tokens"] == 0:
        raise ValueError("No training text is left after the validation part; give more text or a smaller validation.")
