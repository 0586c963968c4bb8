"""The right side of the page, once for each model: answer, code, map, neighbours, generated network."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from dash import html

from headcode.explorer import figures, inside
from headcode.explorer.atlas import Atlas, Atlases, alike, plane_of
from headcode.explorer.figures import Figure
from headcode.explorer.model import COMPUTING, Model
from headcode.explorer.parts import Piece, badge, choices, heading, note
from headcode.explorer.sentences import Lens, strongest
from headcode.explorer.state import State
from headcode.explorer.view import Around, nearest

NEIGHBOURS = 6
SAME_EVERYWHERE = (
    "These codes are the same for every instance: here the token knows nothing yet but its place. Try a later layer."
)


@dataclasses.dataclass
class Slot:
    """What one model's column shows."""

    titles: list[Piece]
    """Of the cards: answer, code, map, network."""
    head: list[Piece]
    answer: list[Piece]
    pair: list[Piece]
    bars: Figure
    sheet: Figure
    codes: Figure
    near: list[Piece]
    network: Figure
    network_note: str


def task_slot(model: Model, atlases: Atlases, state: State, question: Any) -> Slot:
    """A model on a question of its task."""
    state = state.change(layer=min(state.layer, model.limits.layers - 1))
    found = inside.look(model, question.x)
    donor = model.view.donor_of(question, state)
    given = None if donor is None else inside.look(model, donor[0].x)
    patch = None
    if donor is not None:
        layers = list(range(model.limits.layers)) if state.deep else [state.layer]
        key = state.key if state.swap == "key" else None
        patch = inside.patched(model, question.x, donor[0].x, layers, state.query, key)
    codes = found.codes[state.layer]
    code = codes[:, state.query, state.key]
    others = None if given is None else given.codes[state.layer]
    names = model.view.names(question)
    atlas = atlases.of(model)
    weights = inside.network(model, state.layer, code)
    drawn, near = _map(model, atlas, state, question, codes, others)
    several = {2: "two layers with a nonlinearity between", 3: "three layers with nonlinearities between"}
    kind = several.get(len(weights), "one linear layer")
    return Slot(
        titles=titles(model.method),
        head=_head(model),
        answer=model.view.answer(question, state, found, patch, donor),
        pair=_pair(state, model.limits.layers, names, donor is not None),
        bars=figures.code_bars(code, None if others is None else others[:, state.query, state.key]),
        sheet=figures.code_sheet(codes[:, state.query], names, state.key),
        codes=drawn,
        near=near,
        network=figures.networks(weights),
        network_note=f"The code turns {model.method}'s weights into this pair's own network: {kind}.",
    )


def titles(method: str, lens: bool = False) -> list[Piece]:
    """The cards' headings; where two models' cards stand among each other, each says whose it is."""
    said = [
        ("2", "The check" if lens else "The answer", "Is this reading the layer, or a picture of it?" if lens else ""),
        ("3", "The code", "One number for each head: how strongly it looks from the query at the key."),
        (
            "4",
            "The map of codes",
            "Every dot is the code of a pair of tokens. Click one to look at that pair."
            if lens
            else "Every dot is the code of another question. Click one to open it.",
        ),
        ("5", "The generated network", ""),
    ]
    return [heading(*each, whose=method) for each in said]


def _head(model: Model) -> list[Piece]:
    sizes = model.run.config.model
    words = f"{sizes.num_layers} layers · {sizes.num_heads} heads · step {model.run.step:,}"
    return [
        html.Span(model.name, className="model-name"),
        badge(model.method, "method"),
        html.Span(words, className="sizes"),
    ]


def _pair(state: State, layers: int, names: Sequence[str], patched: bool = False) -> list[Piece]:
    options = [(f"{i}", state.link(layer=i), i == state.layer) for i in range(layers)]
    words = [
        html.Span(names[state.query], className="mark query"),
        html.Span("looks at"),
        html.Span(names[state.key], className="mark key"),
    ]
    if patched:
        words.append(html.Span("the donor's code", className="mark donor"))
    return [choices("layer", options, "layer"), html.P(words, className="pair")]


def _map(
    model: Model,
    atlas: Atlas,
    state: State,
    question: Any,
    codes: np.ndarray,
    others: np.ndarray | None,
) -> tuple[Figure, list[Piece]]:
    keys = state.key if state.around == "key" else None
    plane = atlas.plane(state.layer, state.query, keys)
    if plane is None:
        return figures.empty(figures.HEIGHTS["codes"]), [note(SAME_EVERYWHERE)]
    chosen = slice(None) if keys is None else keys
    code = codes[:, state.query, chosen]
    here = plane.place(code)
    there = None if others is None else plane.place(others[:, state.query, chosen])
    mine = state.n if not state.drawn and state.split == atlas.split and not state.edits and not state.point else None
    near = alike(
        atlas.features(state.layer, state.query, keys),
        code,
        NEIGHBOURS,
        mine if mine is not None and mine < len(atlas) else None,
    )
    return model.view.map(model, state, question, Around(atlas, plane, here, there, near))


KIND_COLOURS = figures.RULE_COLOURS


def lens_slot(lens: Lens, state: State) -> tuple[Slot, Any, State]:
    """A pretrained model on a sentence; the state with query and key inside the sentence."""
    with COMPUTING:
        reading = lens.read(state.text)
    length = len(reading.tokens)
    state = state.change(query=min(state.query, length - 1), key=min(state.key, length - 1))
    names = [f"{place} {token}" for place, token in enumerate(reading.tokens)]
    head = [html.Span(lens.name, className="model-name"), badge("softmax", "method")]
    pair = _pair(state, lens.num_layers, names)
    layer = next((each for each in reading.layers if each.layer == state.layer), None)
    if layer is None:
        words = f"This layer cannot be read: {reading.unreadable.get(state.layer, 'it gave no attention')}."
        nothing = figures.empty(180)
        shown = titles("softmax", lens=True)
        return Slot(shown, head, [note(words)], pair, nothing, nothing, nothing, [], nothing, ""), reading, state
    codes = layer.codes.float().numpy()
    code = codes[:, state.query, state.key]
    flat = codes.reshape(len(codes), -1).T  # (pair, H)
    plane = plane_of(flat)
    row = state.query * length + state.key
    drawn = figures.empty(figures.HEIGHTS["codes"])
    if plane is not None:
        kinds = np.tile(np.array(reading.kinds), length)
        present = sorted(set(reading.kinds))
        colours = [KIND_COLOURS[i % len(KIND_COLOURS)] for i in range(len(present))]
        groups = [(kind, colour, np.flatnonzero(kinds == kind)) for kind, colour in zip(present, colours, strict=True)]
        pairs = [f"{q} → {k}" for q in names for k in names]
        drawn = figures.map_of_codes(plane.points, groups, pairs, plane.shares, plane.place(code), None)
    near = alike(flat, code, NEIGHBOURS, row)
    pairs_near = [divmod(other, length) for other, _ in near]
    words_near = [[f"{names[q]} → {names[k]}"] for q, k in pairs_near]
    where = [state.change(query=q, key=k) for q, k in pairs_near]
    if layer.is_linear:
        matrix = layer.value_network(state.query, state.key).float().numpy()
        small = strongest(matrix)
        network = figures.networks([small], -(-len(matrix) // len(small)))
        words = f"W of this pair, {' × '.join(map(str, matrix.shape))}; a pixel is the strongest weight around."
    else:
        network = figures.empty(180)
        words = f"This layer generates two-layer networks ({layer.weights.value_net}), which are not drawn here."
    error = html.Span(f"{layer.error:.0e}", className="nowrap")
    check = ["All generated matrices applied and summed are within ", error, " of the layer's own output."]
    slot = Slot(
        titles=titles("softmax", lens=True),
        head=head,
        answer=[note(check)],
        pair=pair,
        bars=figures.code_bars(code, None),
        sheet=figures.code_sheet(codes[:, state.query], names, state.key, reading.tokens),
        codes=drawn,
        near=nearest("Nearest codes in this sentence", words_near, near, where),
        network=network,
        network_note=words,
    )
    return slot, reading, state
