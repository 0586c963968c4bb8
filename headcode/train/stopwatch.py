"""Where a run's time goes: training steps, waiting for data, and the rest."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Stopwatch:
    """Measures the time of training steps between two readings, without evaluations and checkpoints."""

    def __init__(self, step: int) -> None:
        self._started = self._last = time.perf_counter()
        self._step, self._paused, self._waited = step, 0.0, 0.0
        self.waited = 0.0
        """Seconds of waiting for data, all in all."""

    def waiting(self, items: Iterable[T]) -> Iterator[T]:
        """The same items; the time until each arrives counts as waiting for data."""
        iterator = iter(items)
        while True:
            start = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            waited = time.perf_counter() - start
            self._waited += waited
            self.waited += waited
            yield item
            # Freeing a tensor lets other threads run: not while the next item is waited for.
            del item

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - start

    def read(self, step: int) -> dict[str, float]:
        """Steps per second and the share of time spent waiting for data since the last reading."""
        now = time.perf_counter()
        training = max(now - self._last - self._paused, 1e-9)
        reading = {
            "seconds": round(now - self._started, 3),
            "steps_per_second": round((step - self._step) / training, 3),
            "data_wait": round(self._waited / training, 6),
        }
        self._last, self._step, self._paused, self._waited = now, step, 0.0, 0.0
        return reading
