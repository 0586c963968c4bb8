"""Runs `headcode` commands in processes that start fast: the fork server imports this module once."""

import multiprocessing
import os
import sys

import torch
import torch._dynamo

from headcode.cli import main
from headcode.cli import resume as resume
from headcode.cli import train as train


def start(function, *arguments):
    """A process forked from a server that has imported torch and headcode already; the function's module too."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, function.__module__])
    before = os.environ.get("PYTHONPATH")
    # The server is started by the first process, and finds modules of the tests by this variable alone.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        process = context.Process(target=function, args=arguments)
        process.start()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return process


def run_command(arguments, log, prepare=None):
    """One `headcode` command with its output in a file; exits with the command's code."""
    file = open(log, "a")  # noqa: SIM115 - open until the process ends
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file
    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    main(arguments)
