"""The Dash app, put together, and the server that runs it on this machine alone."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from dash import Dash

from headcode.explorer.atlas import Atlases
from headcode.explorer.callbacks import Explorer, register
from headcode.explorer.catalogue import Catalogue
from headcode.explorer.layout import page
from headcode.explorer.security import MAX_REQUEST, protect

HOST = "127.0.0.1"
THREADS = 8
MAX_BODY = 4 * MAX_REQUEST
log = logging.getLogger("headcode.explorer")


def create_app(runs: Sequence[str | Path], *, lens: str | Path | None = None, text: str = "") -> tuple[Dash, Explorer]:
    """The app for these run folders or zoo models, and for a lens on a pretrained model."""
    explorer = Explorer(Catalogue(runs, lens, text), Atlases())
    app = Dash(
        "headcode.explorer",
        assets_folder=str(Path(__file__).parent / "assets"),
        title="headcode explorer",
        update_title="",
        serve_locally=True,
        enable_mcp=False,
        use_pages=False,
        add_log_handler=False,
        meta_tags=[
            {"name": "viewport", "content": "width=device-width, initial-scale=1"},
            {"name": "color-scheme", "content": "light dark"},
        ],
    )
    app.enable_dev_tools(debug=False)
    app.layout = page()
    register(app, explorer)
    protect(app)
    return app, explorer


def prepare(explorer: Explorer) -> None:
    """Look at every model's start page once: compiles what is compiled, and makes the maps of codes."""
    for name in explorer.catalogue.names:
        search = f"?model={name}&shown=1"
        explorer.left(search)
        explorer.right(search, 0)


def serve(app: Dash, explorer: Explorer, port: int) -> None:
    """Answer requests until interrupted."""
    from waitress import create_server

    logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # a short queue is no news
    torch.set_num_threads(1)  # requests come several at a time; each has enough with one core
    try:
        server = create_server(
            app.server,
            host=HOST,
            port=port,
            threads=THREADS,
            ident=None,
            clear_untrusted_proxy_headers=True,
            # Before the app sees a request the server keeps its body, on disk if it is large: not for long.
            max_request_body_size=MAX_BODY,
        )
    except OSError as error:
        raise ValueError(f"Port {port} is not free ({error.strerror}); choose another with --port.") from None
    threading.Thread(target=_prepare_quietly, args=(explorer,), daemon=True, name="headcode-explorer-prepare").start()
    print(f"headcode explorer: http://{HOST}:{server.effective_port}/ (Ctrl-C ends it)", flush=True)
    try:
        server.run()
    finally:
        server.close()


def _prepare_quietly(explorer: Explorer) -> None:
    try:
        prepare(explorer)
    except Exception:  # what is wrong with a model is told when it is opened
        log.exception("a model could not be prepared")
