"""Numba at arm's length: compiled at first call, cached for the user, never needed for a right answer.

Modules that hold kernels import `njit` from here and are themselves imported at first use, so that `import headcode`
never pays for Numba. Without Numba, or with HEADCODE_DISABLE_NUMBA=1, `njit` leaves plain Python functions.
"""

import contextlib
import importlib.util
import os
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
    """Where compiled kernels are kept: HEADCODE_CACHE_DIR, else the user's cache folder."""
    if explicit := os.environ.get("HEADCODE_CACHE_DIR"):
        return Path(explicit) / "numba"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headcode" / "numba"


def njit(**options: Any) -> Callable[[Callable], Callable]:
    """`numba.njit(nogil=True, **options)` with a cache that can fail; the plain function where Numba is off."""

    def decorate(function: Callable) -> Callable:
        if not numba_enabled():
            return function
        import numba

        dispatcher = numba.njit(nogil=True, **options)(function)
        # A cache that cannot be opened or written costs time, never an answer.
        with contextlib.suppress(OSError, RuntimeError), _numba_cache_folder():
            dispatcher.enable_caching()
            save = dispatcher._cache.save_overload

            def save_if_possible(signature: Any, data: Any) -> None:
                with contextlib.suppress(OSError):
                    save(signature, data)

            dispatcher._cache.save_overload = save_if_possible
        return dispatcher

    return decorate


@contextlib.contextmanager
def _numba_cache_folder() -> Iterator[None]:
    """Numba chooses a function's cache folder when caching is enabled; ours must not move other packages' caches."""
    from numba.core import config

    before = config.CACHE_DIR
    if not before:
        config.CACHE_DIR = str(cache_folder())
    try:
        yield
    finally:
        config.CACHE_DIR = before
