"""The web server: on this machine alone, and one that slow clients cannot keep from others."""

import logging
import threading

import torch
from dash import Dash
from waitress.server import TcpWSGIServer

from headcode.explorer.app import prepare
from headcode.explorer.callbacks import Explorer
from headcode.explorer.security import MAX_REQUEST

HOST = "127.0.0.1"
THREADS = 8
MAX_BODY = 4 * MAX_REQUEST
CONNECTIONS = 160
"""Beyond this many the oldest one that waits for its client is closed. macOS lets a process open 256 files."""
TIMEOUT = 10
"""Seconds after which a connection that sends nothing is closed."""
log = logging.getLogger("headcode.explorer")


class Server(TcpWSGIServer):
    """Waitress stops accepting connections at its limit; before that, this server makes room for a new one."""

    def handle_accept(self) -> None:
        super().handle_accept()
        if len(self.active_channels) > CONNECTIONS:
            # Connections that wait for their client: no request is being answered, no answer being sent.
            open_ones = self.active_channels.values()
            waiting = [each for each in open_ones if not (each.requests or each.total_outbufs_len or each.will_close)]
            if waiting:
                min(waiting, key=lambda channel: channel.creation_time).will_close = True


def listen(app: Dash, port: int) -> Server:
    """A server on a port of this machine, 0 for a free one; it answers once it runs."""
    try:
        return Server(
            app.server,
            host=HOST,
            port=port,
            threads=THREADS,
            ident=None,
            clear_untrusted_proxy_headers=True,
            # Before the app sees a request the server keeps its body, on disk if it is large: not for long.
            max_request_body_size=MAX_BODY,
            connection_limit=CONNECTIONS + 40,
            channel_timeout=TIMEOUT,
            cleanup_interval=1,
        )
    except OSError as error:
        raise ValueError(f"Port {port} is not free ({error.strerror}); choose another with --port.") from None


def serve(app: Dash, explorer: Explorer, port: int, token: str | None = None) -> None:
    """Answer requests until interrupted."""
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # a short queue is no news
    torch.set_num_threads(1)  # requests come several at a time; each has enough with one core
    server = listen(app, port)
    threading.Thread(target=_prepare_quietly, args=(explorer,), daemon=True, name="headcode-explorer-prepare").start()
    key = "" if token is None else f"?token={token}"
    print(f"headcode explorer: http://{HOST}:{server.effective_port}/{key} (Ctrl-C ends it)", flush=True)
    try:
        server.run()
    finally:
        server.close()


def _prepare_quietly(explorer: Explorer) -> None:
    try:
        prepare(explorer)
    except Exception:  # what is wrong with a model is told when it is opened
        log.exception("a model could not be prepared")
