"""Text to tokens and back: bytes as they are, byte-level BPE trained on the text, or any existing `tokenizer.json`.

All three are kept as a `tokenizer.json` in the format of the package `tokenizers`, so that other tools can read it. The
bytes need no package at all. What the text spells is never taken for a special token: only we put the end of a
document into the stream.
"""

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headcode.files import is_there, parse_json, read_bytes

END_OF_DOCUMENT = "<|end|>"
# What existing tokenizers call the end of a text, the most telling first.
END_TOKENS = (END_OF_DOCUMENT, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
KINDS = ("bpe", "bytes", "file")
LARGEST_VOCABULARY = 2**24


class Tokenizer:
    """Encodes, decodes, and knows how many bytes of text each token stands for."""

    def __init__(self, kind: str, content: bytes) -> None:
        self.kind, self.content = kind, content
        """`content` is the bytes of tokenizer.json."""
        self._layout = _parsed(content)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @functools.cached_property
    def vocabulary(self) -> dict[str, int]:
        """Every token's spelling and id, added ones included."""
        return self._fast().get_vocab(with_added_tokens=True)

    @functools.cached_property
    def vocab_size(self) -> int:
        return max(self.vocabulary.values()) + 1

    @functools.cached_property
    def end_token(self) -> int | None:
        """The token that ends a document, or None."""
        return next((self.vocabulary[name] for name in END_TOKENS if name in self.vocabulary), None)

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray | None:
        """Bytes of text per token id, (vocab_size,); None for a tokenizer whose tokens do not spell bytes."""
        if not self._spells_bytes():
            return None
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for spelling, token in self.vocabulary.items():
            lengths[token] = len(spelling)  # byte-level vocabularies write one character for each byte
        for added in self._layout.get("added_tokens", ()):
            lengths[added["id"]] = 0 if added["special"] else len(added["content"].encode())
        return lengths

    def encode(self, pieces: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each piece of text."""
        encodings = self._fast().encode_batch(list(pieces), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def encode_with_lengths(self, pieces: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Tokens and the bytes that each stands for, found by where in the text they end: exact for every tokenizer.

        What a tokenizer leaves out (white space, as a rule) counts for the token that follows, and at the end of a
        piece for the last one.
        """
        found = []
        for piece, encoding in zip(
            pieces, self._fast().encode_batch(list(pieces), add_special_tokens=False), strict=True
        ):
            sizes = np.fromiter((len(character.encode()) for character in piece), dtype=np.int64, count=len(piece))
            before = np.concatenate(([0], np.cumsum(sizes)))
            ends = np.array([end for _, end in encoding.offsets], dtype=np.int64)
            ends = np.maximum.accumulate(ends) if len(ends) else ends
            if len(ends):
                ends[-1] = len(piece)
            found.append((np.array(encoding.ids, dtype=np.int64), np.diff(before[ends], prepend=0)))
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        return self._fast().decode(list(tokens), skip_special_tokens=True)

    def _spells_bytes(self) -> bool:
        layout = self._layout
        steps = _flat(layout.get("pre_tokenizer"), "pretokenizers")
        byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
        return (
            layout.get("normalizer") is None
            and layout.get("model", {}).get("type") == "BPE"
            and bool(byte_level)
            and not any(step.get("add_prefix_space") for step in byte_level)
        )

    @functools.cache  # noqa: B019 - tokenizers are few and live as long as the process
    def _fast(self) -> Any:
        fast = _package().Tokenizer.from_str(self.content.decode())
        fast.encode_special_tokens = True  # a text that spells <|end|> gets these letters, not the token
        fast.no_truncation()
        fast.no_padding()
        return fast


class ByteTokenizer(Tokenizer):
    """256 bytes and the end of a document; needs no package."""

    def __init__(self) -> None:
        super().__init__("bytes", _byte_layout())

    @functools.cached_property
    def vocabulary(self) -> dict[str, int]:
        return {**self._layout["model"]["vocab"], END_OF_DOCUMENT: 256}

    def encode(self, pieces: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(piece.encode(), dtype=np.uint8).astype(np.int64) for piece in pieces]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


def train_bpe(pieces: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with at most `vocab_size` tokens, the end of a document among them."""
    package = _package()
    fast = package.Tokenizer(package.models.BPE())
    fast.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(pieces, trainer)
    return Tokenizer("bpe", fast.to_str(pretty=True).encode())


def read_tokenizer(path: str | Path, kind: str = "file") -> Tokenizer:
    """An existing tokenizer: a `tokenizer.json`, or a folder that has one."""
    path = Path(path)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not is_there(path):
        raise ValueError(f"There is no tokenizer {path}; give a tokenizer.json, or a folder that has one.")
    tokenizer: Tokenizer
    try:
        content = read_bytes(path)
        tokenizer = ByteTokenizer() if content == _byte_layout() else Tokenizer(kind, content)
        if not isinstance(tokenizer, ByteTokenizer):
            if tokenizer.vocab_size > LARGEST_VOCABULARY:
                raise ValueError(f"its tokens are numbered up to {tokenizer.vocab_size - 1:,}")
            _ = tokenizer.byte_lengths
    except ModuleNotFoundError:
        raise
    except Exception as error:  # the package raises plain Exceptions, one for each thing that a file can lack
        reason = " ".join(str(error).split())[:120]
        raise ValueError(f"{path} is not a tokenizer in the format of tokenizer.json ({reason}).") from None
    return tokenizer


class TextStream:
    """Tokens in, text out, as soon as its characters are whole."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # Some decoders treat the first token differently, so a little of the past is decoded along.
        self._tokens = list(prompt)[-8:]
        self._shown = len(tokenizer.decode(self._tokens))

    def add(self, token: int) -> str:
        """What can be shown now that this token has come."""
        self._tokens.append(token)
        return self._new(whole=False)

    def finish(self) -> str:
        """What is left, broken characters included."""
        return self._new(whole=True)

    def _new(self, whole: bool) -> str:
        text = self._tokenizer.decode(self._tokens)
        if not whole and text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new = text[self._shown :]
        if len(self._tokens) > 64 and not whole:
            self._tokens = self._tokens[-16:]
            text = self._tokenizer.decode(self._tokens)
        self._shown = len(text)
        return new


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        layout = parse_json(content.decode("utf-8"), "it")
    except UnicodeDecodeError:
        raise ValueError("it is not text in UTF-8") from None
    if not isinstance(layout, dict) or not isinstance(layout.get("model"), dict):
        raise ValueError("it has no model")
    return layout


def _flat(step: Any, parts: str) -> list[dict[str, Any]]:
    """The steps of a pre-tokenizer, which may be a sequence of sequences."""
    if not isinstance(step, dict):
        return []
    return [step, *(inner for part in step.get(parts, ()) for inner in _flat(part, parts))]


@functools.cache
def _byte_layout() -> bytes:
    """A tokenizer.json for plain bytes: byte-level BPE without a single merge, token ids equal to the bytes."""
    # Byte-level vocabularies write a byte as a visible character: itself, or one from 256 on for those that have none.
    visible = [byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255]
    hidden = [byte for byte in range(256) if byte not in visible]
    spelling = {byte: chr(byte) for byte in visible} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {"id": 256, "content": END_OF_DOCUMENT, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    layout: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | flags],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {spelling[byte]: byte for byte in range(256)},
            "merges": [],
        },
    }
    return json.dumps(layout, ensure_ascii=False, indent=1).encode()


def _package() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "A BPE tokenizer needs the package tokenizers: pip install 'headcode[text]'; or use --tokenizer bytes."
        ) from None
    return tokenizers
