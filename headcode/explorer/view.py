"""How a question is shown. A task names its view; this one shows the instances of any task, others inherit from it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from dash import html

from headcode.explorer import figures
from headcode.explorer.atlas import Atlas, Plane
from headcode.explorer.figures import Figure
from headcode.explorer.inside import Look
from headcode.explorer.model import Model
from headcode.explorer.parts import Piece, button, choices, link, note, strip
from headcode.explorer.state import Limits, State
from headcode.tasks import Batch, Task

WAITING = "Hidden until you show the answers."
MOST_CLASSES = 32
"""Answers with more classes than this are told by the best one alone."""
Donor = tuple[Any, str]
"""The question whose codes are put in, and its name in words."""
Near = list[tuple[int, float]]
"""(row of the atlas, cosine), the nearest first."""


@dataclasses.dataclass(frozen=True)
class Instance:
    """An instance of any task."""

    task: Task
    batch: Batch
    split: str

    @property
    def x(self) -> np.ndarray:
        return self.batch.x[0].numpy()


@dataclasses.dataclass(frozen=True)
class Around:
    """The codes among which a question's own code lies."""

    atlas: Atlas
    plane: Plane
    here: np.ndarray
    """Where the code lies in the plane."""
    there: np.ndarray | None
    """And the donor's, if there is one."""
    near: Near

    def draw(self, groups: Any, words: Sequence[str]) -> Figure:
        return figures.map_of_codes(self.plane.points, groups, words, self.plane.shares, self.here, self.there)


class View:
    """The plain view: tokens, the task's own text, answer beside truth, and codes coloured by what is decodable."""

    kind = "plain"
    thing = "instance"
    title = "The instance"
    explained = "The tokens that the model reads, and the task's own words for them."
    draws = False
    """Whether readers can draw questions of their own."""

    def refuses(self, task: Task) -> str:
        """Which tasks of its kind the view cannot show, as the beginning of a sentence; empty if it can show this."""
        return ""

    def limits(self, task: Any, layers: int, **more: Any) -> Limits:
        """What an address may ask."""
        length = task.sequence_length
        first = range(length)[task.queries].start
        return Limits(kind=self.kind, length=length, layers=layers, splits=task.splits, query=first, **more)

    def question(self, task: Any, state: State) -> Any:
        """The question that a state shows."""
        return self._instance(task, state.split, state.n)

    def _instance(self, task: Task, split: str, number: int) -> Instance:
        size = task.split_size(split)
        return Instance(task, task.instances(split, [number if size is None else number % size]), split)

    def drawing(self, model: Model, state: State) -> dict[str, Any]:
        """What drawing starts with: changes of the state."""
        return {}

    def menus(self, model: Model, state: State, fresh: dict[str, Any]) -> list[Piece]:
        """What can be chosen about a drawn question."""
        return []

    def stage(self, question: Any, state: State) -> list[Piece]:
        """The question itself, with tokens to click on."""
        cells = question.task.token_words(question.x) or _token_words(question.x)
        pieces = token_strip(cells, self.names(question), state, "points", "The tokens of the instance.")
        words = question.task.as_text(question.batch, answer=state.shown)
        pieces.append(html.Pre(words, className="note"))
        if not state.shown:
            return [*pieces, show_button(state)]
        remarks = question.task.remarks(question.batch, question.split, answer=True)
        return [*pieces, show_button(state), *(note(line) for line in remarks)]

    def names(self, question: Any) -> list[str]:
        """A name for every token."""
        return [f"token {place}" for place in range(len(question.x))]

    def answer(self, question: Any, state: State, found: Look, patch: Look | None, donor: Donor | None) -> list[Piece]:
        """The model's answer beside the truth, before and after the patch."""
        if not state.shown:
            return [note(WAITING, "waiting")]
        task, truth = question.task, question.batch.y[0]
        rows: list[Piece] = []
        looks = [("model", found)] + ([("patched", patch)] if patch is not None else [])
        for place, target in enumerate(truth.reshape(len(found.output), -1)[:, 0].tolist()):
            for name, look in looks:
                if task.objective == "classification" and look.output.shape[1] <= MOST_CLASSES:
                    rows += strip(look.probabilities[place].tolist(), truth=int(target), label=name)
                else:
                    classes = task.objective == "classification"
                    said = int(look.output[place].argmax()) if classes else float(look.output[place, 0])
                    words = f"{said:.4g}, truth {target:.4g}"
                    rows += [html.Span(name, className="name"), html.Span(words), html.Span("")]
        pieces: list[Piece] = [html.Div(rows, className="strips")]
        if donor is not None:
            pieces.append(
                note(f"Code from {donor[1]}. What would follow from it, the task does not say.", "patch-result")
            )
        return pieces

    def own_donors(self, model: Model, state: State) -> list[str]:
        """Donors made from the question itself, in the words of the address."""
        return []

    def donor_of(self, question: Any, state: State) -> Donor | None:
        kind, _, rest = state.donor.partition("-")
        if kind != "n":
            return None
        return self._instance(question.task, state.split, int(rest)), f"{state.split} {self.thing} {int(rest)}"

    def donor_name(self, model: Model, state: State, donor: str) -> str:
        kind, _, rest = donor.partition("-")
        return f"{state.split} instance {rest}" if kind == "n" else "no patch"

    def uninformative(self, question: Any, donor: Any, token: int, found: Look) -> str:
        """Why a donor cannot show whether the answer follows its code: a sentence, or "" where it can."""
        return ""

    def surface(self, model: Model, state: State) -> tuple[Figure, str] | None:
        """The model's answer wherever the question could stand, and a sentence; None for a view without."""
        return None

    def moved(self, model: Model, state: State, x: float | None, y: float | None) -> State | None:
        """The state after a click on the surface."""
        return None

    def map(self, model: Model, state: State, question: Any, around: Around) -> tuple[Figure, list[Piece]]:
        """The codes of many instances, and the nearest ones."""
        task, atlas, near = model.task, around.atlas, around.near
        known = {name: value.numpy() for name, value in atlas.batch.info.items()} | atlas.judged
        labels = task.map_labels(known, state.query).get(task.label_kind)
        if labels is None or labels.dtype.kind not in "iu":
            labels = atlas.correct.astype(np.int64)
            names = ["not solved", "solved"]
        else:
            names = [task.label_name(label) for label in range(int(labels.max()) + 1)]
        colours = figures.RULE_COLOURS
        groups = [
            (names[label], colours[label % len(colours)], np.flatnonzero(labels == label))
            for label in sorted(set(labels.tolist()))
        ]
        said = [f"{self.thing} {row}: {names[label]}" for row, label in enumerate(labels.tolist())]
        drawn = around.draw(groups, said)
        words = [[html.B(names[labels[row]]), f" {self.thing} {row}"] for row, _ in near]
        return drawn, nearest("Nearest codes", words, near, [state.visit(atlas.split, row) for row, _ in near])


def nearest(title: str, words: Sequence[list[Piece]], near: Near, where: Sequence[State]) -> list[Piece]:
    """The nearest codes as links, each with its cosine."""
    items = [
        html.Li(link([*said, html.Span(f"{cosine:.3f}", className="cosine")], state.search()))
        for said, (_, cosine), state in zip(words, near, where, strict=True)
    ]
    return [html.H3(title), html.Ol(items, className="near")]


def show_button(state: State) -> Piece:
    """Shows or hides the answers."""
    if state.shown:
        return html.Div([button("hide the answers", state.link(shown=False), "show")], className="row")
    return html.Div([button("show the answers", state.link(shown=True), "primary", "show")], className="row")


def click_mode(state: State, kinds: tuple[str, ...]) -> Piece:
    words = {"query": "query", "key": "key", "edit": "cell value"}
    return choices(
        "a click sets", [(words[kind], state.link(click=kind), state.click == kind) for kind in kinds], "click"
    )


def token_strip(
    words: Sequence[str], titles: Sequence[str], state: State, name: str, explained: str = "", look: str = ""
) -> list[Piece]:
    """Tokens to click on, the query and the key marked."""
    cells = []
    for place, (word, title) in enumerate(zip(words, titles, strict=True)):
        classes = ["token", *look.split()] + ["query"] * (place == state.query) + ["key"] * (place == state.key)
        href = state.link(query=place) if state.click == "query" else state.link(key=place)
        cells.append(link(word, href, *classes, title=title, token=place))
    marks = [html.Span("query", className="mark query"), html.Span("key", className="mark key")]
    told = [html.Span(f"{explained} Small numbers are positions.".strip())]
    return [
        click_mode(state, ("query", "key")),
        html.Div(cells, className=name),
        html.Div([*marks, *told], className="legend"),
    ]


def _token_words(x: np.ndarray) -> list[str]:
    """Tokens in few letters: a number, the class of a one-hot vector, or the first values of a vector."""
    if x.ndim == 1:
        return [f"{value:g}" for value in x.tolist()]
    one_hot = x.shape[1] > 1 and bool((((x == 0) | (x == 1)).all(1) & (x.sum(1) <= 1)).all())
    if one_hot:
        return [str(int(token.argmax())) if token.any() else "?" for token in x]
    return [" ".join(f"{value:.2g}" for value in token[:3]) for token in x]
