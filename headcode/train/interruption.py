"""Ctrl-C and SIGTERM are noted, so that the loop can finish its step, save, and stop."""

import signal
import threading
from types import FrameType
from typing import Any


class Interruption:
    """While entered, the first SIGINT or SIGTERM is noted in `signal_number`. A second Ctrl-C ends the process at once.

    A second SIGTERM does not: Slurm sends it to every process, and torchrun to its own once more.
    """

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
        self._put_back(signal.SIGINT, signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is None:
            self.signal_number = number
        self._put_back(signal.SIGINT)

    def _put_back(self, *numbers: int) -> None:
        for number in numbers:
            if number in self._before:
                signal.signal(number, self._before.pop(number))
