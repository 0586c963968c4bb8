"""One HTML file that needs nothing else: text, tables and pictures inside it, light and dark, fit for printing.

page = Page("Three methods", "What was compared.")
page.section("Scores", Table(rows), Figure(path_to_svg, "A caption."))
page.write("report.html")
"""

import base64
import dataclasses
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headcode.files import is_number, replace_file
from headcode.version import __version__

_KINDS = {".svg": "image/svg+xml", ".png": "image/png"}
_STYLE = """
:root { color-scheme: light dark; --ground: #fdfdfc; --ink: #1d2430; --soft: #5b6472; --line: #d9dde3; --tint: #f1f4f8;
  --accent: #0b5d95; }
@media screen and (prefers-color-scheme: dark) { :root { --ground: #14181e; --ink: #e4e8ee; --soft: #a2acba;
  --line: #323a45; --tint: #1d232c; --accent: #7cc0f0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.2rem 4rem; max-width: 62rem; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; }
h2 { font-size: 1.3rem; margin: 2.4rem 0 .6rem; padding-top: .8rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.4rem 0 .4rem; }
p.lead { color: var(--soft); font-size: 1.08rem; margin: 0 0 1rem; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; }
nav a { color: var(--accent); text-decoration: none; white-space: nowrap; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; font-size: .93rem; }
th, td { padding: .35rem .8rem; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
td.number { text-align: right; }
th.number { text-align: right; }
figure { margin: 1rem 0; }
figure img { display: block; max-width: 100%; height: auto; background: #fff; border-radius: 6px; padding: .4rem;
  border: 1px solid var(--line); }
@media screen and (max-width: 40rem) {
  figure .wide img[style="width:100%"] { max-width: none; width: 40rem !important; } }
figcaption { color: var(--soft); font-size: .9rem; margin-top: .4rem; }
pre { background: var(--tint); padding: .8rem 1rem; border-radius: 6px; overflow-x: auto; font-size: .85rem;
  line-height: 1.35; }
details summary { cursor: pointer; color: var(--accent); }
footer { margin-top: 3rem; color: var(--soft); font-size: .85rem; }
@media print { body { max-width: none; padding: 0; font-size: 11pt; background: #fff; color: #000; }
  nav { display: none; } .wide { overflow: visible; }
  figure, tr { break-inside: avoid; } h2, h3, summary { break-after: avoid; }
  /* Paper cannot be unfolded: what is folded on the screen is printed. */
  details::details-content { content-visibility: visible; block-size: auto; }
  summary { list-style: none; color: #000; font-weight: 600; }
  pre { font-size: 7.5pt; white-space: pre-wrap; overflow: visible; overflow-wrap: anywhere; padding: 0;
    background: none; }
  footer { margin-top: 1rem; } }
"""


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


Block = Text | Heading | Preformatted | Table | Figure


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
        title = html.escape(self.title)
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
            "style-src 'unsafe-inline'\">"
            f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>"
            f'<p class="lead">{html.escape(self.lead)}</p><nav>{links}</nav>{body}'
            f"<footer>headcode {__version__}</footer></body></html>\n"
        )

    def write(self, path: str | Path) -> Path:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, self.html().encode())
        return path


def _shown(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
