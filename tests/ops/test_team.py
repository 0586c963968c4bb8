"""Kernels on torch's own OpenMP threads: all of them work, errors come back, forks and strangers use the pool."""

import ctypes
import os
import subprocess
import sys
import threading

import pytest
import torch

from headcode.ops.cpu import team
from headcode.ops.cpu.team import run_in_team
from tests.support.threads import call_at_once


@pytest.fixture(autouse=True)
def _loaded():
    torch.randn(64, 64) @ torch.randn(64, 64)


def test_all_work_at_the_same_time():
    meeting = threading.Barrier(3, timeout=30)
    seen = []

    def work():
        meeting.wait()
        seen.append(threading.get_ident())

    run_in_team(work, 3)
    assert len(set(seen)) == 3 and threading.get_ident() in seen


def test_one_thread_works_inline():
    seen = []
    run_in_team(lambda: seen.append(threading.get_ident()), 1)
    assert seen == [threading.get_ident()]


def test_an_error_comes_back_and_the_team_goes_on():
    def fail():
        raise ArithmeticError("in a kernel")

    for _ in range(3):
        with pytest.raises(ArithmeticError, match="in a kernel"):
            run_in_team(fail, 2)
    test_all_work_at_the_same_time()


def test_from_many_threads_and_inside_each_other():
    def call():
        seen = []
        run_in_team(lambda: run_in_team(lambda: seen.append(1), 2), 2)
        return len(seen)

    counts = call_at_once(call, 3, times=50)
    assert len(counts) == 150 and all(2 <= count <= 4 for count in counts)


def test_without_a_library_the_pool_serves(monkeypatch):
    monkeypatch.setattr(team, "_openmp_parallel", lambda: None)
    test_all_work_at_the_same_time()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_after_a_fork_the_pool_serves():
    script = (
        "import os, torch\n"
        "from headcode.ops.cpu import team\n"
        "a = torch.randn(256, 256)\n"
        "for _ in range(3): a @ a\n"
        "team.run_in_team(lambda: None, 2)\n"
        "pid = os.fork()\n"
        "seen = []\n"
        "team.run_in_team(lambda: seen.append(1), 2)\n"
        "if pid == 0: os._exit(0 if team._forked and seen else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 and not team._forked\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize("forked", [False, True])
def test_code_by_its_address_runs_in_the_team(forked, monkeypatch):
    """On torch's threads or on our own: each gets the argument."""
    monkeypatch.setattr(team, "_forked", forked)
    meeting, seen = threading.Barrier(2, timeout=30), []

    def body(argument):
        meeting.wait()
        seen.append((argument, threading.get_ident()))

    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(body)
    team.run_native_in_team(ctypes.cast(callback, ctypes.c_void_p).value, 4711, 2)
    assert [argument for argument, _ in seen] == [4711, 4711]
    assert len({thread for _, thread in seen}) == 2
    meeting = threading.Barrier(1)
    team.run_native_in_team(ctypes.cast(callback, ctypes.c_void_p).value, 4713, 1)
    assert seen[2:] == [(4713, threading.get_ident())]
