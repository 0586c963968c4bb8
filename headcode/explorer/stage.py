"""The left side of the page: the question. A puzzle, a function or a sentence, and how to choose it."""

from typing import Any

import numpy as np
from dash import html

from headcode.explorer import functions, puzzles
from headcode.explorer.catalogue import Catalogue, Model
from headcode.explorer.functions import Function
from headcode.explorer.panels import panel, position_names
from headcode.explorer.parts import Piece, badge, button, choices, link, menu, note
from headcode.explorer.puzzles import Puzzle
from headcode.explorer.state import MAX_INSTANCE, State, start
from headcode.tasks import RULE_NAMES
from headcode.tasks.render import formula

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
    thing = "puzzle" if limits.kind == "sraven" else "function"
    fresh: dict[str, Any] = {"edits": (), "guess": (), "donor": "", "point": (), "shown": False}
    drawn = _drawn(model, state)
    pieces = [
        choices(
            thing,
            [
                ("from a split", state.link(rules=(), terms=(), **fresh), not state.drawn),
                ("draw your own", state.link(**drawn, **fresh), state.drawn),
            ],
            "source",
        )
    ]
    if not state.drawn:
        splits = [
            (f"{split}: {SPLIT_WORDS[split]}", state.link(split=split, n=0, **fresh), split == state.split)
            for split in limits.splits
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
    if limits.kind == "sraven":
        pieces += _rule_menus(model, state, fresh)
    else:
        pieces += _term_menus(model, state, fresh)
    again = button("draw other values", state.link(seed=(state.seed + 1) % MAX_INSTANCE, **fresh), "redraw")
    pieces.append(html.Div([html.Span("", className="label"), again], className="row"))
    return pieces


def _drawn(model: Model, state: State) -> dict[str, Any]:
    """What drawing starts with: the rules or terms that are shown."""
    if state.drawn:
        return {}
    task: Any = model.task
    if model.limits.kind == "sraven":
        return {"rules": puzzles.puzzle_of(task, state).rules}
    return {"terms": functions.function_of(task, state).term_ids}


def _rule_menus(model: Model, state: State, fresh: dict[str, Any]) -> list[Piece]:
    task: Any = model.task
    pieces = []
    for feature, rule in enumerate(state.rules):
        options = []
        for other in model.limits.rule_ids:
            rules = (*state.rules[:feature], other, *state.rules[feature + 1 :])
            options.append((RULE_NAMES[other], state.link(rules=rules, **fresh), other == rule))
        pieces.append(menu(f"rule of feature {feature + 1}", RULE_NAMES[rule], options, f"choose-rule-{feature}"))
    composition = tuple(sorted(state.rules))
    split = next(
        (
            split
            for split in ("train", "compositional")
            if split in task.splits and (task.compositions[task.split_compositions[split]] == composition).all(1).any()
        ),
        "",
    )
    words = {
        "train": "This combination of rules was seen in training.",
        "compositional": "This combination of rules was held out.",
    }
    if split:
        pieces.append(note(words[split]))
    if task.permute:
        pieces.append(
            choices(
                "columns",
                [
                    ("shuffled", state.link(shuffle=True, **fresh), state.shuffle),
                    ("in order", state.link(shuffle=False, **fresh), not state.shuffle),
                ],
                "shuffle",
            )
        )
    return pieces


def _term_menus(model: Model, state: State, fresh: dict[str, Any]) -> list[Piece]:
    task: Any = model.task
    pieces = []
    for place, term in enumerate(state.terms):
        options = []
        for other in range(2**task.num_variables):
            if other in state.terms and other != term:
                continue
            terms = (*state.terms[:place], other, *state.terms[place + 1 :])
            options.append((_term(task, other), state.link(terms=terms, **fresh), other == term))
        pieces.append(menu(f"term {place + 1}", _term(task, term), options, f"choose-term-{place}"))
    return pieces


def _term(task: Any, term: int) -> str:
    return formula(task.term_bits(np.array([term])))[1:-1]


def click_mode(state: State, kinds: tuple[str, ...]) -> Piece:
    words = {"query": "query", "key": "key", "edit": "cell value"}
    return choices(
        "a click sets", [(words[kind], state.link(click=kind), state.click == kind) for kind in kinds], "click"
    )


def matrix(puzzle: Puzzle, state: State) -> Piece:
    """The panels, and under each its tokens to click on."""
    task = puzzle.task
    names = position_names(task.num_features, task.num_values)
    edited = dict(state.edits)
    cells = []
    for index in range(task.grid**2):
        row, column = divmod(index, task.grid)
        values = tuple(int(value) for value in puzzle.cells[row, column])
        last = index == task.grid**2 - 1
        # Cells set by hand leave the last panel without a truth to show.
        hidden = last and (puzzle.edited or not state.shown)
        look = "hidden" if hidden else "answer" if last else "plain"
        spoken = "the hidden panel" if hidden else ", ".join(f"{n} {v}" for n, v in zip(names, values, strict=True))
        picture = html.Img(src=panel(() if hidden else values, task.num_values, look), alt=spoken, className="panel")
        tokens = []
        for position, value in enumerate(values):
            token = index * task.num_features + position
            classes = ["token"] + ["query"] * (token == state.query) + ["key"] * (token == state.key)
            classes += ["edited"] * (token in edited) + ["hidden"] * hidden
            if state.shown and not puzzle.edited:
                classes.append(f"feature-{puzzle.feature(token) % 4}")
            title = f"row {row + 1}, column {column + 1}, {names[position]}"
            tokens.append(
                link(
                    "?" if hidden else str(value),
                    _token_link(state, token, value, task.num_values, last),
                    *classes,
                    title=title,
                    token=token,
                )
            )
        cells.append(html.Div([picture, html.Div(tokens, className="tokens")], className="place"))
    columns = {"gridTemplateColumns": f"repeat({task.grid}, minmax(0, 1fr))"}
    return html.Div(cells, className="matrix", style=columns)


def _token_link(state: State, token: int, value: int, num_values: int, last: bool) -> str:
    if state.click == "edit" and not last:
        edits = {**dict(state.edits), token: (value + 1) % num_values}
        return state.link(edits=tuple(sorted(edits.items())), guess=())
    return state.link(query=token) if state.click == "query" else state.link(key=token)


def legend(puzzle: Puzzle) -> list[Piece]:
    marks = [html.Span("query", className="mark query"), html.Span("key", className="mark key")]
    words = []
    if puzzle.task.permute:
        words.append("In each column the attributes may have swapped roles.")
    return [html.Div([*marks, html.Span(" ".join(words))], className="legend")]


def puzzle_stage(puzzle: Puzzle, state: State) -> list[Piece]:
    """The puzzle, the reader's guess, and, once shown, the truth and the solver's verdict."""
    task = puzzle.task
    pieces: list[Piece] = [click_mode(state, ("query", "key", "edit")), matrix(puzzle, state), *legend(puzzle)]
    if state.edits:
        undo = link("undo", state.link(edits=()), "undo")
        cells = f"{len(state.edits)} {'cell' if len(state.edits) == 1 else 'cells'}"
        pieces.append(note([f"{cells} changed by hand · ", undo]))
    names = position_names(task.num_features, task.num_values)
    pieces.append(html.H3("Your answer"))
    guess = state.guess or (-1,) * task.num_features
    rows = []
    for position, name in enumerate(names):
        options = []
        for value in range(task.num_values):
            chosen = (*guess[:position], value, *guess[position + 1 :])
            right = state.shown and not puzzle.edited and value == int(puzzle.answer[position])
            classes = ["option"] + ["true"] * right
            mine = guess[position] == value
            options.append(link(str(value), state.link(guess=chosen), *classes, selected=mine))
        rows.append(
            html.Div(
                [html.Span(name, className="name"), html.Span(options, className="options-row")], className="guess"
            )
        )
    pieces.append(html.Div(rows, className="guesses"))
    if not state.shown:
        words = "Try it first, then see the truth, the exact solver and the model."
        pieces.append(
            html.Div([button("show the answers", state.link(shown=True), "primary", "show")], className="row")
        )
        return [*pieces, note(words)]
    pieces.append(html.Div([button("hide the answers", state.link(shown=False), "show")], className="row"))
    if state.guess and min(guess) >= 0 and not puzzle.edited:
        right = list(guess) == puzzle.answer.tolist()
        pieces.append(
            note(badge("You are right.", "good") if right else badge("Not quite: the truth is framed.", "bad"))
        )
    return [*pieces, *truth(puzzle, state)]


def truth(puzzle: Puzzle, state: State) -> list[Piece]:
    """What generated the puzzle, and what its visible cells allow."""
    pieces: list[Piece] = [html.H3("The truth")]
    if puzzle.edited:
        pieces.append(note("Cells were changed by hand: the generator has no answer any more, the exact solver may."))
    else:
        names = position_names(puzzle.task.num_features, puzzle.task.num_values)
        first = puzzle.task.sequence_length - puzzle.task.num_features
        rows = [
            html.Li(
                [
                    html.Span(className=f"swatch feature-{puzzle.feature(first + place) % 4}"),
                    f"{name}: {int(puzzle.answer[place])} by the rule ",
                    html.B(RULE_NAMES[puzzle.rule(first + place)]),
                ]
            )
            for place, name in enumerate(names)
        ]
        pieces.append(html.Ul(rows, className="facts"))
    verdict = puzzles.judge_puzzle(puzzle, state)
    pieces.append(html.H3("The exact solver"))
    if isinstance(verdict, str):
        return [*pieces, note(verdict)]
    kind = "bad" if not verdict.answers else "good" if len(verdict.answers) == 1 else "unsure"
    pieces.append(note(badge(verdict.headline, kind), "verdict"))
    lines = [
        html.Li(f"{' '.join(map(str, answer))} with {share:.1%}")
        for answer, share in zip(verdict.answers[:4], verdict.probabilities[:4], strict=True)
    ]
    if len(verdict.answers) > 1:
        pieces.append(html.Ul(lines, className="facts"))
    if verdict.readings:
        said = [f"{', '.join(RULE_NAMES[r] for r in rules)} ({share:.0%})" for rules, share in verdict.readings]
        pieces.append(note(f"Explained by the rules {'; or '.join(said)}."))
    return pieces


def function_stage(function: Function, state: State) -> list[Piece]:
    """The points in context as a strip of tokens, and the function once shown."""
    tokens = []
    for point, value in enumerate(function.values):
        last = point == len(function.values) - 1
        classes = ["token", "level"] + ["query"] * (point == state.query) + ["key"] * (point == state.key)
        href = state.link(query=point) if state.click == "query" else state.link(key=point)
        where = ", ".join(f"x{v + 1} = {x:.2f}" for v, x in enumerate(function.inputs[point]))
        words = "?" if last and not state.shown else f"{value:.2f}"[1:] if value < 1 else "1"
        tokens.append(link(words, href, *classes, title=f"point {point}: {where}", token=point))
    marks = [html.Span("query", className="mark query"), html.Span("key", className="mark key")]
    pieces: list[Piece] = [click_mode(state, ("query", "key")), html.Div(tokens, className="points")]
    pieces.append(html.Div([*marks, html.Span("f(x) of every point; the last one is hidden.")], className="legend"))
    if state.point:
        pieces.append(note(["The hidden point was moved · ", link("put it back", state.link(point=()), "undo")]))
    variables = range(function.task.num_variables)
    axes = [
        (f"x{i + 1}, x{j + 1}", state.link(axes=(i, j)), (i, j) == function.axes)
        for i in variables
        for j in variables
        if i < j
    ]
    pieces.append(menu("picture over", f"x{function.axes[0] + 1}, x{function.axes[1] + 1}", axes, "choose-axes"))
    if not state.shown:
        show = button("show the answers", state.link(shown=True), "primary", "show")
        return [*pieces, html.Div([show], className="row"), note("Which two terms make these values?")]
    pieces.append(html.Div([button("hide the answers", state.link(shown=False), "show")], className="row"))
    pieces += [html.H3("The truth"), html.P(f"f = {function.formula}", className="formula")]
    where = ", ".join(f"x{v + 1} = {x:.2f}" for v, x in enumerate(function.inputs[-1]))
    pieces.append(note(f"At the hidden point ({where}) it is {function.values[-1]:.3f}."))
    return pieces


def sentence_stage(tokens: list[str], kinds: list[str], state: State) -> list[Piece]:
    """The words of a sentence as tokens."""
    cells = []
    for place, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        classes = ["token", "word"] + ["query"] * (place == state.query) + ["key"] * (place == state.key)
        href = state.link(query=place) if state.click == "query" else state.link(key=place)
        cells.append(link(token, href, *classes, title=kind, token=place))
    marks = [html.Span("query", className="mark query"), html.Span("key", className="mark key")]
    return [
        click_mode(state, ("query", "key")),
        html.Div(cells, className="sentence"),
        html.Div(marks, className="legend"),
    ]
