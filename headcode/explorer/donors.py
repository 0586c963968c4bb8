"""Donors of a patch: whose codes can be put in, and whether a donor can show that the answer follows its code."""

import itertools
from typing import Any

import numpy as np

from headcode.explorer import functions, inside, puzzles
from headcode.explorer.catalogue import Model
from headcode.explorer.functions import Function
from headcode.explorer.parts import Piece, choices, heading, menu
from headcode.explorer.puzzles import Puzzle
from headcode.explorer.state import MAX_INSTANCE, State
from headcode.tasks import RULE_NAMES
from headcode.tasks.render import formula

INSTANCES = 3
SEARCHED = 32
"""How many of the next instances are looked at for donors."""


def donor_of(question: Puzzle | Function, state: State) -> tuple[Any, str] | None:
    """The question whose codes are put in, and its name in words."""
    if isinstance(question, Puzzle):
        return puzzles.donor_of(question, state)
    return functions.donor_of(question, state)


def uninformative(question: Puzzle | Function, donor: Any, token: int, found: inside.Look) -> str:
    """Why this donor cannot show whether the model's answer follows the code: a sentence, or "" where it can."""
    if isinstance(question, Puzzle):
        return puzzles.uninformative(question, donor, token, found.probabilities.argmax(1))
    return functions.uninformative(question, donor, float(found.output[0, 0]))


def offered(model: Model, state: State, question: Puzzle | Function) -> list[str]:
    """The donors, in the words of the address, that can show something: of this question, then of the next ones."""
    task: Any = model.task
    if isinstance(question, Puzzle):
        own = [f"rule-{rule}" for rule in model.limits.donor_rules]
    else:
        compositions = task.compositions[task.split_compositions[state.split]].tolist()
        own = [f"terms-{'.'.join(map(str, terms))}" for terms in compositions]
    found = inside.look(model, question.x)

    def shows(donor: str) -> bool:
        given = donor_of(question, state.change(donor=donor))
        return given is not None and not uninformative(question, given[0], state.query, found)

    following = range(state.n + 1, min(state.n + SEARCHED, MAX_INSTANCE) + 1)
    instances = (donor for n in following if shows(donor := f"n-{n}"))
    return [donor for donor in own if shows(donor)] + list(itertools.islice(instances, INSTANCES))


def patch_card(model: Model, state: State, question: Puzzle | Function) -> list[Piece]:
    """Whose code is put in, where."""
    explained = "Put another question's code in place of this one's: does the answer follow?"
    donors = ["", *offered(model, state, question)]
    # A donor that came with an address, or stayed when another question was opened, is listed too.
    if state.donor not in donors:
        donors.append(state.donor)
    options = [
        (_name(model, state, each), state.link(donor=each, shown=state.shown or each != ""), each == state.donor)
        for each in donors
    ]
    current = _name(model, state, state.donor)
    pieces: list[Piece] = [
        heading("⇄", "Patch the code", explained),
        menu("code from", current, options, "choose-donor"),
    ]
    if state.donor:
        keys = [("all keys", "all"), ("the key", "key")]
        layers = [(f"layer {state.layer + 1}", False), ("all layers", True)]
        pieces.append(
            choices("keys", [(words, state.link(swap=key), state.swap == key) for words, key in keys], "swap")
        )
        pieces.append(
            choices("layers", [(words, state.link(deep=deep), state.deep == deep) for words, deep in layers], "deep")
        )
    return pieces


def _name(model: Model, state: State, donor: str) -> str:
    task: Any = model.task
    kind, _, rest = donor.partition("-")
    if kind == "rule":
        return f"this puzzle, with the rule {RULE_NAMES[int(rest)]}"
    if kind == "terms":
        return formula(task.term_bits(np.array([int(term) for term in rest.split(".")])))
    return f"{state.split} instance {rest}" if donor else "no patch"
