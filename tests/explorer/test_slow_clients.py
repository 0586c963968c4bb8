"""Requests that are never finished: others are served all the same, and the unfinished ones are closed."""

import socket
import threading
import time
import urllib.request
from contextlib import ExitStack, contextmanager

import pytest
from waitress import wasyncore

from headcode.explorer import server as servers

HALF = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "


@contextmanager
def serving(app):
    """The port of the explorer's server, in a thread of its own."""
    server = servers.listen(app, 0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield int(server.effective_port)
    finally:
        server.trigger.pull_trigger(lambda: wasyncore.close_all(server._map))  # in the server's own thread
        thread.join(timeout=10)
        server.task_dispatcher.shutdown()
        assert not thread.is_alive()


def half_sent(stack, port, count):
    clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)) for _ in range(count)]
    for client in clients:
        client.sendall(HALF)
    return clients


def seconds_to_be_served(port):
    start = time.monotonic()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as page:
        assert b"headcode explorer" in page.read()
    return time.monotonic() - start


def is_open(client):
    """Whether the server has not closed a connection."""
    client.setblocking(False)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False
    finally:
        client.settimeout(30)


def test_120_half_sent_requests_lock_nobody_out_and_are_closed_after_the_timeout(app, monkeypatch):
    monkeypatch.setattr(servers, "TIMEOUT", 5)
    with serving(app) as port, ExitStack() as stack:
        seconds_to_be_served(port)
        start = time.monotonic()
        clients = half_sent(stack, port, 120)
        assert seconds_to_be_served(port) < 2
        assert all(map(is_open, clients))
        for client in clients:
            assert client.recv(1) == b""  # waits until the server closes it
        assert 5 <= time.monotonic() - start < 20


@pytest.mark.parametrize("count", [50, 99, 400])
def test_any_number_of_half_sent_requests_lets_a_whole_one_through(app, count):
    """Beyond the limit the oldest make room, before any timeout."""
    with serving(app) as port, ExitStack() as stack:
        seconds_to_be_served(port)
        clients = half_sent(stack, port, count)
        assert seconds_to_be_served(port) < 2
        closed = [not is_open(client) for client in clients]
        assert closed == sorted(closed, reverse=True)
        # The whole request took a place too, for as long as it was open.
        assert max(count - servers.CONNECTIONS, 0) <= sum(closed) <= max(count - servers.CONNECTIONS + 1, 0)
