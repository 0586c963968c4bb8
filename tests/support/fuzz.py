"""Runs many commands in one process and writes down how each ended; the parent sees which one never did."""

import contextlib
import io
import json
import os
import resource
import sys
import time
import traceback

import torch

import headcode.cli.train
from tests.support import processes

MEMORY = 16 * 2**30
"""Bytes of addresses: a size that nobody has is refused by the system, and not by the machine's other users."""


def run_many(commands: list[list[str]], folder: str, record: str) -> None:
    """One line of JSON before each command and one after it."""
    os.chdir(folder)
    os.environ["HEADCODE_TEXTS"] = os.path.join(folder, "texts")
    os.environ["HF_HUB_OFFLINE"] = "1"  # any word may be a model's name on the Hub: no request leaves this machine
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    headcode.cli.train.PROBE_SECONDS = 0.01
    with open(record, "a") as file:
        for number, command in enumerate(commands):
            print(json.dumps({"number": number}), file=file, flush=True)
            code, words, seconds = _run(command)
            end = {"number": number, "code": code, "words": words[-20_000:], "seconds": seconds}
            print(json.dumps(end), file=file, flush=True)


def _run(command: list[str]) -> tuple[object, str, float]:
    words, start = io.StringIO(), time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(words):
        try:
            processes.main(command)
            code: object = 0
        except SystemExit as end:
            code = 0 if end.code is None else end.code
        except BaseException:
            code = "exception"
            traceback.print_exc(file=sys.stderr)
    return code, words.getvalue(), time.monotonic() - start
