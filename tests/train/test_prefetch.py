"""Batches drawn ahead: in order, never too many, errors where they are asked for, and no thread left behind."""

import threading
import time

import pytest

from headcode.train import TrainingFailed
from headcode.train.data import Prefetcher


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "headcode-batches"]


def test_order_and_end():
    with Prefetcher(lambda index: index * 10, 3, 8, depth=2) as items:
        assert list(items) == [30, 40, 50, 60, 70]
    assert not threads()


def test_drawn_ahead_but_not_far():
    made = []
    with Prefetcher(made.append, 0, 100, depth=3) as items:
        iterator = iter(items)
        next(iterator)
        deadline = time.monotonic() + 5
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        # One taken, three waiting, one in hand.
        assert 4 <= len(made) <= 5
    assert not threads()


def test_an_error_surfaces_at_its_item_and_after_the_good_ones():
    def make(index):
        if index == 2:
            raise LookupError("no such batch")
        return index

    seen = []
    with pytest.raises(LookupError, match="no such batch"), Prefetcher(make, 0, 5) as items:
        seen.extend(items)
    assert seen == [0, 1]
    assert not threads()


@pytest.mark.parametrize("taken", [0, 1])
def test_leaving_early_ends_the_thread(taken):
    with Prefetcher(lambda index: bytes(1000), 0, 10**9, depth=2) as items:
        iterator = iter(items)
        for _ in range(taken):
            next(iterator)
    assert not threads()


def test_nothing_to_draw():
    with Prefetcher(lambda index: index, 5, 5) as items:
        assert list(items) == []


def test_a_thread_that_dies_before_its_first_item(monkeypatch):
    """As under a debugger whose hook fails: the thread is started, and ends before any of our code runs."""
    monkeypatch.setattr(threading.Thread, "run", lambda thread: None)
    with (
        pytest.raises(TrainingFailed, match="The thread that draws batches has died.*goes on from its last checkpoint"),
        Prefetcher(lambda index: index, 0, 5) as items,
    ):
        next(iter(items))
    assert not threads()


def test_a_thread_that_dies_later_gives_what_it_made(monkeypatch):
    def dying(prefetcher):
        for index in range(2):
            prefetcher._items.put((index, None))

    monkeypatch.setattr(Prefetcher, "_run", dying)
    seen = []
    with pytest.raises(TrainingFailed, match="has died"), Prefetcher(lambda index: index, 0, 5) as items:
        seen.extend(items)
    assert seen == [0, 1]


def test_an_error_outside_of_making_surfaces_too(monkeypatch):
    def no_memory():
        raise MemoryError

    items = Prefetcher(lambda index: index, 0, 5)
    monkeypatch.setattr(items._room, "acquire", no_memory)
    with pytest.raises(MemoryError), items:
        next(iter(items))


def test_a_thread_that_cannot_be_started(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(TrainingFailed, match="The thread that draws batches could not be started"):
        Prefetcher(lambda index: index, 0, 5).__enter__()
