"""The left side of the page above the question: which model, and which question."""

from typing import Any

from dash import html

from headcode.explorer.catalogue import Catalogue
from headcode.explorer.model import Model
from headcode.explorer.parts import Piece, button, choices, menu
from headcode.explorer.state import MAX_INSTANCE, State, start

SPLIT_WORDS = {
    "train": "seen in training",
    "iid": "seen compositions, fresh",
    "compositional": "held-out compositions",
    "novel": "terms never seen",
}


def top(catalogue: Catalogue, state: State) -> list[Piece]:
    """The model, and the one to compare it with."""
    models = []
    for name in catalogue.names:
        same = name == state.model or name in catalogue.peers[state.model]
        # A model of the same task keeps the question; another task starts afresh.
        kept = state.change(model=name, other="" if name == state.other else state.other, layer=0)
        most = catalogue.limits[name].layers - 1
        target = kept.change(layer=min(state.layer, most)).search() if same else start(name)
        models.append((name, target, name == state.model))
    pieces = [menu("model", state.model, models, "choose-model")]
    peers = catalogue.peers[state.model]
    if peers:
        others = [("nothing", state.link(other=""), not state.other)]
        others += [(name, state.link(other=name), name == state.other) for name in peers]
        pieces.append(menu("compare with", state.other or "nothing", others, "choose-other"))
    return pieces


def source(model: Model, state: State) -> list[Piece]:
    """From a split, or drawn by the reader."""
    limits = model.limits
    thing = model.view.thing
    fresh: dict[str, Any] = {"edits": (), "guess": (), "donor": "", "point": (), "shown": False}
    pieces: list[Piece] = []
    if model.view.draws:
        drawn = model.view.drawing(model, state)
        options = [
            ("from a split", state.link(rules=(), terms=(), **fresh), not state.drawn),
            ("draw your own", state.link(**drawn, **fresh), state.drawn),
        ]
        pieces.append(choices(thing, options, "source"))
    if not state.drawn:
        named = {split: f"{split}: {SPLIT_WORDS[split]}" if split in SPLIT_WORDS else split for split in limits.splits}
        splits = [
            (words, state.link(split=split, n=0, **fresh), split == state.split) for split, words in named.items()
        ]
        pieces.append(menu("split", state.split, splits, "choose-split"))
        steps = [
            button("‹", state.link(n=max(state.n - 1, 0), **fresh), "step", "previous", title=f"previous {thing}"),
            html.Span(f"{thing} {state.n}", className="which"),
            button("›", state.link(n=min(state.n + 1, MAX_INSTANCE), **fresh), "step", "next", title=f"next {thing}"),
        ]
        pieces.append(
            html.Div([html.Span("instance", className="label"), html.Div(steps, className="steps")], className="row")
        )
        return pieces
    fresh.pop("donor")
    pieces += model.view.menus(model, state, fresh)
    again = button("draw other values", state.link(seed=(state.seed + 1) % MAX_INSTANCE, **fresh), "redraw")
    pieces.append(html.Div([html.Span("", className="label"), again], className="row"))
    return pieces
