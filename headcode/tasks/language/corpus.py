"""Where text comes from: files and folders, Python's own sources, and Hugging Face datasets as streams.

A source gives documents, each one in `train` or in `validation`, always in the same order and however many processes
read it. Which side a document is on is decided by its content alone, so that a copy of a training document is never
validation. A text of few documents is divided inside each of them: its end is for validation.
"""

import contextlib
import fnmatch
import hashlib
import logging
import math
import mmap
import os
import socket
import sysconfig
import urllib.parse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

PIECE_BYTES = 2**20
"""Longer documents are encoded piece by piece, cut behind a line's end."""
VALIDATION_BYTES = 2**24
"""Of the validation split of a dataset that is not prepared whole, about so much is kept."""
FEW_DOCUMENTS = 20
"""Fewer documents than this are each divided into a training and a validation part."""


class Document(NamedTuple):
    """One text, or one side of it; its pieces are to be read before the next document is asked for."""

    split: str
    pieces: Iterable[str]


class Source(Protocol):
    """Anything that gives documents."""

    def identity(self) -> dict[str, Any]:
        """What decides the documents: goes into the recipe of the shards."""

    def words(self) -> dict[str, Any]:
        """How a person would find the text again."""

    def documents(self, validation: float) -> Iterator[Document]:
        """All documents, in order; `validation` is the share of the text that is not trained on."""


class TextFiles:
    """A text file, or the text files of a folder whose names fit a pattern; its other files are passed over."""

    def __init__(self, path: str | Path, pattern: str = "*") -> None:
        self.root, self.pattern = Path(path), pattern
        self.skipped: list[str] = []
        """Files of a folder that are not text."""
        if not self.root.exists():
            raise ValueError(f"There is no file or folder {self.root}.")
        alone = self.root.is_file()
        if alone and pattern != "*":
            raise ValueError(
                f"The pattern {pattern} chooses among the files of a folder, but {self.root} is one file; leave it out."
            )
        self._entries: list[tuple[Path, str]] = []
        for file in [self.root] if alone else self._listed():
            with _mapped(file) as content:
                problem = _why_not_text(content)
                if problem and alone:
                    raise ValueError(f"{file} {problem}; a language model needs text in UTF-8.")
                if problem is None:
                    self._entries.append((file, hashlib.blake2b(content, digest_size=16).hexdigest()))
                else:
                    self.skipped.append(str(file))
        if not self._entries:
            raise ValueError(f"{self.root} has no text file named {self.pattern} (text is UTF-8 and not empty).")

    def _listed(self) -> list[Path]:
        found = []
        for folder, folders, names in os.walk(self.root):
            folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
            fitting = (name for name in fnmatch.filter(names, self.pattern) if not name.startswith("."))
            found += [Path(folder) / name for name in fitting]
        return sorted((file for file in found if file.is_file()), key=lambda file: file.relative_to(self.root).parts)

    def identity(self) -> dict[str, Any]:
        return {"kind": "files", "documents": [digest for _, digest in self._entries]}

    def words(self) -> dict[str, Any]:
        return {"text": str(self.root.resolve()), "files": self.pattern}

    def documents(self, validation: float) -> Iterator[Document]:
        few = len(self._entries) < FEW_DOCUMENTS
        # Of few documents it may happen that none is below the threshold; the lowest is validation all the same.
        lowest = min(digest for _, digest in self._entries) if validation else None
        for file, digest in self._entries:
            with _mapped(file) as content:
                if hashlib.blake2b(content, digest_size=16).hexdigest() != digest:
                    raise ValueError(f"{file} changed while it was being read; try again.")
                if few:
                    cut = _cut(content, 0, int((1 - validation) * len(content))) if validation else len(content)
                    yield Document("train", _pieces(content, 0, cut))
                    if cut < len(content):
                        yield Document("validation", _pieces(content, cut, len(content)))
                else:
                    side = "validation" if digest == lowest else _side(digest, validation)
                    yield Document(side, _pieces(content, 0, len(content)))


class StandardLibrary(TextFiles):
    """The sources of this Python's standard library, without its tests: text that every machine has."""

    def __init__(self) -> None:
        super().__init__(sysconfig.get_path("stdlib"), "*.py")

    def _listed(self) -> list[Path]:
        outside = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
        return [file for file in super()._listed() if not outside & set(file.relative_to(self.root).parts)]

    def words(self) -> dict[str, Any]:
        return {"dataset": "python"}


class KnownDataset(NamedTuple):
    """A dataset of the Hugging Face hub under a short name."""

    name: str
    config: str
    whole: bool
    """Prepared whole, and not just as far as the run reads."""


DATASETS = {
    "c4": KnownDataset("allenai/c4", "en", whole=False),
    "wikitext": KnownDataset("Salesforce/wikitext", "wikitext-103-raw-v1", whole=True),
}
PYTHON = "python"


class StreamedDataset:
    """A dataset of the Hugging Face hub, or a local one, read as a stream; its own validation split is used.

    `name` is a short name of ours (`c4`, `wikitext`), NAME or NAME:CONFIG of the hub, or a folder of data files.
    """

    def __init__(self, name: str, column: str = "text") -> None:
        if not name.strip():
            raise ValueError(f"A dataset needs a name: {PYTHON}, {', '.join(DATASETS)}, one of the hub, or a folder.")
        self.given, self.column = name, column
        known = DATASETS.get(name)
        self.whole = known is not None and known.whole
        folder = Path(name).expanduser()
        self.name, self.config = (str(folder), None) if folder.is_dir() else _split_name(name)
        if known is not None:
            self.name, self.config = known.name, known.config
        self.is_local = folder.is_dir()

    def identity(self) -> dict[str, Any]:
        identity: dict[str, Any] = {"kind": "dataset", "name": self.name, "config": self.config, "column": self.column}
        if self.is_local:
            files = sorted(file for file in Path(self.name).rglob("*") if file.is_file())
            identity["files"] = [[str(f.relative_to(self.name)), f.stat().st_size, f.stat().st_mtime_ns] for f in files]
        return identity

    def words(self) -> dict[str, Any]:
        return {"dataset": self.given, "column": self.column}

    def documents(self, validation: float) -> Iterator[Document]:
        with self._explained():
            splits = self._load()
        own = validation > 0 and "validation" in splits
        # Validation first: what is read of the training part depends on how long the run is.
        for split in (["validation"] if own else []) + ["train"]:
            left = VALIDATION_BYTES if split == "validation" and not self.whole else math.inf
            for text in self._texts(splits[split]):
                content = text.encode()
                side = split if own else _side(hashlib.blake2b(content, digest_size=16).hexdigest(), validation)
                yield Document(side, _pieces(content, 0, len(content)))
                left -= len(content)
                if left <= 0:
                    break

    def _texts(self, rows: Any) -> Iterator[str]:
        article: list[str] = []
        iterator = iter(rows)
        while True:
            with self._explained():
                row = next(iterator, None)
            if row is None:
                break
            text = row.get(self.column)
            if not isinstance(text, str):
                raise ValueError(
                    f"The dataset {self.given} has no text in the column {self.column!r}; it has: {', '.join(row)}."
                )
            if self.name != DATASETS["wikitext"].name:
                if text:
                    yield text
                continue
            # WikiText has a row per line; a heading with one equals sign on each side begins an article.
            line = text.strip()
            if line.startswith("= ") and line.endswith(" =") and not line.startswith("= =") and article:
                yield "".join(article)
                article = []
            if line or article:
                article.append(text if text.endswith("\n") else text + "\n")
        if article:
            yield "".join(article)

    def _load(self) -> Any:
        if not self.is_local and not _hub_is_there():
            # Minutes of attempts to connect would end alike; what is in the local cache is found all the same.
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            import datasets
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "--dataset needs the package datasets: pip install 'headcode[hf]'; or give --text FILE."
            ) from None
        datasets.disable_progress_bars()
        # Its warnings about every attempt to connect would stand before our one sentence.
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        folder = Path(self.name)
        if self.is_local and (folder / "dataset_dict.json").is_file():
            return {name: part.to_iterable_dataset() for name, part in datasets.load_from_disk(self.name).items()}
        if self.is_local and (folder / "state.json").is_file():
            return {"train": datasets.load_from_disk(self.name).to_iterable_dataset()}
        loaded = datasets.load_dataset(self.name, self.config, streaming=True)
        if "train" not in loaded:
            raise ValueError(f"The dataset {self.given} has no split 'train'; it has: {', '.join(loaded)}.")
        return loaded

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except ModuleNotFoundError:
            raise
        except Exception as error:  # datasets lets through whatever its many readers and the network raise
            words = " ".join(str(error).split())
            reason = words if len(words) < 160 else words[:160] + "…"
            raise ValueError(
                f"The dataset {self.given!r} could not be reached or read ({reason.rstrip('.')}); check its name and "
                f"the network, or give a local text with --text."
            ) from None


def find_dataset(name: str, column: str = "text") -> Source:
    """`python`, a short name, a name of the hub or a folder."""
    return StandardLibrary() if name == PYTHON else StreamedDataset(name, column)


def _split_name(name: str) -> tuple[str, str | None]:
    repository, _, config = name.partition(":")
    if not repository or repository.startswith((".", "/", "~")):
        raise ValueError(f"There is no dataset {name}: it is neither a folder nor a name on the hub.")
    return repository, config or None


def _hub_is_there() -> bool:
    """Whether the hub's name can be looked up: False means that this machine is offline."""
    host = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    return True


def _side(digest: str, validation: float) -> str:
    return "validation" if int(digest[:12], 16) < validation * 16**12 else "train"


@contextlib.contextmanager
def _mapped(file: Path) -> Iterator[Any]:
    """The bytes of a file, without loading it whole."""
    with file.open("rb") as opened:
        if os.fstat(opened.fileno()).st_size == 0:
            yield b""
            return
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield content


def _why_not_text(content: Any) -> str | None:
    """What is wrong with a file that is not text; None for text."""
    if len(content) == 0:
        return "is empty"
    if content.find(b"\0") >= 0:
        return "is a binary file"
    start = 0
    while start < len(content):
        stop = min(start + PIECE_BYTES, len(content))
        while stop < len(content) and content[stop] & 0xC0 == 0x80 and stop > start + PIECE_BYTES - 4:
            stop -= 1
        try:
            content[start:stop].decode()
        except UnicodeDecodeError as error:
            return f"is not text in UTF-8 (byte {start + error.start})"
        start = stop
    return None


def _pieces(content: Any, start: int, stop: int) -> Iterator[str]:
    while start < stop:
        cut = stop if stop - start <= PIECE_BYTES else _cut(content, start, start + PIECE_BYTES)
        yield content[start:cut].decode()
        start = cut


def _cut(content: Any, start: int, target: int) -> int:
    """A place at or before `target`, behind a line's end if there is one near, never inside a character."""
    near = max(start, target - PIECE_BYTES // 16)
    newline = content.rfind(b"\n", near, target)
    if newline >= start:
        return newline + 1
    while target > start + 1 and target < len(content) and content[target] & 0xC0 == 0x80:
        target -= 1
    return max(target, start + 1)
