"""The process that trains a run of a sweep: `python -m headcode.sweep.worker`, with the run as a line of JSON on stdin.

Its stdin stays open as long as the process that started it lives. When it closes, however that process ended, the
worker stops as after SIGTERM: it saves the step and gives the folder free. No run goes on that nobody watches.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from headcode.presets import RunConfig
from headcode.sweep.process import IN_USE
from headcode.train import Runtime, Trainer, TrainingFailed, TrainingInterrupted
from headcode.train.folder import RunInUse
from headcode.train.progress import PlainReporter

FAILED = 1
LOCK_INTERVAL = 1.0


def main() -> None:
    """Train, and tell the outcome by the exit code; the last line on stderr that starts with `headcode:` says why."""
    order = json.loads(_read_line(0))
    threading.Thread(target=_stop_at_end_of_stdin, daemon=True).start()
    warnings.showwarning = _say_warning
    raise SystemExit(carry_out(order))


def carry_out(order: dict[str, Any]) -> int:
    """Train the run of an order: folder, config, runtime and whether to wait while the folder is locked."""
    folder = Path(order["folder"])
    try:
        config, runtime = RunConfig.from_dict(order["config"]), Runtime.from_dict(order["runtime"])
        while True:
            try:
                Trainer(config, folder, runtime=runtime, reporters=[PlainReporter(sys.stderr)]).run()
                return 0
            except RunInUse as locked:
                if not order["wait"]:
                    _say(str(locked))
                    return IN_USE
                time.sleep(LOCK_INTERVAL)
    except TrainingInterrupted as stopped:
        _say(str(stopped))
        return 128 + stopped.signal_number
    except (TrainingFailed, ValueError) as problem:
        _say(" ".join(str(problem).split()))
        return FAILED
    except Exception as error:
        traceback.print_exc()
        _say(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return FAILED


def _read_line(descriptor: int) -> bytes:
    # Not through sys.stdin: a thread that waits inside of it would disturb the end of the interpreter.
    content = b""
    while not content.endswith(b"\n"):
        piece = os.read(descriptor, 65536)
        if not piece:
            break
        content += piece
    return content


def _stop_at_end_of_stdin() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _say(sentence: str) -> None:
    print(f"headcode: {sentence}", file=sys.stderr, flush=True)


def _say_warning(message: Warning | str, category: type[Warning], *details: Any, **more: Any) -> None:
    # Not in the form of an outcome.
    print(f"{category.__name__}: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
