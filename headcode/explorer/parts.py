"""Small pieces of the page that the cards are made of. Everything shown is text: nothing is ever parsed as HTML."""

from collections.abc import Iterable, Sequence
from typing import Any

from dash import html

Piece = Any
FILLED = 0.75
"""The probability from which a cell's number is written in the colour that reads well on the full fill."""


def link(
    words: Piece, href: str, *names: str, title: str = "", selected: bool = False, token: int | None = None
) -> Piece:
    """A link to another state of the page."""
    classes = " ".join([*names, "selected"] if selected else names)
    more: dict[str, str] = {"aria-current": "true"} if selected else {}
    if token is not None:
        more["data-token"] = str(token)
    return html.A(words, href=href, className=classes, title=title or None, **more)


def choices(label: str, options: Iterable[tuple[str, str, bool]], name: str) -> Piece:
    """A few options side by side: (words, address, selected)."""
    links = [link(words, href, selected=chosen) for words, href, chosen in options]
    return html.Div(
        [html.Span(label, className="label"), html.Div(links, className="segments")], className=f"row {name}"
    )


def menu(label: str, current: str, options: Iterable[tuple[str, str, bool]], name: str) -> Piece:
    """Many options, folded: (words, address, selected). It closes when another state is shown."""
    links = [link(words, href, selected=chosen) for words, href, chosen in options]
    folded = html.Details(
        [html.Summary(current), html.Div(links, className="options")], className="menu", **{"data-menu": name}
    )
    return html.Div([html.Span(label, className="label"), folded], className=f"row {name}")


def button(words: str, href: str, *names: str, title: str = "") -> Piece:
    return link(words, href, "button", *names, title=title)


def note(words: Piece, *names: str) -> Piece:
    return html.P(words, className=" ".join(("note", *names)))


def heading(number: str, words: str, explained: str = "", whose: str = "") -> Piece:
    """A card's title, with its place in the story, and the method that it is about."""
    about = [badge(whose, "method whose")] if whose else []
    title = html.H2([html.Span(number, className="number"), words, *about])
    return html.Div([title, html.P(explained, className="explained")] if explained else [title], className="heading")


def badge(words: str, kind: str) -> Piece:
    return html.Span(words, className=f"badge {kind}")


def strip(
    probabilities: Sequence[float], *, truth: int | None, follow: int | None = None, label: str = ""
) -> list[Piece]:
    """The probabilities of all values as one row of cells: darker is more probable, the truth is framed."""
    best = max(range(len(probabilities)), key=lambda value: probabilities[value])
    cells = []
    for value, share in enumerate(probabilities):
        names = ["cell"] + ["best"] * (value == best) + ["true"] * (value == truth) + ["follow"] * (value == follow)
        fill = html.Span(className="fill", style={"opacity": f"{max(share, 0.0):.3f}"})
        mark = html.Span(str(value), className="value" + (" filled" if share > FILLED else ""))
        cells.append(html.Span([fill, mark], className=" ".join(names), title=f"{value}: {share:.1%}"))
    verdict = "" if truth is None else " right" if best == truth else " wrong"
    verdict = " follows" if best == follow else verdict
    said = html.Span(f"{best} · {probabilities[best]:.0%}", className="said" + verdict)
    return [html.Span(label, className="name"), html.Span(cells, className="strip"), said]
