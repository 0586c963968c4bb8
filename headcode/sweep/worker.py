"""The process that trains runs of a sweep: `python -m headcode.sweep.worker`.

Every line on its stdin is an order: a run to train, in JSON. Every line on its stdout tells how one ended. Its stdin
stays open as long as the process that started it lives. When it closes, however that process ended, the worker stops as
after SIGTERM: it saves the step and lets go of the run's folder. No run goes on that nobody watches.
"""

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from headcode.files import open_own
from headcode.run import RunConfig
from headcode.sweep.process import Outcome
from headcode.train import Runtime, Trainer, TrainingFailed, TrainingInterrupted
from headcode.train.folder import RunInUse
from headcode.train.progress import PlainReporter

LOCK_INTERVAL = 1.0
"""Seconds between two tries to get a run that another process holds."""


def main() -> None:
    """Carry out orders until stdin closes."""
    # What libraries print must not be taken for an answer: it goes to the log, like stderr.
    answers = os.dup(1)
    os.dup2(2, 1)
    warnings.showwarning = _say_warning
    orders: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_read_orders, args=(orders,), daemon=True).start()
    while (line := orders.get()) is not None:
        order = json.loads(line)
        _log_to(Path(order["log"]))
        outcome = carry_out(order)
        if outcome.message:
            with contextlib.suppress(OSError):  # a full disk has no room for the log: the answer is sent all the same
                print(f"headcode: {outcome.message}", file=sys.stderr, flush=True)
        with contextlib.suppress(BrokenPipeError):  # nobody is there to hear it
            os.write(answers, json.dumps(outcome._asdict()).encode() + b"\n")


def carry_out(order: dict[str, Any]) -> Outcome:
    """Train the run of an order: its folder, config and runtime, and whether to wait while the folder is locked."""
    try:
        config, runtime = RunConfig.from_dict(order["config"]), Runtime.from_dict(order["runtime"])
        while True:
            try:
                Trainer(config, order["folder"], runtime=runtime, reporters=[PlainReporter(sys.stderr)]).run()
                return Outcome("finished")
            except RunInUse as locked:
                if not order["wait"]:
                    return Outcome("locked", str(locked))
                time.sleep(LOCK_INTERVAL)
    except TrainingInterrupted as stopped:
        return Outcome("stopped", str(stopped))
    except (TrainingFailed, ValueError) as problem:
        return Outcome("failed", " ".join(str(problem).split()))
    except Exception as error:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        return Outcome("failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]} (see {order['log']})")


def _read_orders(orders: "queue.SimpleQueue[bytes | None]") -> None:
    # Not through sys.stdin: a thread that waits inside of it would disturb the end of the interpreter.
    content = b""
    while piece := os.read(0, 65536):
        *lines, content = (content + piece).split(b"\n")
        for line in lines:
            orders.put(line)
    orders.put(None)
    os.kill(os.getpid(), signal.SIGTERM)


def _log_to(path: Path) -> None:
    with contextlib.suppress(OSError):  # what the last log had no room for is lost
        sys.stdout.flush()
        sys.stderr.flush()
    with open_own(path, "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def _say_warning(message: Warning | str, category: type[Warning], *details: Any, **more: Any) -> None:
    print(f"{category.__name__}: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
