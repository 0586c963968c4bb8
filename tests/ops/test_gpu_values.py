"""Runs `gpu_interpreted.py`, the tests of the Triton kernels, where Triton interprets instead of compiling."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is published for Linux alone")

FILE = Path(__file__).with_name("gpu_interpreted.py")


def run(marker, at_least):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker, str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    assert done.returncode == 0, done.stdout[-5000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= at_least and "skipped" not in done.stdout, done.stdout[-500:]


def test_the_kernels_under_the_interpreter():
    run("not slow", at_least=40)


@pytest.mark.slow
def test_the_kernels_under_the_interpreter_many_times():
    run("slow", at_least=9)
