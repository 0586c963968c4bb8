"""The right side of the page, once for each model: answer, code, map, neighbours, generated network."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from dash import html

from headcode.explorer import figures, functions, inside, puzzles
from headcode.explorer.atlas import Atlas, Atlases, alike, plane_of
from headcode.explorer.catalogue import COMPUTING, Model
from headcode.explorer.donors import donor_of, uninformative
from headcode.explorer.figures import Figure
from headcode.explorer.functions import Function
from headcode.explorer.panels import position_names
from headcode.explorer.parts import Piece, badge, heading, link, note, strip
from headcode.explorer.puzzles import Puzzle
from headcode.explorer.sentences import Lens, strongest
from headcode.explorer.state import State
from headcode.tasks import RULE_NAMES
from headcode.tasks.render import formula

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


def task_slot(model: Model, atlases: Atlases, state: State, question: Puzzle | Function) -> Slot:
    """A model on a puzzle or a function."""
    state = state.change(layer=min(state.layer, model.limits.layers - 1))
    found = inside.look(model, question.x)
    donor = donor_of(question, state)
    given = None if donor is None else inside.look(model, donor[0].x)
    patch = None
    if donor is not None:
        layers = list(range(model.limits.layers)) if state.deep else [state.layer]
        key = state.key if state.swap == "key" else None
        patch = inside.patched(model, question.x, donor[0].x, layers, state.query, key)
    if isinstance(question, Puzzle):
        answer = puzzle_answer(question, state, found, patch, donor)
    else:
        answer = function_answer(question, state, found, patch, donor)
    codes = found.codes[state.layer]
    code = codes[:, state.query, state.key]
    others = None if given is None else given.codes[state.layer]
    names = token_names(question)
    atlas = atlases.of(model)
    weights = inside.network(model, state.layer, code)
    drawn, near = _map(model, atlas, state, question, codes, others)
    kind = "two layers with a nonlinearity between" if len(weights) > 1 else "one linear layer"
    return Slot(
        titles=titles(model.method),
        head=_head(model),
        answer=answer,
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


def token_names(question: Puzzle | Function) -> list[str]:
    if isinstance(question, Function):
        return [f"point {i}" for i in range(len(question.inputs))]
    names = position_names(question.task.num_features, question.task.num_values)
    places = [question.place(token) for token in range(question.task.sequence_length)]
    return [f"row {row + 1}, column {column + 1}, {names[position]}" for row, column, position in places]


def _pair(state: State, layers: int, names: Sequence[str], patched: bool = False) -> list[Piece]:
    links = [link(f"{i + 1}", state.link(layer=i), selected=i == state.layer) for i in range(layers)]
    chosen = html.Div(
        [html.Span("layer", className="label"), html.Div(links, className="segments")], className="row layer"
    )
    words = [
        html.Span(names[state.query], className="mark query"),
        html.Span("looks at"),
        html.Span(names[state.key], className="mark key"),
    ]
    if patched:
        words.append(html.Span("the donor's code", className="mark donor"))
    return [chosen, html.P(words, className="pair")]


def puzzle_answer(
    puzzle: Puzzle, state: State, found: inside.Look, patch: inside.Look | None, donor: tuple[Puzzle, str] | None
) -> list[Piece]:
    """Per feature the probabilities of all values, before and after the patch."""
    if not state.shown:
        return [note("Hidden until you show the answers.", "waiting")]
    names = position_names(puzzle.task.num_features, puzzle.task.num_values)
    rows: list[Piece] = []
    nothing = "" if donor is None else uninformative(puzzle, donor[0], state.query, found)
    follow = None if donor is None or nothing else puzzles.expected(puzzle, donor[0], state.query)
    for place, name in enumerate(names):
        truth = None if puzzle.edited else int(puzzle.answer[place])
        rows += strip(found.probabilities[place].tolist(), truth=truth, label=name)
        if patch is not None:
            expected = follow[1] if follow is not None and follow[0] == place else None
            rows += strip(patch.probabilities[place].tolist(), truth=truth, follow=expected, label="patched")
    guesses = found.probabilities.argmax(1)
    pieces: list[Piece] = []
    if not puzzle.edited:
        wrong = int((guesses != puzzle.answer).sum())
        right = "All features right." if not wrong else f"{wrong} of {len(names)} features wrong."
        pieces.append(note(badge(right, "bad" if wrong else "good"), "verdict"))
    else:
        pieces.append(note(badge(f"It says {' '.join(map(str, guesses))}.", "unsure"), "verdict"))
    pieces.append(html.Div(rows, className="strips"))
    if patch is not None and donor is not None:
        after = patch.probabilities.argmax(1)
        pieces.append(_patch_words(puzzle, guesses, after, follow, nothing, donor[1], names))
    elif not puzzle.edited:
        pieces.append(html.Div([html.Span("truth", className="mark true")], className="legend"))
    return pieces


def _patch_words(
    puzzle: Puzzle,
    before: np.ndarray,
    after: np.ndarray,
    follow: tuple[int, int] | None,
    nothing: str,
    source: str,
    names: Sequence[str],
) -> Piece:
    changed = [f"{names[place]} {before[place]} → {after[place]}" for place in np.flatnonzero(before != after).tolist()]
    first = f"Code from {source}: " + (", ".join(changed) if changed else "the answer stays") + "."
    marks = [] if puzzle.edited else [html.Span("truth", className="mark true")]
    if follow is None:
        verdict: list[Piece] = [badge("Uninformative.", "unsure"), f" {nothing} "]
    else:
        place, value = follow
        marks.append(html.Span(f"the donor's rule on this row gives {value}", className="mark follow"))
        follows = after[place] == value
        words = "follows the code" if follows else "does not follow the code"
        verdict = [badge(f"The answer {words}.", "good" if follows else "unsure"), " "]
    return html.Div([html.P([*verdict, first], className="note patch-result"), html.Div(marks, className="legend")])


def function_answer(
    function: Function, state: State, found: inside.Look, patch: inside.Look | None, donor: tuple[Function, str] | None
) -> list[Piece]:
    """Prediction beside the truth on a scale from 0 to 1."""
    if not state.shown:
        return [note("Hidden until you show the answers.", "waiting")]
    truth, said = float(function.values[-1]), float(found.output[0, 0])
    marks = [("truth", truth, "true"), ("model", said, "model")]
    if patch is not None and donor is not None:
        marks.append(("patched", float(patch.output[0, 0]), "patched"))
        marks.append(("donor's f here", functions.expected(function, donor[0]), "follow"))
    rows = []
    for name, value, kind in marks:
        width = {"width": f"{100 * min(max(value, 0.0), 1.0):.1f}%"}
        bar = html.Span(html.Span(className=f"bar {kind}", style=width), className="track")
        rows += [html.Span(name, className="name"), bar, html.Span(f"{value:.3f}", className="said")]
    score = function.score(said)
    words = "constant function" if math.isnan(score) else f"R² of this sequence {score:.2f}"
    kind = "unsure" if math.isnan(score) else "good" if score >= 0.95 else "unsure" if score > 0.5 else "bad"
    pieces: list[Piece] = [note(badge(words, kind), "verdict"), html.Div(rows, className="scales")]
    if patch is not None and donor is not None:
        after = float(patch.output[0, 0])
        first = f"Code from {donor[1]}: {said:.3f} → {after:.3f}"
        if nothing := uninformative(function, donor[0], state.query, found):
            pieces.append(note([badge("Uninformative.", "unsure"), f" {nothing} {first}."], "patch-result"))
        else:
            nearer = abs(after - marks[3][1]) < abs(after - truth)
            verdict = "nearer to the donor's function" if nearer else "nearer to this function"
            pieces.append(note(f"{first}, {verdict}.", "patch-result"))
    return pieces


def _map(
    model: Model,
    atlas: Atlas,
    state: State,
    question: Puzzle | Function,
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
    if isinstance(question, Puzzle):
        rule = None if question.edited else question.rule(state.query)
        return _rule_map(atlas, state, plane, here, there, near, rule)
    return _value_map(model, atlas, state, plane, here, there, near)


def _visit(atlas: Atlas, state: State, row: int) -> str:
    """The address of an instance of the atlas."""
    return visit(state, atlas.split, row).search()


def visit(state: State, split: str, row: int) -> State:
    return state.change(split=split, n=row, rules=(), terms=(), edits=(), point=(), guess=())


def _rule_map(
    atlas: Atlas,
    state: State,
    plane: Any,
    here: np.ndarray,
    there: np.ndarray | None,
    near: list[tuple[int, float]],
    mine: int | None,
) -> tuple[Figure, list[Piece]]:
    rules = atlas.batch.info["token_rules"][:, state.query].numpy()
    words = [
        f"puzzle {row}: {RULE_NAMES[rule]}, {'solved' if right else 'not solved'}"
        for row, (rule, right) in enumerate(zip(rules, atlas.correct, strict=True))
    ]
    present = sorted(set(rules.tolist()))
    groups = [(RULE_NAMES[rule], figures.RULE_COLOURS[rule], np.flatnonzero(rules == rule)) for rule in present]
    drawn = figures.map_of_codes(plane.points, groups, words, plane.shares, here, there)
    items = []
    for row, cosine in near:
        dot = html.Span(className=f"dot rule-{rules[row]}")
        words_here = [
            dot,
            html.B(RULE_NAMES[rules[row]]),
            f" puzzle {row}",
            html.Span(f"{cosine:.3f}", className="cosine"),
        ]
        items.append(html.Li(link(words_here, _visit(atlas, state, row))))
    pieces: list[Piece] = [html.H3("Nearest codes and the rules behind them"), html.Ol(items, className="near")]
    if state.shown and mine is not None:
        same = sum(int(rules[row]) == mine for row, _ in near)
        pieces.append(note(f"{same} of {len(near)} belong to this token's rule, {RULE_NAMES[mine]}."))
    return drawn, pieces


def _value_map(
    model: Model,
    atlas: Atlas,
    state: State,
    plane: Any,
    here: np.ndarray,
    there: np.ndarray | None,
    near: list[tuple[int, float]],
) -> tuple[Figure, list[Piece]]:
    task: Any = model.task
    values = atlas.batch.info["targets"][:, state.query].numpy()
    terms = [formula(task.term_bits(ids)) for ids in atlas.batch.info["term_ids"].numpy()]
    words = [f"function {row}: f = {value:.2f}" for row, value in enumerate(values)]
    title = f"f at point {state.query}"
    drawn = figures.shaded_map(plane.points, values, title, words, plane.shares, here, there)
    items = []
    for row, cosine in near:
        said = [html.B(f"f = {values[row]:.2f}"), f" {terms[row]}", html.Span(f"{cosine:.3f}", className="cosine")]
        items.append(html.Li(link(said, _visit(atlas, state, row))))
    return drawn, [html.H3("Nearest codes and their functions"), html.Ol(items, className="near")]


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
        pairs = [f"{q} → {k}" for q in reading.tokens for k in reading.tokens]
        drawn = figures.map_of_codes(plane.points, groups, pairs, plane.shares, plane.place(code), None)
    items = []
    for other, cosine in alike(flat, code, NEIGHBOURS, row):
        q, k = divmod(other, length)
        words_here = [f"{reading.tokens[q]} → {reading.tokens[k]}", html.Span(f"{cosine:.3f}", className="cosine")]
        items.append(html.Li(link(words_here, state.link(query=q, key=k))))
    matrix = layer.value_network(state.query, state.key).float().numpy()
    error = html.Span(f"{layer.error:.0e}", className="nowrap")
    check = ["All generated matrices applied and summed are within ", error, " of the layer's own output."]
    near = [html.H3("Nearest codes in this sentence"), html.Ol(items, className="near")]
    small = strongest(matrix)
    slot = Slot(
        titles=titles("softmax", lens=True),
        head=head,
        answer=[note(check)],
        pair=pair,
        bars=figures.code_bars(code, None),
        sheet=figures.code_sheet(codes[:, state.query], names, state.key, reading.tokens),
        codes=drawn,
        near=near,
        network=figures.networks([small], -(-len(matrix) // len(small))),
        network_note=f"W of this pair, {' × '.join(map(str, matrix.shape))}; a pixel is the strongest weight around.",
    )
    return slot, reading, state
