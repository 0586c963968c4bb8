"""Donors of a patch: whose codes can be put in, and whether a donor can show that the answer follows its code."""

import itertools
from typing import Any

from headcode.explorer import inside
from headcode.explorer.model import Model
from headcode.explorer.parts import Piece, choices, heading, menu
from headcode.explorer.state import MAX_INSTANCE, State

INSTANCES = 3
SEARCHED = 32
"""How many of the next instances are looked at for donors."""


def offered(model: Model, state: State, question: Any) -> list[str]:
    """The donors, in the words of the address, that can show something: of this question, then of the next ones."""
    found = inside.look(model, question.x)

    def shows(donor: str) -> bool:
        given = model.view.donor_of(question, state.change(donor=donor))
        return given is not None and not model.view.uninformative(question, given[0], state.query, found)

    following = range(state.n + 1, min(state.n + SEARCHED, MAX_INSTANCE) + 1)
    instances = (donor for n in following if shows(donor := f"n-{n}"))
    own = [donor for donor in model.view.own_donors(model, state) if shows(donor)]
    return own + list(itertools.islice(instances, INSTANCES))


def patch_card(model: Model, state: State, question: Any) -> list[Piece]:
    """Whose code is put in, where."""
    explained = "Put another question's code in place of this one's: does the answer follow?"
    donors = ["", *offered(model, state, question)]
    # A donor that came with an address, or stayed when another question was opened, is listed too.
    if state.donor not in donors:
        donors.append(state.donor)
    names = {each: model.view.donor_name(model, state, each) for each in donors}
    options = [
        (name, state.link(donor=each, shown=state.shown or each != ""), each == state.donor)
        for each, name in names.items()
    ]
    pieces: list[Piece] = [
        heading("⇄", "Patch the code", explained),
        menu("code from", names[state.donor], options, "choose-donor"),
    ]
    if state.donor:
        keys = [("all keys", "all"), ("the key", "key")]
        layers = [(f"layer {state.layer}", False), ("all layers", True)]
        pieces.append(
            choices("keys", [(words, state.link(swap=key), state.swap == key) for words, key in keys], "swap")
        )
        pieces.append(
            choices("layers", [(words, state.link(deep=deep), state.deep == deep) for words, deep in layers], "deep")
        )
    return pieces
