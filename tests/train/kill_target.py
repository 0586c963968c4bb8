"""Runs `headcode` commands in processes that start fast: the fork server imports this module once."""

import os
import sys

import torch
import torch._dynamo

from headcode.cli import main
from headcode.cli import resume as resume
from headcode.cli import train as train


def run_command(arguments, log):
    """One `headcode` command with its output in a file; exits with the command's code."""
    file = open(log, "a")  # noqa: SIM115 - open until the process ends
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file
    torch.set_num_threads(1)
    main(arguments)
