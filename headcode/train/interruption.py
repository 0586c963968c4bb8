"""Ctrl-C and SIGTERM as wishes: the loop finishes its step, saves, and stops."""

import signal
import threading
from types import FrameType
from typing import Any


class Interruption:
    """While entered, the first SIGINT or SIGTERM is noted in `signal_number`; a second one ends the process at once."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        # Only the main thread may set handlers; a Trainer in another thread is stopped by its owner.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        self._put_back()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        self._put_back()

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
