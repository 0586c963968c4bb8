"""The thread pool: who works, who waits, what happens on errors, forks and at exit."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest

from headcode.ops.cpu import threads
from headcode.ops.cpu.threads import run_in_threads
from tests.support.threads import call_at_once


def test_one_thread_works_inline():
    names = []
    run_in_threads(lambda: names.append(threading.current_thread()), 1)
    assert names == [threading.current_thread()]


def test_helpers_work_at_the_same_time():
    meeting = threading.Barrier(3, timeout=30)
    seen = set()

    def work():
        meeting.wait()
        seen.add(threading.current_thread())

    run_in_threads(work, 3)
    assert len(seen) == 3 and threading.current_thread() in seen


def test_waits_only_for_helpers_that_have_begun():
    """All helpers are busy elsewhere: the caller does the work and does not wait for them."""
    release, entered = threading.Event(), threading.Event()

    def block():
        entered.set()
        release.wait(30)

    busy = threading.Thread(target=run_in_threads, args=(block, 2))
    busy.start()
    entered.wait(30)
    try:
        calls = []
        started = time.monotonic()
        run_in_threads(lambda: calls.append(1), 2)
        assert calls and time.monotonic() - started < 10
    finally:
        release.set()
        busy.join(30)
    assert not busy.is_alive()


def test_waits_for_helpers_that_have_begun():
    caller = threading.current_thread()
    entered, results = threading.Event(), []

    def work():
        if threading.current_thread() is caller:
            entered.wait(30)
            return
        entered.set()
        time.sleep(0.2)
        results.append(1)

    run_in_threads(work, 2)
    assert results == [1]


def test_a_helpers_error_reaches_the_caller():
    caller = threading.current_thread()
    entered = threading.Event()

    def work():
        if threading.current_thread() is caller:
            entered.wait(30)
        else:
            entered.set()
            raise ArithmeticError("from a helper")

    with pytest.raises(ArithmeticError, match="from a helper"):
        run_in_threads(work, 2)
    run_in_threads(lambda: None, 2)


def test_the_callers_error_passes_and_the_pool_goes_on():
    def fail():
        raise ArithmeticError("everywhere")

    with pytest.raises(ArithmeticError):
        run_in_threads(fail, 3)
    test_helpers_work_at_the_same_time()


def test_many_callers_at_once_and_calls_inside_calls():
    def caller():
        total = [0]
        lock = threading.Lock()

        def work():
            with lock:
                total[0] += 1

        run_in_threads(lambda: run_in_threads(work, 2), 2)
        return total[0]

    counts = call_at_once(caller, 4, times=100)
    assert len(counts) == 400 and all(1 <= count <= 4 for count in counts)


def test_helpers_are_shared_and_do_not_multiply():
    run_in_threads(lambda: None, 3)
    before = threads._pool.num_threads
    for _ in range(20):
        run_in_threads(lambda: None, 3)
    assert threads._pool.num_threads == before


def test_idle_helpers_keep_nothing_alive():
    class Payload:
        pass

    payload = Payload()
    alive = weakref.ref(payload)
    meeting = threading.Barrier(2, timeout=30)

    def work(payload=payload):
        meeting.wait()

    run_in_threads(work, 2)
    del payload, work
    for _ in range(100):
        gc.collect()
        if alive() is None:
            break
        time.sleep(0.01)
    assert alive() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_makes_its_own_pool():
    run_in_threads(lambda: None, 3)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            fresh = threads._pool.num_threads == 0
            meeting = threading.Barrier(3, timeout=30)
            run_in_threads(meeting.wait, 3)
            status = 0 if fresh else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


EXIT = """
import threading, time
from headcode.ops.cpu.threads import run_in_threads
meeting = threading.Barrier(3)
run_in_threads(meeting.wait, 3)
threading.Thread(target=run_in_threads, args=(lambda: time.sleep(0.1), 3)).start()
print("done")
"""


def test_idle_helpers_do_not_hold_up_the_exit():
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "done\n" and done.stderr == ""
