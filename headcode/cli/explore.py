"""A local web app in which one sees a code decide: puzzles, answers, codes, maps, generated networks, patches.

Example: headcode explore
         headcode explore runs/first zoo/logic-hyla --port 8060
         headcode explore --lens path/to/bert --text "The cat sat on the mat."
"""

import dataclasses
import secrets
from pathlib import Path

import tyro


@dataclasses.dataclass(frozen=True)
class Command:
    """Arguments of `headcode explore`."""

    runs: tyro.conf.Positional[tuple[str, ...]] = ()
    """Run folders, or zoo/NAME; all models of the zoo unless given."""
    port: int = 8050
    """Port on 127.0.0.1; 0 takes a free one."""
    lens: Path | None = None
    """A folder with a pretrained transformer, to look at sentences with (needs headcode[hf])."""
    text: str = ""
    """The sentence that the lens starts with."""
    token: bool = True
    """Admit browsers that opened the printed address with its token; --no-token admits all users of the machine."""

    def run(self) -> None:
        try:
            import dash  # noqa: F401
            import waitress  # noqa: F401
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "The explorer needs Dash and waitress: pip install 'headcode[explorer]'."
            ) from None
        from headcode.explorer.app import create_app
        from headcode.explorer.catalogue import zoo_models
        from headcode.explorer.server import serve

        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port is a number from 0 to 65535, got {self.port}.")
        if self.text and self.lens is None:
            raise ValueError('--text is read with a lens: headcode explore --lens FOLDER --text "…".')
        token = secrets.token_urlsafe(24) if self.token else None
        app, explorer = create_app(self.runs or zoo_models(), lens=self.lens, text=self.text, token=token)
        serve(app, explorer, self.port, token)
