"""Batches drawn in advance by a thread, so that the model never waits for data."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from headcode.train.runtime import TrainingFailed

T = TypeVar("T")
LOOK_EVERY = 1.0
"""While waiting for an item, seconds between two checks that the thread is alive."""


class Prefetcher(Generic[T]):
    """`make(first)`, `make(first + 1)`, … `make(stop - 1)`, in order, each made before it is asked for.

    An error in the thread is raised where the item is asked for; a thread that died without one is TrainingFailed.
    Leaving the `with` block ends the thread.

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
        try:
            self._thread.start()
        except RuntimeError:
            raise _dead_thread("could not be started") from None
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed = True
        self._room.release()
        self._thread.join()

    def __iter__(self) -> Iterator[T]:
        for _ in range(self._first, self._stop):
            item, error = self._next()
            if error is not None:
                raise error
            self._room.release()
            yield item  # type: ignore[misc]
            del item

    def _next(self) -> tuple[T | None, BaseException | None]:
        while True:
            is_alive = self._thread.is_alive()  # before looking: what a thread put there before it ended counts
            try:
                return self._items.get(timeout=LOOK_EVERY if is_alive else 0)
            except queue.Empty:
                if not is_alive:
                    raise _dead_thread("has died") from None

    def _run(self) -> None:
        try:
            for index in range(self._first, self._stop):
                self._room.acquire()
                if self._closed:
                    return
                self._items.put((self._make(index), None))
        except BaseException as error:
            self._items.put((None, error))


def _dead_thread(what: str) -> TrainingFailed:
    return TrainingFailed(
        f"The thread that draws batches {what}, as happens when memory or threads run out; make room for it and start "
        "the run again: it goes on from its last checkpoint."
    )
