"""Eight clients at once for a minute, without an error; HEADCODE_EXPLORER_SECONDS makes it another time."""

import json
import os
import statistics
import threading
import time

import numpy as np
import pytest

from tests.support.live import ask, requests_of, running, warm

SECONDS = float(os.environ.get("HEADCODE_EXPLORER_SECONDS", "60"))
CLIENTS = 8
MODELS = ("zoo/sraven-2-hyla", "zoo/logic-hyla", "zoo/logic-softmax")


@pytest.mark.slow
def test_eight_clients_at_once():
    """Every client walks through states of its own; whatever it is shown belongs to the state that it asked for."""
    with running(*MODELS) as live:
        warm(live, MODELS)
        callbacks = requests_of(live)
        assert len(callbacks) == 5
        errors, times = [], []
        end = time.monotonic() + SECONDS

        def walk(client):
            rng = np.random.default_rng(client)
            while time.monotonic() < end:
                n = int(rng.integers(10**6))
                search = [
                    f"?model=zoo/sraven-2-hyla&n={n}&shown=1&donor=rule-{rng.integers(7)}",
                    f"?model=zoo/sraven-2-hyla&rules={rng.integers(8)}.{rng.integers(8)}&seed={n}&query=16&key=3",
                    f"?model=zoo/logic-hyla&other=zoo/logic-softmax&n={n}&shown=1&donor=n-{rng.integers(99)}",
                ][rng.integers(3)]
                for callback in callbacks:
                    body = {**callback, "inputs": [{"id": "url", "property": "search", "value": search}]}
                    start = time.monotonic()
                    try:
                        seen = ask(live, body)
                    except Exception as error:
                        errors.append(f"{search}: {error}")
                        return
                    times.append(time.monotonic() - start)
                    if (
                        seen
                        and "source" in seen
                        and "rules=" not in search
                        and f" {n}" not in json.dumps(seen["source"])
                    ):
                        errors.append(f"{search}: another instance was shown")

        threads = [threading.Thread(target=walk, args=(client,)) for client in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert len(times) > 10 * CLIENTS
        print(f"\n{len(times)} answers in {SECONDS:.0f} s, median {1000 * statistics.median(times):.0f} ms")
