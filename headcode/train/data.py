"""Batches drawn ahead on a thread, so that the model never waits for data."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """`make(first)`, `make(first + 1)`, … `make(stop - 1)`, in order, each made before it is asked for.

    An error in the thread is raised where the item is asked for. Leaving the `with` block ends the thread.

    >>> with Prefetcher(lambda index: index * index, 2, 5) as squares:
    ...     list(squares)
    [4, 9, 16]
    """

    def __init__(self, make: Callable[[int], T], first: int, stop: int, depth: int = 4) -> None:
        self._make, self._first, self._stop = make, first, stop
        self._queue: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headcode-batches", daemon=True)

    def __enter__(self) -> "Prefetcher[T]":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        # The thread may wait for room in the queue: make some until it notices.
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._queue.get_nowait()
            self._thread.join(timeout=0.01)

    def __iter__(self) -> Iterator[T]:
        for _ in range(self._first, self._stop):
            item, error = self._queue.get()
            if error is not None:
                raise error
            yield item  # type: ignore[misc]

    def _run(self) -> None:
        for index in range(self._first, self._stop):
            if self._closed.is_set():
                return
            try:
                self._queue.put((self._make(index), None))
            except BaseException as error:
                self._queue.put((None, error))
                return
