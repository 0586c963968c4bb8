"""A function called in several threads at once."""

import threading


def call_at_once(function, count, times):
    """What it returned, each of so many times in each of so many threads."""
    results = []

    def call():
        for _ in range(times):
            results.append(function())

    callers = [threading.Thread(target=call) for _ in range(count)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not any(caller.is_alive() for caller in callers)
    return results
