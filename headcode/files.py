"""How the package reads files that somebody else may have written, and how it writes and locks its own.

It reads bounded bytes of regular files, strict JSON and plain arrays. Nothing in a file is run or unpickled, and no
file can make a reader wait (a pipe), fill the memory (a small archive that expands to gigabytes) or overflow the stack
(deep JSON). A bad file is one ValueError that names it; a missing file is an OSError, as usual. The package never
writes through a link or into a pipe.
"""

import codecs
import contextlib
import errno
import hashlib
import json
import math
import os
import stat
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from filelock import lock_descriptor
from numpy.lib import format as npy

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LARGEST_TEXT = 2**29
"""Bytes of a text, a table or a JSON file; the longest records of runs have a few million."""
DEEPEST_JSON = 64
LONGEST_NUMBER = 300
"""Characters of a number in JSON: every such integer is a finite float as well."""
LARGEST_EXPANSION = 20
"""How many times its own size a compressed file may expand to; up to SMALL_ARCHIVE any expansion is allowed."""
SMALL_ARCHIVE = 2**28
_UNFOLLOWED = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # Windows has neither


@contextlib.contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """A folder of our own that is gone afterwards; where none can be made, the error says why (a full disk, say)."""
    try:
        made = tempfile.TemporaryDirectory(prefix=f".headcode-{purpose}-")
    except FileNotFoundError:  # says only that no candidate could be written to, whatever the reason was
        first = os.environ.get("TMPDIR") or os.curdir
        made = tempfile.TemporaryDirectory(prefix=f".headcode-{purpose}-", dir=first)
    with made as name:
        yield Path(name)


@contextlib.contextmanager
def open_regular(path: str | Path) -> Iterator[IO[bytes]]:
    """The file, opened for reading; a pipe, a device or a folder is refused and never waited for."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path} is not a regular file.")
        yield file


def open_own(path: str | Path, mode: str, **options: Any) -> Any:
    """`open` for the files that the package writes: a symbolic link is not followed, a pipe not waited for."""
    return open(path, mode, opener=_open_descriptor, **options)


def _open_descriptor(path: str, flags: int) -> int:
    try:
        descriptor = os.open(path, (flags & ~os.O_TRUNC) | _UNFOLLOWED, 0o666)
    except OSError:
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            raise _not_regular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path)
    if flags & os.O_TRUNC:  # only now: the file is known to be a regular one
        os.ftruncate(descriptor, 0)
    return descriptor


def _not_regular(path: str) -> OSError:
    return OSError(errno.EINVAL, f"{path} is not a regular file but a link, a pipe or the like; remove it")


def take_lock(path: Path) -> IO[str] | None:
    """The file at `path`, locked until it is closed; None if another process holds the lock.

    The lock is the system's, which releases it when a process ends, however it ends: what is in the file, and that the
    file is there, means nothing.
    """
    file = open_own(path, "a+", encoding="utf-8", errors="replace")
    try:
        if lock_descriptor(file.fileno(), blocking=False):
            return file
    except BaseException:
        file.close()
        raise
    file.close()
    return None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside the `with`, the lock of `take_lock`; waits for a process that holds it."""
    with open_own(path, "a") as file:
        lock_descriptor(file.fileno())
        yield


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock now; no, where there is no such file or none of ours.

    Looking takes a shared lock where the system has one: others who look do not see it, and it needs no right to write.
    """
    try:
        with open_own(path, "r" if fcntl else "r+") as file:
            if fcntl is None:
                return not lock_descriptor(file.fileno(), blocking=False)
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def write_bytes(path: Path, content: bytes) -> None:
    """Write and sync; for files inside a folder that is not in place yet."""
    with open_own(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Put a file in place in one move: a reader sees the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_bytes(temporary, content)
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last through a power cut (where the system can open folders)."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def to_json(values: Any) -> bytes:
    return (json.dumps(values, indent=2, allow_nan=False) + "\n").encode()


def canonical(values: Any) -> bytes:
    """One spelling per value, for hashing."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def is_plain_name(name: object) -> bool:
    """Whether a name found in a file can only mean an entry of the folder that it is looked up in.

    >>> [is_plain_name(name) for name in ("model.safetensors", "..", "a/b", "C:x", "")]
    [True, False, False, False, False]
    """
    return isinstance(name, str) and name not in ("", ".", "..") and not any(mark in name for mark in "/\\:\0")


def is_there(path: str | Path) -> bool:
    """Whether there is a regular file; a pipe, a device or a folder in its place is an error, not a missing file."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is not a regular file.")
    return os.path.exists(path)


def read_bytes(path: str | Path, limit: int = LARGEST_TEXT) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    with open_regular(path) as file:
        content = file.read(limit + 1) if os.fstat(file.fileno()).st_size <= limit else None
    if content is None or len(content) > limit:
        raise ValueError(f"{path} is larger than the {limit:,} bytes that such a file may have.")
    return content


def read_text(path: str | Path, limit: int = LARGEST_TEXT) -> str:
    """The text of a regular file in UTF-8."""
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 (byte {error.start}).") from None


def read_beginning(path: str | Path, limit: int) -> str:
    """At most the first `limit` bytes of a text in UTF-8; a character that they cut is left out."""
    with open_regular(path) as file:
        content, is_cut = file.read(limit), bool(file.read(1))
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(content, final=not is_cut)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 (byte {error.start}).") from None


def parse_json(text: str, what: str | Path = "The text") -> Any:
    """Strict JSON: no NaN or Infinity, no key twice, nothing deep or endless. `what` names the text in a complaint."""
    try:
        value = _STRICT.decode(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a character, which no file can be written with
    except RecursionError:
        raise ValueError(f"{what} is not valid JSON: it is nested too deeply.") from None
    except ValueError as error:
        raise ValueError(f"{what} is not valid JSON: {error}.") from None
    if _is_deep(value):
        raise ValueError(f"{what} is not valid JSON: it is nested too deeply.")
    return value


def read_json(path: str | Path) -> Any:
    """The JSON value in a file."""
    return parse_json(read_text(path), path)


def read_object(path: str | Path, complaint: Callable[[str], Exception] = ValueError) -> dict[str, Any]:
    """The JSON object in a file, or one clear sentence."""
    try:
        value = read_json(path)
    except ValueError as error:
        raise complaint(str(error)) from None
    if not isinstance(value, dict):
        raise complaint(f"{path} must hold a JSON object, got {type(value).__name__}.")
    return value


def is_number(value: Any) -> bool:
    """Whether a value from JSON is a number; true and false are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_count(value: Any, most: int = 2**63 - 1) -> bool:
    """Whether a value from JSON is a whole number from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def is_word(value: Any, longest: int = 200) -> bool:
    """Whether a value from JSON is a name that can be shown: one line, not endless."""
    return isinstance(value, str) and value.isprintable() and len(value) <= longest


def read_npz(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file; the sizes that it declares are checked before anything is taken for them."""
    arrays: dict[str, np.ndarray] = {}
    with open_npz(path) as (archive, size):
        check_expansion(size, sum(member.file_size for member in archive.infolist()))
        for member in archive.infolist():
            with archive.open(member) as file:
                shape, fortran, dtype = array_header(file, member.file_size)
                flat = np.frombuffer(file.read(), dtype)
            order = "F" if fortran else "C"
            arrays[member.filename.removesuffix(".npy")] = flat.reshape(shape, order=order)  # type: ignore[call-overload]
    return arrays


@contextlib.contextmanager
def open_npz(
    path: str | Path, complaint: str = "is not an .npz file of arrays"
) -> Iterator[tuple[zipfile.ZipFile, int]]:
    """The archive and its size; what is wrong with it or with its members becomes one sentence."""
    with open_regular(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                yield archive, os.fstat(file.fileno()).st_size
        except Exception as error:  # zipfile and numpy have one for each thing that can be wrong, from KeyError on
            reason = " ".join(str(error).split()).rstrip(".")[:200] or type(error).__name__
            raise ValueError(f"{path} {complaint}: {reason}.") from error


def check_expansion(size: int, expanded: int, largest: int = LARGEST_EXPANSION) -> None:
    """Refuse a compressed file of `size` bytes that would fill the memory."""
    if expanded > max(SMALL_ARCHIVE, largest * size):
        raise ValueError(f"its {size:,} bytes expand to {expanded:,}, which no real data do; save it uncompressed")


def array_header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and dtype of the .npy file that starts here and has `size` bytes; they fit together."""
    start = file.tell()
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds pickled objects, which are never loaded")
    wanted, found = math.prod(shape) * dtype.itemsize, size - (file.tell() - start)
    if min(shape, default=0) < 0 or wanted != found:
        raise ValueError(f"an array of shape {shape} and {dtype} has {wanted} bytes, and {found} are there")
    return shape, fortran, dtype


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r:.80} stands twice; keep one")
    return values


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a number of JSON")


def _whole_number(digits: str) -> int:
    if len(digits) > LONGEST_NUMBER:
        raise ValueError(f"a whole number has {len(digits)} digits, more than {LONGEST_NUMBER}")
    return int(digits)


def _finite_number(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits:.40} is beyond the largest float")
    return number


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST_JSON):
        nested = [part for part in level if isinstance(part, (dict, list))]
        level = [child for part in nested for child in (part.values() if isinstance(part, dict) else part)]
        if not level:
            return False
    return True


_STRICT = json.JSONDecoder(
    object_pairs_hook=_without_duplicates,
    parse_constant=_refuse_constant,
    parse_int=_whole_number,
    parse_float=_finite_number,
)
