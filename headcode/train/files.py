"""Files that appear whole or not at all, and strict JSON out of files that may be damaged or hostile."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headcode.safety import open_regular


def write_bytes(path: Path, content: bytes) -> None:
    """Write and sync; for files inside a folder that is not in place yet."""
    with open_regular(path, "wb") as file:
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
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def to_json(values: Any) -> bytes:
    return (json.dumps(values, indent=2, allow_nan=False) + "\n").encode()


def canonical(values: Any) -> bytes:
    """One spelling per value, for hashing."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def read_object(path: Path, complaint: Callable[[str], Exception] = ValueError) -> dict[str, Any]:
    """The JSON object in a file, or one clear sentence; whatever the bytes are, nothing in them is run."""
    try:
        values = json.loads(path.read_bytes().decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise complaint(f"{path} is not valid JSON.") from None
    if not isinstance(values, dict):
        raise complaint(f"{path} must hold a JSON object, got {type(values).__name__}.")
    return values
