"""Numba at arm's length: compiled at first call, cached for the user, never needed for a right answer.

Modules that hold kernels import `njit` from here and are themselves imported at first use, so that `import headcode`
never pays for Numba. Without Numba, or with HEADCODE_DISABLE_NUMBA=1, `njit` leaves plain Python functions.
"""

import contextlib
import functools
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


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


def njit(**options: Any) -> Callable[[Callable], Callable]:
    """`numba.njit(nogil=True, **options)` with a cache that can fail; the plain function where Numba is off."""

    def decorate(function: Callable) -> Callable:
        if not numba_enabled():
            return function
        import numba

        dispatcher = numba.njit(nogil=True, **options)(function)
        # A cache that cannot be opened, read or written costs time, never an answer.
        with contextlib.suppress(OSError, RuntimeError), _numba_cache_folder(function) as folder:
            # Numba would otherwise go on to the package's own folder, where nothing tells old sources from new.
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            dispatcher.enable_caching()
            cache = dispatcher._cache
            cache.load_overload = _or_nothing(cache.load_overload)
            cache.save_overload = _or_nothing(cache.save_overload)
        return dispatcher

    return decorate


def address_of(kernel: Any) -> int:
    """The address of a kernel that takes one 64-bit number, compiled if need be: for callers other than Python."""
    from numba import types

    kernel.compile((types.int64,))
    compiled = kernel.overloads[(types.int64,)]
    return compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name)


def _or_nothing(function: Callable) -> Callable:
    """The function, which returns None where it would fail: a damaged cache file may raise anything."""

    @functools.wraps(function)
    def attempt(*arguments: Any) -> Any:
        with contextlib.suppress(Exception):
            return function(*arguments)
        return None

    return attempt


@contextlib.contextmanager
def _numba_cache_folder(function: Callable) -> Iterator[Path]:
    """Numba chooses a function's cache folder when caching is enabled; ours must not move other packages' caches."""
    from numba.core import config

    folder = cache_folder() / _fingerprint(Path(function.__code__.co_filename).parent)
    before = config.CACHE_DIR
    config.CACHE_DIR = str(folder)
    try:
        yield folder
    finally:
        config.CACHE_DIR = before


@functools.cache
def _fingerprint(folder: Path) -> str:
    """Of the kernel modules (`_*.py`) of a package. Numba compiles a function's callees into it, but looks only at the
    function's own file to see whether the cache is stale."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("_*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]
