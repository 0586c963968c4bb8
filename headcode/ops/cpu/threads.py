"""A small pool of threads for kernels that release the GIL.

Numba's own parallel layers each fail somewhere: after a fork, from two threads at once, or beside torch's OpenMP. This
pool holds nothing but idle threads that wait for work. The caller always works too, and waits only for helpers that
have begun, so a call ends even if no helper ever wakes up; a forked child starts with no pool and makes its own.
"""

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue


class _Job:
    """One call's work, offered to helpers until the caller closes it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.num_active = 0
        self.closed = False
        self.error: BaseException | None = None

    def help(self) -> None:
        with self.lock:
            if self.closed:
                return
            self.num_active += 1
        try:
            self.work()
        except BaseException as error:
            self.error = error
        with self.lock:
            self.num_active -= 1
            if self.closed and self.num_active == 0:
                self.ended.set()

    def close(self) -> None:
        with self.lock:
            self.closed = True
            if self.num_active == 0:
                return
        self.ended.wait()


class _Pool:
    """Threads that take jobs from a queue. They are daemons: idle ones never keep the interpreter alive."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.jobs: SimpleQueue[_Job] = SimpleQueue()
        self.num_threads = 0

    def offer(self, job: _Job, num_helpers: int) -> None:
        if self.num_threads < num_helpers:
            with self.lock:
                while self.num_threads < num_helpers:
                    threading.Thread(target=self._serve, daemon=True, name="headcode-kernel").start()
                    self.num_threads += 1
        for _ in range(num_helpers):
            self.jobs.put(job)

    def _serve(self) -> None:
        while True:
            job = self.jobs.get()
            job.help()
            # An idle thread must not keep the last call's tensors alive.
            del job


_pool = _Pool()


def _forget_pool() -> None:
    global _pool
    _pool = _Pool()


# Threads do not survive a fork, and a lock may have been held by one of them: the child starts afresh.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def run_in_threads(work: Callable[[], None], num_threads: int) -> None:
    """Call `work` in this thread and in up to num_threads - 1 others at once; it must share out what is to be done.

    All callers share the helpers, so two calls at the same time do not double the number of threads.
    """
    if num_threads <= 1:
        work()
        return
    job = _Job(work)
    _pool.offer(job, num_threads - 1)
    try:
        work()
    finally:
        job.close()
    if job.error is not None:
        raise job.error
