"""Token shards: a text as packed token numbers in flat files, read through memory maps.

STORE/FINGERPRINT/index.json              what is in the folder, a hash for every file, and a fingerprint of it all
                  tokenizer.json          what made the tokens
                  train-00000.bin …       tokens one after the other, little-endian uint16 or uint32, documents
                  validation-00000.bin    separated by the end token; nothing to unpickle
                  train-00000.lengths …   bytes per token, uint16; only for tokenizers whose tokens do not spell bytes

The fingerprint is a hash of the tokens and of how they are divided: where the text lay is no part of it. A run keeps it
in its configuration and finds the folder again in the store ($HEADCODE_TEXTS, or headcode/texts in the user's cache).
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from headcode.files import is_count, is_word, locked, open_own, read_bytes, read_object, sha256_of, write_bytes
from headcode.tasks.language.tokenizer import (
    KINDS,
    LARGEST_VOCABULARY,
    ByteTokenizer,
    Tokenizer,
    read_tokenizer,
)

FORMAT = 1
INDEX_FILE = "index.json"
TOKENIZER_FILE = "tokenizer.json"
SHARD_TOKENS = 2**27
# Up to this size the hashes of the files are verified at every opening; it takes a fraction of a second.
VERIFIED_BYTES = 2**28
_KNOWN: dict[str, Path] = {}


def store() -> Path:
    """Where token shards are kept."""
    if given := os.environ.get("HEADCODE_TEXTS"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headcode" / "texts"


def remember(fingerprint: str, folder: str | Path) -> None:
    """Tell this process where shards lie that are not in the store."""
    _KNOWN[fingerprint] = Path(folder)


def open_shards(fingerprint: str) -> "TokenShards":
    """The shards with this fingerprint, wherever they were last seen."""
    places = [folder for folder in (_KNOWN.get(fingerprint), store() / fingerprint[:32]) if folder is not None]
    for folder in places:
        if (folder / INDEX_FILE).is_file():
            shards = TokenShards(folder)
            if shards.fingerprint == fingerprint:
                return shards
    raise ValueError(
        f"The token shards {fingerprint[:12]}… are neither in {' nor in '.join(map(str, places))}; prepare the text "
        f"again with the same headcode train lm command, or set HEADCODE_TEXTS to the folder that holds them."
    )


class TokenShards:
    """A prepared text. Two splits, `train` and `validation`, each one long row of tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = _read_index(folder)
        self._arrays: dict[str, list[np.ndarray]] = {}
        self._verify()

    @property
    def fingerprint(self) -> str:
        return self.index["fingerprint"]

    @property
    def vocab_size(self) -> int:
        return self.index["tokenizer"]["vocab_size"]

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(split for split, facts in self.index["splits"].items() if facts["tokens"])

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        content = read_bytes(self.folder / TOKENIZER_FILE)
        if hashlib.sha256(content).hexdigest() != self.index["tokenizer"]["sha256"]:
            raise ValueError(f"{self.folder / TOKENIZER_FILE} does not have the content that was written.")
        kind = self.index["tokenizer"]["kind"]
        return ByteTokenizer() if kind == "bytes" else read_tokenizer(self.folder / TOKENIZER_FILE, kind)

    def count(self, split: str, what: str = "tokens") -> int:
        """How many tokens, bytes or documents a split has."""
        return self.index["splits"][split][what]

    def read(self, split: str, starts: np.ndarray, length: int) -> np.ndarray:
        """`length` tokens from each of the starts on, (len(starts), length) int64."""
        tokens = self._windows(split, ".bin", self.index["dtype"], starts, length)
        if tokens.size and tokens.max() >= self.vocab_size:
            raise ValueError(
                f"{self.folder} holds the token {tokens.max()}, and its vocabulary has {self.vocab_size}; remove it."
            )
        return tokens

    def read_bytes(self, split: str, starts: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """How many bytes of text each row of tokens that begins at `starts` stands for, exactly."""
        if self._lengths_by_token is not None:
            return self._lengths_by_token[tokens].sum(1)
        return self._windows(split, ".lengths", "uint16", starts, tokens.shape[1]).sum(1)

    @functools.cached_property
    def _lengths_by_token(self) -> np.ndarray | None:
        lengths = self.index["tokenizer"]["byte_lengths"]
        return None if lengths is None else np.array(lengths, dtype=np.int64)

    def _windows(self, split: str, suffix: str, dtype: str, starts: np.ndarray, length: int) -> np.ndarray:
        files = self._files(split, suffix, dtype)
        rows = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(rows, starts.tolist(), strict=True):
            number, place = divmod(start, self.index["shard_tokens"])
            filled = 0
            while filled < length:  # a window may reach into the next file
                part = files[number][place : place + length - filled]
                row[filled : filled + len(part)] = part
                filled, number, place = filled + len(part), number + 1, 0
        return rows

    def _files(self, split: str, suffix: str, dtype: str) -> list[np.ndarray]:
        key = split + suffix
        if key not in self._arrays:
            kind = np.dtype(dtype).newbyteorder("<")
            names = [entry["name"] for entry in self.index["splits"][split]["files"] if entry["name"].endswith(suffix)]
            self._arrays[key] = [np.memmap(self.folder / name, dtype=kind, mode="r") for name in names]
        return self._arrays[key]

    def _verify(self) -> None:
        files = [entry for facts in self.index["splits"].values() for entry in facts["files"]]
        total = sum(entry["bytes"] for entry in files)
        for entry in files:
            path = self.folder / entry["name"]
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                raise ValueError(f"{path} is missing or has another size than was written; remove {self.folder}.")
            if total <= VERIFIED_BYTES and sha256_of(path) != entry["sha256"]:
                raise ValueError(f"{path} does not have the content that was written; remove {self.folder}.")


class ShardWriter:
    """Writes shards under a hidden name; `finish` puts the folder in place, and leaving without it removes everything.

    `tokenizer` decides whether bytes per token are written as well.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder, self.tokenizer, self.shard_tokens = folder, tokenizer, shard_tokens
        self.dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
        self.counts = {split: {"tokens": 0, "bytes": 0, "documents": 0} for split in ("train", "validation")}
        self._files: dict[str, list[_File]] = {split: [] for split in self.counts}

    def __enter__(self) -> "ShardWriter":
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        return self

    def __exit__(self, *exception: object) -> None:
        for files in self._files.values():
            for file in files:
                file.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, split: str, tokens: np.ndarray, lengths: np.ndarray | None, num_bytes: int) -> None:
        counts = self.counts[split]
        position = 0
        while position < len(tokens):
            number, place = divmod(counts["tokens"], self.shard_tokens)
            part = slice(position, position + self.shard_tokens - place)
            self._file(split, number, ".bin").write(tokens[part], self.dtype)
            if lengths is not None:
                self._file(split, number, ".lengths").write(lengths[part], "uint16")
            written = len(tokens[part])
            counts["tokens"] += written
            position += written
        counts["bytes"] += num_bytes

    def end_document(self, split: str) -> None:
        self.counts[split]["documents"] += 1
        if self.tokenizer.end_token is not None:
            none = None if self.tokenizer.byte_lengths is not None else np.zeros(1, dtype=np.int64)
            self.add(split, np.array([self.tokenizer.end_token]), none, 0)

    def finish(self, recipe: str, source: dict[str, Any]) -> Path:
        """Seal the folder and move it to its place; the folder of the same tokens from elsewhere is as good."""
        splits: dict[str, Any] = {}
        for split, files in self._files.items():
            splits[split] = {**self.counts[split], "files": [file.close() for file in files]}
        table = self.tokenizer.byte_lengths
        content = {
            "format": FORMAT,
            "dtype": self.dtype,
            "shard_tokens": self.shard_tokens,
            "tokenizer": {
                "kind": self.tokenizer.kind,
                "vocab_size": self.tokenizer.vocab_size,
                "end_token": self.tokenizer.end_token,
                "sha256": self.tokenizer.sha256,
                "byte_lengths": None if table is None else table.tolist(),
            },
            "splits": splits,
        }
        fingerprint = _fingerprint(content)
        write_bytes(self.folder / TOKENIZER_FILE, self.tokenizer.content)
        index = {**content, "fingerprint": fingerprint, "recipe": recipe, "source": source}
        write_bytes(self.folder / INDEX_FILE, json.dumps(index, indent=1).encode())
        target = self.folder.parent / fingerprint[:32]
        if (target / INDEX_FILE).is_file():
            with contextlib.suppress(ValueError):
                TokenShards(target)
                # The same tokens by another way: only the way is new.
                temporary = target / f".{INDEX_FILE}.{os.getpid()}"
                write_bytes(temporary, json.dumps(index, indent=1).encode())
                temporary.replace(target / INDEX_FILE)
                return target
        shutil.rmtree(target, ignore_errors=True)
        self.folder.rename(target)
        return target

    def _file(self, split: str, number: int, suffix: str) -> "_File":
        name = f"{split}-{number:05d}{suffix}"
        for file in self._files[split]:
            if file.name == name:
                return file
        self._files[split].append(_File(self.folder, name))
        return self._files[split][-1]


class _File:
    """A file that is hashed while it is written."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.size = name, 0
        self._digest = hashlib.sha256()
        self._file: BinaryIO | None = open_own(folder / name, "wb")

    def write(self, numbers: np.ndarray, dtype: str) -> None:
        assert self._file is not None
        if len(numbers) and numbers.max() > np.iinfo(dtype).max:
            raise ValueError(f"A token stands for more than {np.iinfo(dtype).max} bytes of text, which is not text.")
        content = numbers.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
        self._file.write(content)
        self._digest.update(content)
        self.size += len(content)

    def close(self) -> dict[str, Any]:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
        return {"name": self.name, "bytes": self.size, "sha256": self._digest.hexdigest()}


def find_recipe(recipe: str) -> TokenShards | None:
    """The shards in the store that were made by this recipe, whole, or None."""
    for folder in sorted(store().glob("[0-9a-f]*")):
        with contextlib.suppress(ValueError, OSError):
            if _read_index(folder).get("recipe") == recipe:
                return TokenShards(folder)
    return None


@contextlib.contextmanager
def locked_store() -> Iterator[Path]:
    """One process prepares at a time; those that wait find the work done. What a killed one left is removed."""
    folder = store()
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock"):
        for leftover in folder.glob(".prepare-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield folder


def _fingerprint(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        index = read_object(folder / INDEX_FILE)
        content = {key: value for key, value in index.items() if key not in ("fingerprint", "recipe", "source")}
        whole = index.get("format") == FORMAT and index.get("fingerprint") == _fingerprint(content)
    except ValueError:
        whole = False
    if not whole or not _is_index(index):
        raise ValueError(f"{folder / INDEX_FILE} is damaged, or of another version of headcode; remove {folder}.")
    return index


def _is_index(index: dict[str, Any]) -> bool:
    """Whether an index has the entries that `ShardWriter.finish` writes, and its files the sizes that follow."""
    tokenizer, splits, shard_tokens = index.get("tokenizer"), index.get("splits"), index.get("shard_tokens")
    if index.get("dtype") not in ("uint16", "uint32") or not is_count(shard_tokens) or not shard_tokens:
        return False
    if not isinstance(tokenizer, dict) or not isinstance(splits, dict) or "source" not in index:
        return False
    lengths, vocab_size = tokenizer.get("byte_lengths"), tokenizer.get("vocab_size")
    if tokenizer.get("kind") not in KINDS or not is_count(vocab_size, LARGEST_VOCABULARY):
        return False
    if not is_word(tokenizer.get("sha256")) or set(splits) - {"train", "validation"}:
        return False
    if lengths is not None and not (
        isinstance(lengths, list) and len(lengths) == vocab_size and all(is_count(length) for length in lengths)
    ):
        return False
    item_sizes = {".bin": np.dtype(index["dtype"]).itemsize} | ({".lengths": 2} if lengths is None else {})
    for split, facts in splits.items():
        if not isinstance(facts, dict) or not all(is_count(facts.get(n)) for n in ("tokens", "bytes", "documents")):
            return False
        files, starts = facts.get("files"), range(0, facts["tokens"], shard_tokens)
        if not isinstance(files, list) or len(files) != len(starts) * len(item_sizes):
            return False
        expected = [
            (f"{split}-{number:05d}{suffix}", min(facts["tokens"] - first, shard_tokens) * size)
            for number, first in enumerate(starts)
            for suffix, size in item_sizes.items()
        ]
        if not all(isinstance(entry, dict) and is_word(entry.get("sha256")) for entry in files):
            return False
        if [(entry.get("name"), entry.get("bytes")) for entry in files] != expected:
            return False
    return True
