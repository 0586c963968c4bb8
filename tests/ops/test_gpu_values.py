"""Runs the tests of the Triton kernels, `*_interpreted.py` and `test_edges.py`, where Triton interprets them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is published for Linux alone")

pytestmark = pytest.mark.triton
HERE = Path(__file__).parent


def run(file, *selection, at_least):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selection, str(HERE / file)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    assert done.returncode == 0, done.stdout[-5000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= at_least and "skipped" not in done.stdout, done.stdout[-500:]


def test_the_kernels_under_the_interpreter():
    run("gpu_interpreted.py", "-m", "not slow", at_least=40)


@pytest.mark.slow
def test_the_kernels_under_the_interpreter_many_times():
    run("gpu_interpreted.py", "-m", "slow", at_least=9)


def test_the_comparison_with_the_reference_under_the_interpreter():
    run("gpu_check_interpreted.py", "-m", "not slow", at_least=20)


@pytest.mark.slow
def test_the_comparison_with_the_reference_for_more_kinds():
    run("gpu_check_interpreted.py", "-m", "slow", at_least=16)


@pytest.mark.slow
def test_the_edges_under_the_interpreter():
    run("test_edges.py", "-k", "triton", at_least=30)
