"""SRAVEN's view: the matrix with the reader's own answer, the exact solver, and what a donor's rule would give."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from dash import html

from headcode.explorer import figures, inside, puzzles
from headcode.explorer.figures import Figure
from headcode.explorer.model import Model
from headcode.explorer.panels import panel, position_names
from headcode.explorer.parts import Piece, badge, choices, link, menu, note, strip
from headcode.explorer.puzzles import Puzzle
from headcode.explorer.state import Limits, State
from headcode.explorer.view import WAITING, Around, Donor, View, click_mode, nearest, show_button
from headcode.tasks import RULE_NAMES
from headcode.tasks.sraven_rules import DISTRIBUTE


class PuzzleView(View):
    kind = thing = "puzzle"
    title = "The puzzle"
    explained = "Each feature follows a rule along every row. What is in the last panel?"
    draws = True

    def limits(self, task: Any, layers: int, **more: Any) -> Limits:
        hidden = task.sequence_length - task.num_features
        return super().limits(
            task,
            layers,
            rule_ids=task.rule_ids,
            num_features=task.num_features,
            num_values=task.num_values,
            num_visible=hidden,
            # The same place in the panel before: a pair whose codes tell rules apart better than most.
            key=hidden - task.num_features,
            donor_rules=tuple(rule for rule in task.rule_ids if rule != DISTRIBUTE),
        )

    def question(self, task: Any, state: State) -> Puzzle:
        return puzzles.puzzle_of(task, state)

    def drawing(self, model: Model, state: State) -> dict[str, Any]:
        return {} if state.drawn else {"rules": self.question(model.task, state).rules}

    def menus(self, model: Model, state: State, fresh: dict[str, Any]) -> list[Piece]:
        task: Any = model.task
        pieces = []
        for feature, rule in enumerate(state.rules):
            options = []
            for other in model.limits.rule_ids:
                rules = (*state.rules[:feature], other, *state.rules[feature + 1 :])
                options.append((RULE_NAMES[other], state.link(rules=rules, **fresh), other == rule))
            pieces.append(menu(f"rule of feature {feature + 1}", RULE_NAMES[rule], options, f"choose-rule-{feature}"))
        composition = tuple(sorted(state.rules))
        for split, words in (("train", "was seen in training"), ("compositional", "was held out")):
            known = task.compositions[task.split_compositions.get(split, [])]
            if (known == composition).all(1).any():
                pieces.append(note(f"This combination of rules {words}."))
                break
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

    def stage(self, puzzle: Puzzle, state: State) -> list[Piece]:
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
            return [*pieces, show_button(state), note(words)]
        pieces.append(show_button(state))
        if state.guess and min(guess) >= 0 and not puzzle.edited:
            right = list(guess) == puzzle.answer.tolist()
            pieces.append(
                note(badge("You are right.", "good") if right else badge("Not quite: the truth is framed.", "bad"))
            )
        return [*pieces, *truth(puzzle, state)]

    def names(self, question: Puzzle) -> list[str]:
        names = position_names(question.task.num_features, question.task.num_values)
        places = [question.place(token) for token in range(question.task.sequence_length)]
        return [f"row {row + 1}, column {column + 1}, {names[position]}" for row, column, position in places]

    def answer(
        self, puzzle: Puzzle, state: State, found: inside.Look, patch: inside.Look | None, donor: Donor | None
    ) -> list[Piece]:
        """Per feature the probabilities of all values, before and after the patch."""
        if not state.shown:
            return [note(WAITING, "waiting")]
        names = position_names(puzzle.task.num_features, puzzle.task.num_values)
        rows: list[Piece] = []
        said = found.probabilities.argmax(1)
        nothing = "" if donor is None else puzzles.uninformative(puzzle, donor[0], state.query, said)
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

    def own_donors(self, model: Model, state: State) -> list[str]:
        return [f"rule-{rule}" for rule in model.limits.donor_rules]

    def donor_of(self, question: Puzzle, state: State) -> Donor | None:
        return puzzles.donor_of(question, state)

    def donor_name(self, model: Model, state: State, donor: str) -> str:
        kind, _, rest = donor.partition("-")
        if kind == "rule":
            return f"this puzzle, with the rule {RULE_NAMES[int(rest)]}"
        return super().donor_name(model, state, donor)

    def uninformative(self, question: Puzzle, donor: Puzzle, token: int, found: inside.Look) -> str:
        return puzzles.uninformative(question, donor, token, found.probabilities.argmax(1))

    def map(self, model: Model, state: State, question: Puzzle, around: Around) -> tuple[Figure, list[Piece]]:
        atlas, near = around.atlas, around.near
        rules = atlas.batch.info["token_rules"][:, state.query].numpy()
        words = [
            f"puzzle {row}: {RULE_NAMES[rule]}, {'solved' if right else 'not solved'}"
            for row, (rule, right) in enumerate(zip(rules, atlas.correct, strict=True))
        ]
        present = sorted(set(rules.tolist()))
        groups = [(RULE_NAMES[rule], figures.RULE_COLOURS[rule], np.flatnonzero(rules == rule)) for rule in present]
        drawn = around.draw(groups, words)
        words_near = [
            [html.Span(className=f"dot rule-{rules[row]}"), html.B(RULE_NAMES[rules[row]]), f" puzzle {row}"]
            for row, _ in near
        ]
        where = [state.visit(atlas.split, row) for row, _ in near]
        pieces = nearest("Nearest codes and the rules behind them", words_near, near, where)
        mine = None if question.edited else question.rule(state.query)
        if state.shown and mine is not None:
            same = sum(int(rules[row]) == mine for row, _ in near)
            pieces.append(note(f"{same} of {len(near)} belong to this token's rule, {RULE_NAMES[mine]}."))
        return drawn, pieces


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
