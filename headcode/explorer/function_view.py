"""Fuzzy logic's view: the points in context, the function as a surface, and what a donor's function would give."""

import math
from typing import Any

import numpy as np
from dash import html

from headcode.explorer import figures, functions, inside
from headcode.explorer.figures import Figure
from headcode.explorer.functions import Function
from headcode.explorer.model import Model
from headcode.explorer.parts import Piece, badge, link, menu, note
from headcode.explorer.state import Limits, State
from headcode.explorer.view import WAITING, Around, Donor, View, nearest, show_button, token_strip
from headcode.tasks.render import formula


class FunctionView(View):
    kind = thing = "function"
    title = "The function"
    explained = "Values of a fuzzy-logic function at random points; the last is hidden."
    draws = True

    def refuses(self, task: Any) -> str:
        return "" if task.num_variables > 1 else "The explorer cannot draw functions of one variable"

    def limits(self, task: Any, layers: int, **more: Any) -> Limits:
        return super().limits(task, layers, num_terms=task.num_terms, num_variables=task.num_variables)

    def question(self, task: Any, state: State) -> Function:
        return functions.function_of(task, state)

    def drawing(self, model: Model, state: State) -> dict[str, Any]:
        return {} if state.drawn else {"terms": self.question(model.task, state).term_ids}

    def menus(self, model: Model, state: State, fresh: dict[str, Any]) -> list[Piece]:
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

    def stage(self, function: Function, state: State) -> list[Piece]:
        """The points in context as a strip of tokens, and the function once shown."""
        words, where = [], []
        for point, value in enumerate(function.values):
            hidden = point == len(function.values) - 1 and not state.shown
            words.append("?" if hidden else f"{value:.2f}"[1:] if value < 1 else "1")
            where.append(f"point {point}: {_at(function, point)}")
        explained = "f(x) of every point; the last one is hidden."
        pieces = token_strip(words, where, state, "points", explained, "level")
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
            return [*pieces, show_button(state), note("Which two terms make these values?")]
        pieces.append(show_button(state))
        pieces += [html.H3("The truth"), html.P(f"f = {function.formula}", className="formula")]
        pieces.append(note(f"At the hidden point ({_at(function, -1)}) it is {function.values[-1]:.3f}."))
        return pieces

    def names(self, question: Function) -> list[str]:
        return [f"point {point}" for point in range(len(question.inputs))]

    def answer(
        self, function: Function, state: State, found: inside.Look, patch: inside.Look | None, donor: Donor | None
    ) -> list[Piece]:
        """Prediction beside the truth on a scale from 0 to 1."""
        if not state.shown:
            return [note(WAITING, "waiting")]
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
            if nothing := functions.uninformative(function, donor[0], said):
                pieces.append(note([badge("Uninformative.", "unsure"), f" {nothing} {first}."], "patch-result"))
            else:
                nearer = abs(after - marks[3][1]) < abs(after - truth)
                verdict = "nearer to the donor's function" if nearer else "nearer to this function"
                pieces.append(note(f"{first}, {verdict}.", "patch-result"))
        return pieces

    def own_donors(self, model: Model, state: State) -> list[str]:
        task: Any = model.task
        compositions = task.compositions[task.split_compositions[state.split]].tolist()
        return [f"terms-{'.'.join(map(str, terms))}" for terms in compositions]

    def donor_of(self, question: Function, state: State) -> Donor | None:
        return functions.donor_of(question, state)

    def donor_name(self, model: Model, state: State, donor: str) -> str:
        task: Any = model.task
        kind, _, rest = donor.partition("-")
        if kind == "terms":
            return formula(task.term_bits(np.array([int(term) for term in rest.split(".")])))
        return super().donor_name(model, state, donor)

    def uninformative(self, question: Function, donor: Function, token: int, found: inside.Look) -> str:
        return functions.uninformative(question, donor, float(found.output[0, 0]))

    def surface(self, model: Model, state: State) -> tuple[Figure, str] | None:
        """The function over two variables as the model predicts it."""
        if not state.shown:
            return figures.empty(figures.HEIGHTS["surface"]), ""
        question = self.question(model.task, state)
        places, values = question.predicted_surface(model)
        fine, true = question.true_surface()
        step = (functions.FINE - 1) // (functions.SIDE - 1)
        first, second = question.axes
        names = (f"x{first + 1}", f"x{second + 1}")
        context = question.inputs[:-1][:, [first, second]]
        hidden = (float(question.inputs[-1][first]), float(question.inputs[-1][second]))
        pictures = [("truth", fine, true), (model.method, places, values)]
        drawn = figures.surfaces(pictures, names, context, question.values[:-1], hidden)
        rest = [
            f"x{v + 1} = {question.inputs[-1][v]:.2f}"
            for v in range(question.task.num_variables)
            if v not in question.axes
        ]
        where = f"where {', '.join(rest)}; " if rest else ""
        return drawn, f"{where}mean distance of the two {np.abs(values - true[::step, ::step]).mean():.3f}."

    def moved(self, model: Model, state: State, x: float | None, y: float | None) -> State | None:
        """The hidden point goes where the reader clicked."""
        question = self.question(model.task, state)
        point = question.inputs[-1].tolist()
        if x is None or y is None:
            return None
        point[question.axes[0]], point[question.axes[1]] = x, y
        return state.change(point=tuple(point))

    def map(self, model: Model, state: State, question: Function, around: Around) -> tuple[Figure, list[Piece]]:
        atlas, near = around.atlas, around.near
        task: Any = model.task
        values = atlas.batch.info["targets"][:, state.query].numpy()
        terms = [formula(task.term_bits(ids)) for ids in atlas.batch.info["term_ids"].numpy()]
        words = [f"function {row}: f = {value:.2f}" for row, value in enumerate(values)]
        title = f"f at point {state.query}"
        drawn = figures.shaded_map(
            around.plane.points, values, title, words, around.plane.shares, around.here, around.there
        )
        said = [[html.B(f"f = {values[row]:.2f}"), f" {terms[row]}"] for row, _ in near]
        where = [state.visit(atlas.split, row) for row, _ in near]
        return drawn, nearest("Nearest codes and their functions", said, near, where)


def _term(task: Any, term: int) -> str:
    return formula(task.term_bits(np.array([term])))[1:-1]


def _at(function: Function, point: int) -> str:
    return ", ".join(f"x{v + 1} = {x:.2f}" for v, x in enumerate(function.inputs[point]))
