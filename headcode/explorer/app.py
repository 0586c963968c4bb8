"""The Dash app, put together."""

from collections.abc import Sequence
from pathlib import Path

from dash import Dash

from headcode.explorer.atlas import Atlases
from headcode.explorer.callbacks import Explorer, register
from headcode.explorer.catalogue import Catalogue
from headcode.explorer.layout import page
from headcode.explorer.security import protect
from headcode.explorer.state import start


def create_app(
    runs: Sequence[str | Path], *, lens: str | Path | None = None, text: str = "", token: str | None = None
) -> tuple[Dash, Explorer]:
    """The app for these run folders or zoo models, and for a lens on a pretrained model.

    With a token it answers those alone who came by an address with this token; without, every user of this machine.
    """
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
    protect(app, token)
    return app, explorer


def prepare(explorer: Explorer) -> None:
    """Look at every model's start page once: compiles what is compiled, and makes the maps of codes."""
    for name in explorer.catalogue.names:
        search = start(name, shown="1")
        explorer.left(search)
        explorer.right(search, 0)
