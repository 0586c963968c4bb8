"""Files that appear whole or not at all, and JSON as they hold it."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from headcode.files import open_own, open_regular


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
