"""One HTML file that needs nothing else: text, tables and pictures inside it, light and dark, fit for printing.

page = Page("Three methods", "What was compared.")
page.section("Scores", Table(rows), Figure(path_to_svg, "A caption."))
page.write("report.html")
"""

import base64
import dataclasses
import functools
import html
import importlib.resources
import math
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from headcode.files import is_number, replace_file
from headcode.version import __version__

_KINDS = {".svg": "image/svg+xml", ".png": "image/png"}


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph."""

    words: str

    def html(self) -> str:
        return f"<p>{html.escape(self.words)}</p>"


@dataclasses.dataclass(frozen=True)
class Heading:
    """A heading inside a section."""

    words: str

    def html(self) -> str:
        return f"<h3>{html.escape(self.words)}</h3>"


@dataclasses.dataclass(frozen=True)
class Preformatted:
    """Text as it is: a puzzle, a configuration, commands. With a summary it is folded."""

    text: str
    summary: str | None = None

    def html(self) -> str:
        block = f"<pre>{html.escape(self.text)}</pre>"
        if self.summary is None:
            return block
        return f"<details><summary>{html.escape(self.summary)}</summary>{block}</details>"


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows with the same columns; numbers stand right. None is marked as the best: a table has no intervals."""

    rows: Sequence[Mapping[str, Any]]

    def html(self) -> str:
        if not self.rows:
            return "<p>(no rows)</p>"
        columns = list(dict.fromkeys(key for row in self.rows for key in row))
        numeric = {c for c in columns if all(is_number(row.get(c)) or row.get(c) is None for row in self.rows)}
        head = "".join(f"<th{' class=number' if c in numeric else ''}>{html.escape(c)}</th>" for c in columns)
        body = ""
        for row in self.rows:
            cells = ""
            for column in columns:
                kind = ' class="number"' if column in numeric else ""
                cells += f"<td{kind}>{html.escape(_shown(row.get(column)))}</td>"
            body += f"<tr>{cells}</tr>"
        return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


@dataclasses.dataclass(frozen=True)
class Figure:
    """A picture file (SVG or PNG), taken into the page."""

    path: Path
    caption: str
    width: str = "100%"

    def html(self) -> str:
        kind = _KINDS[self.path.suffix.lower()]
        data = base64.b64encode(self.path.read_bytes()).decode()
        words = html.escape(self.caption)
        picture = f'<img src="data:{kind};base64,{data}" alt="{words}" style="width:{html.escape(self.width)}">'
        return f'<figure><div class="wide">{picture}</div><figcaption>{words}</figcaption></figure>'


@dataclasses.dataclass(frozen=True)
class Points:
    """A list of sentences."""

    sentences: Sequence[str]

    def html(self) -> str:
        return "<ul>" + "".join(f"<li>{html.escape(words)}</li>" for words in self.sentences) + "</ul>"


class Block(Protocol):
    """Anything that can stand in a section."""

    def html(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Folded:
    """A block that is shown when its summary is clicked, and on paper."""

    summary: str
    block: Block

    def html(self) -> str:
        return f"<details><summary>{html.escape(self.summary)}</summary>{self.block.html()}</details>"


class Page:
    """A title, a lead and sections; `write` makes the file."""

    def __init__(self, title: str, lead: str) -> None:
        self.title, self.lead = title, lead
        self._sections: list[tuple[str, Sequence[Block]]] = []

    def section(self, title: str, *blocks: Block) -> None:
        self._sections.append((title, blocks))

    def html(self) -> str:
        links = "".join(
            f'<a href="#s{number}">{html.escape(title)}</a>' for number, (title, _) in enumerate(self._sections)
        )
        body = "".join(
            f'<section id="s{number}"><h2>{html.escape(title)}</h2>' + "".join(b.html() for b in blocks) + "</section>"
            for number, (title, blocks) in enumerate(self._sections)
        )
        values = {"title": html.escape(self.title), "lead": html.escape(self.lead), "links": links, "body": body}
        return _template().substitute(values, version=__version__) + "\n"

    def write(self, path: str | Path) -> Path:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, self.html().encode())
        return path


@functools.cache
def _template() -> string.Template:
    """page.html with page.css in it; the indentation of its lines is for who reads that file."""
    files = importlib.resources.files("headcode.report")
    lines = files.joinpath("page.html").read_text(encoding="utf-8").splitlines()
    style = "\n" + files.joinpath("page.css").read_text(encoding="utf-8")
    return string.Template("".join(line.strip() for line in lines).replace("$style", style))


def _shown(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
