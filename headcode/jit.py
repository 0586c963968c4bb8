"""Numba at arm's length: compiled at first call, kept for the user, never needed for a right answer.

Modules that hold kernels import `njit` from here and are themselves imported at first use, so that `import headcode`
never pays for Numba. Without Numba, or with HEADCODE_DISABLE_NUMBA=1, `njit` leaves plain Python functions.

Compiled kernels are kept on disk, and to load one is to run it. Three things make that safe: the name of a file and of
its folder are hashes of all that the kernel was made from and for; a folder in which another user could place files is
refused; and each file begins with a hash of the rest, so that a damaged one is compiled anew. Whatever goes wrong with
the cache costs time, never an answer.
"""

import contextlib
import functools
import gc
import hashlib
import importlib.util
import logging
import os
import pickle
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headcode import private_api

_PACKAGE = Path(__file__).parent
_IMPORTED_AT = time.time()

announce: Callable[[str], None] = logging.getLogger("headcode").info
"""Told once per process that kernels are being compiled; commands have it print."""


def why_disabled() -> str | None:
    """Why kernels do not compile, or None when they do."""
    if os.environ.get("HEADCODE_DISABLE_NUMBA", "0") not in ("", "0"):
        return "HEADCODE_DISABLE_NUMBA switches compiled kernels off"
    if importlib.util.find_spec("numba") is None:
        return "it needs Numba, which is not installed (pip install numba)"
    return None


def numba_enabled() -> bool:
    """Whether kernels compile: Numba is installed and HEADCODE_DISABLE_NUMBA is not set to 1."""
    return why_disabled() is None


def cache_folder() -> Path:
    """Where compiled kernels are kept: HEADCODE_CACHE_DIR, else Numba's own setting, else the user's cache folder."""
    if explicit := os.environ.get("HEADCODE_CACHE_DIR"):
        return Path(explicit) / "numba"
    if numbas := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(numbas)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headcode" / "numba"


def njit(*, key: tuple[str, ...] = (), on_disk: bool = True, **options: Any) -> Callable[[Callable], Callable]:
    """`numba.njit(nogil=True, **options)` with a cache that can fail; the plain function where Numba is off.

    What a closure holds is in no source file, so a function that is one is kept on disk only if `key` names it: no two
    that are made at one line may have the same. What only other kernels call is in their files, and needs none itself.
    """

    def decorate(function: Callable) -> Callable:
        if not numba_enabled():
            return function
        import numba

        if key:
            # Numba makes symbols of names, and a process may load two kernels that others have compiled.
            function.__qualname__ = "_".join((function.__qualname__, *key))
        dispatcher = numba.njit(nogil=True, **options)(function)
        if on_disk and (function.__closure__ is None or key):
            private_api.set_kernel_cache(dispatcher, _KernelCache(function, key))
        return dispatcher

    return decorate


def address_of(kernel: Any) -> int:
    """The address of a kernel that takes one 64-bit number, compiled if need be: for callers other than Python."""
    from numba import types

    # Numba makes objects by the million and keeps most: the collector would look through them again and again, for
    # nothing, an eighth of the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        kernel.compile((types.int64,))
    finally:
        if was_enabled:
            gc.enable()
    return private_api.kernel_address(kernel, (types.int64,))


def is_kept(kernel: Any) -> bool:
    """Whether a kernel that takes one 64-bit number is in the cache on disk."""
    from numba import types

    cache = private_api.kernel_cache(kernel)
    return isinstance(cache, _KernelCache) and cache.has((types.int64,), private_api.kernel_target(kernel))


def may_be_kept(room: str) -> bool:
    """Whether kernels of a room (`ops`, `tasks`) can be kept on disk, and there is a folder for them."""
    return numba_enabled() and _sources_are_those_imported(room) and _folder(room) is not None


class _KernelCache:
    """What a dispatcher of Numba asks of its cache: here one file per kernel, signature and processor.

    Numba's own cache unpickles what it finds, looks only at the function's own file to see whether it is stale, and
    keeps an index that two processes can overwrite for each other.
    """

    def __init__(self, function: Callable, key: tuple[str, ...]) -> None:
        self._function, self._key = function, key
        self._flushed = False

    @property
    def cache_path(self) -> str:
        return str(cache_folder())

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The compiled kernel, or None if there is none that can be trusted."""
        target_context.refresh()
        # Whatever a file raises, the kernel can be compiled.
        with contextlib.suppress(Exception):
            if path := self._path(signature, target_context.codegen()):
                return private_api.rebuild_kernel(target_context, pickle.loads(_read_sealed(path)))
        _announce_compiling()
        return None

    def has(self, signature: Any, target_context: Any) -> bool:
        """Whether there is a file, whatever its state."""
        target_context.refresh()
        path = self._path(signature, target_context.codegen())
        return path is not None and path.is_file()

    def save_overload(self, signature: Any, compiled: Any) -> None:
        with contextlib.suppress(Exception):
            path, payload = self._path(signature, compiled.library.codegen), private_api.pickle_kernel(compiled)
            if path and payload:
                _write_sealed(path, payload)

    def flush(self) -> None:
        """Called by a dispatcher's `recompile`, after which its kernels may no longer be what the sources say."""
        self._flushed = True

    def _path(self, signature: Any, codegen: Any) -> Path | None:
        """Where the kernel is kept, or None where nothing may be."""
        package, _, module = self._function.__module__.partition(".")
        room = module.partition(".")[0]
        if self._flushed or package != __package__ or not _sources_are_those_imported(room):
            return None
        folder = _folder(room)
        # Numba's word for the processor: its name and features, or what NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say.
        processor = codegen.magic_tuple()
        line = self._function.__code__.co_firstlineno
        parts = (module, self._function.__qualname__, line, *self._key, signature, processor)
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()
        return folder and folder / f"{self._function.__name__}-{digest}.nbc"


@functools.cache
def _announce_compiling() -> None:
    """Said once: a first run on a machine waits, and its user should know for what."""
    announce(
        "compiling kernels for this processor: about ten seconds; they are kept for the next time "
        "(headcode warmup compiles those of all presets ahead)."
    )


def _folder(room: str) -> Path | None:
    """Where the kernels of a room are kept; None if others could place files there."""
    return private_folder(cache_folder() / _fingerprint(room))


@functools.cache
def sources(room: str) -> tuple[Path, ...]:
    """The files that kernels of one room (`ops`, `tasks`) can see: those of the room and of the package's top level."""
    paths = [*_PACKAGE.glob("*.py"), *(_PACKAGE / room).rglob("*.py")]
    return tuple(sorted(path for path in paths if path.is_file()))


def _sources_are_those_imported(room: str) -> bool:
    """Whether there are sources, and none was edited under this process, which may have imported another version."""
    statuses = [path.stat() for path in sources(room)]
    return 0 < max((max(status.st_mtime, status.st_ctime) for status in statuses), default=0) <= _IMPORTED_AT


@functools.cache
def _fingerprint(room: str) -> str:
    """Of all that decides what the kernels of one room compile to, but for signature and processor."""
    import llvmlite
    import numba
    import numpy as np

    digest = hashlib.sha256(repr((sys.version, numba.__version__, llvmlite.__version__, np.__version__)).encode())
    for path in sources(room):
        content = path.read_bytes()
        digest.update(f"\n{path.relative_to(_PACKAGE).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:32]


@functools.cache
def private_folder(folder: Path, what: str = "Compiled kernels") -> Path | None:
    """The folder, its links resolved, made if it is missing; None if that fails or others could place files in it.

    Each folder on the way to it is looked at too, or its owner could put another one in its place. `what` is
    kept there.
    """
    folder = Path(os.path.realpath(folder))
    try:
        for path in (*reversed(folder.parents), folder):
            path.mkdir(mode=0o700, exist_ok=True)
            if danger := _open_to_others(path.lstat(), on_the_way=path != folder):
                warnings.warn(
                    f"{what} are not kept on disk: {path} {danger}, who could put others in their place; "
                    "set HEADCODE_CACHE_DIR to a folder that belongs to you and that nobody else may write to.",
                    stacklevel=2,
                )
                return None
    except OSError:
        return None
    return folder


def _open_to_others(status: os.stat_result, *, on_the_way: bool = False) -> str | None:
    """How users other than this one and root could change a file or what a folder holds; None if they cannot."""
    if not hasattr(os, "geteuid"):
        return None  # Windows keeps the folders of users apart by other means, which modes do not show.
    if status.st_uid not in (os.geteuid(), 0) and not (on_the_way and status.st_uid == _unmapped_user()):
        return f"belongs to another user (number {status.st_uid})"
    writers = status.st_mode & 0o022
    if writers == 0o020 and _is_own_group(status.st_gid):
        return None
    # In a sticky folder, such as /tmp, others may add files but not replace or rename what is ours.
    if writers and not (on_the_way and status.st_mode & stat.S_ISVTX):
        return f"is writable by other users (mode {stat.S_IMODE(status.st_mode):o})"
    return None


@functools.cache
def _unmapped_user() -> int | None:
    """Whose files those of root appear to be inside a container without root's rights; None outside of one."""
    try:
        first, _, count = Path("/proc/self/uid_map").read_text().split()[:3]
        everyone = int(first) == 0 and int(count) == 2**32 - 1
        return None if everyone else int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return None


def _is_own_group(number: int) -> bool:
    """Whether a group is the user's private one, as where new folders are writable by it (umask 002): nobody else's."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:
        return False
    return (group.gr_gid, group.gr_name) == (user.pw_gid, user.pw_name) and set(group.gr_mem) <= {user.pw_name}


def _seal(path: Path, payload: bytes) -> bytes:
    # With its name, so that no kernel is taken for another one.
    return hashlib.sha256(path.name.encode() + payload).digest()


def _read_sealed(path: Path) -> bytes:
    """What `_write_sealed` wrote; an error if it is damaged or another user could have changed it."""
    plain = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | plain)) as file:
        if _open_to_others(os.fstat(file.fileno())):
            raise PermissionError(path)
        seal, payload = file.read(hashlib.sha256().digest_size), file.read()
    if seal != _seal(path, payload):
        raise ValueError(path)
    return payload


def _write_sealed(path: Path, payload: bytes) -> None:
    """Whole or not at all, also when the disk is full or several processes write at once."""
    descriptor, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(_seal(path, payload) + payload)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
