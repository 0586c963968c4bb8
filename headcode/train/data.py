"""Batches drawn ahead on a thread, so that the model never waits for data."""

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
        # Not a bounded queue: its lock is handed to the thread at every item, and the model would wait for it.
        self._items: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="headcode-batches", daemon=True)

    def __enter__(self) -> "Prefetcher[T]":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed = True
        self._room.release()
        self._thread.join()

    def __iter__(self) -> Iterator[T]:
        for _ in range(self._first, self._stop):
            item, error = self._items.get()
            if error is not None:
                raise error
            self._room.release()
            yield item  # type: ignore[misc]
            del item

    def _run(self) -> None:
        for index in range(self._first, self._stop):
            self._room.acquire()
            if self._closed:
                return
            try:
                self._items.put((self._make(index), None))
            except BaseException as error:
                self._items.put((None, error))
                return
