"""What happens when the address changes, and when a plot or a field changes the address."""

from typing import Any

from dash import Dash, Input, Output, State, ctx, no_update
from dash.exceptions import PreventUpdate

from headcode.explorer import donors, stage
from headcode.explorer.atlas import Atlases
from headcode.explorer.catalogue import Catalogue
from headcode.explorer.layout import SLOTS
from headcode.explorer.parts import Piece, choices, heading, note
from headcode.explorer.slots import lens_slot, task_slot
from headcode.explorer.state import MAX_INSTANCE, MAX_TEXT, START_PAIR, parse
from headcode.explorer.state import State as Shown
from headcode.explorer.view import token_strip

CLICKABLE = ("codes", "sheet", "surface")


class Explorer:
    """The page's answers to addresses. Methods take what a browser sent and trust none of it."""

    def __init__(self, catalogue: Catalogue, atlases: Atlases) -> None:
        self.catalogue, self.atlases = catalogue, atlases

    def read(self, search: Any) -> tuple[Shown, list[str]]:
        return parse(search, self.catalogue.limits, self.catalogue.peers, self.catalogue.text)

    def kind(self, state: Shown) -> str:
        return self.catalogue.limits[state.model].kind

    def question(self, state: Shown) -> Any:
        model = self.catalogue.models[state.model]
        return model.view.question(model.task, state)

    def left(self, search: Any) -> list[Any]:
        """Page class, menus, notices, stage title, source, stage, patch."""
        state, notices = self.read(search)
        kind = self.kind(state)
        classes = f"{'two' if state.other else 'one'} kind-{kind}" + (" shown" if state.shown else "")
        classes += " drawn" if state.drawn else ""
        said: list[Piece] = [note(words, "notice") for words in notices]
        top = stage.top(self.catalogue, state)
        if kind == "lens":
            lens = self.catalogue.lenses[state.model]
            _, reading, state = lens_slot(lens, state)
            title = heading("1", "The sentence", "Pick the query and the key among its tokens.")
            sentence = token_strip(reading.tokens, reading.kinds, state, "sentence", look="word")
            return [classes, top, said, title, [], sentence, []]
        model = self.catalogue.models[state.model]
        question = self.question(state)
        title = heading("1", model.view.title, model.view.explained)
        body = model.view.stage(question, state)
        patch = donors.patch_card(model, state, question)
        return [classes, top, said, title, stage.source(model, state), body, patch]

    def right(self, search: Any, slot: int) -> list[Any]:
        """One model's column: head, answer, pair, bars, sheet, around, map, near, network note, network, titles."""
        state, _ = self.read(search)
        name = state.other if slot else state.model
        if not name:
            raise PreventUpdate
        if self.kind(state) == "lens":
            found, _, state = lens_slot(self.catalogue.lenses[name], state)
            around: list[Piece] = [note("Coloured by the kind of the key's token.")]
        else:
            found = task_slot(self.catalogue.models[name], self.atlases, state, self.question(state))
            options = [("this key", "key"), ("all keys", "all")]
            links = [(words, state.link(around=kind), state.around == kind) for words, kind in options]
            around = [choices("the query's codes to", links, "around-choice")]
        return [
            found.head,
            found.answer,
            found.pair,
            found.bars,
            found.sheet,
            around,
            found.codes,
            found.near,
            found.network_note,
            found.network,
            None,
            None,
            *found.titles,
        ]

    def surface(self, search: Any, slot: int) -> list[Any]:
        """The picture of the model's answer wherever the question could stand, of views that have one."""
        state, _ = self.read(search)
        name = state.other if slot else state.model
        model = self.catalogue.models.get(name)
        if model is None or (found := model.view.surface(model, state)) is None:
            raise PreventUpdate
        return [*found, None]

    def click(self, search: Any, trigger: str, given: Any) -> str:
        """The address after a click on a plot, or after a number or a sentence was entered."""
        state, _ = self.read(search)
        kind = self.kind(state)
        limits = self.catalogue.limits[state.model]
        name = trigger.rpartition("-")[0] or trigger
        if trigger == "jump" and kind != "lens" and _whole(given) is not None and 0 <= given <= MAX_INSTANCE:
            return state.visit(state.split, int(given)).change(shown=False, donor="").search()
        if trigger == "text" and kind == "lens" and isinstance(given, str) and given.strip():
            return state.link(text=" ".join(given.split())[:MAX_TEXT], query=START_PAIR[0], key=START_PAIR[1])
        point = _first_point(given)
        if (
            name == "sheet"
            and (key := _whole(point.get("x"))) is not None
            and 0 <= key < max(limits.length, 512 * (kind == "lens"))
        ):
            return state.link(key=key)
        if name == "surface" and state.model in self.catalogue.models:
            model = self.catalogue.models[state.model]
            moved = model.view.moved(model, state, _share(point.get("x")), _share(point.get("y")))
            if moved is not None:
                return moved.search()
        row = _whole(point.get("customdata"))
        if name == "codes" and row is not None and row >= 0:
            if kind == "lens":
                length = len(self.catalogue.lenses[state.model].read(state.text).tokens)
                if row < length**2:
                    return state.link(query=row // length, key=row % length)
            elif row < MAX_INSTANCE:
                return state.visit(limits.split, row).search()
        raise PreventUpdate


def register(app: Dash, explorer: Explorer) -> None:
    """Connect the page to the explorer."""
    left = [("page", "className"), ("top", "children"), ("notices", "children"), ("stage-title", "children")]
    left += [("source", "children"), ("stage", "children"), ("patch", "children")]
    app.callback([Output(*each) for each in left], Input("url", "search"))(explorer.left)
    for slot in SLOTS:
        names = [("head", "children"), ("answer", "children"), ("pair-box", "children"), ("bars", "figure")]
        names += [("sheet", "figure"), ("around", "children"), ("codes", "figure"), ("near-box", "children")]
        names += [("network-note", "children"), ("network", "figure"), ("codes", "clickData"), ("sheet", "clickData")]
        names += [(f"{card}-title", "children") for card in ("answer", "code", "map", "network")]

        def right(search: Any, slot: int = slot) -> list[Any]:
            return explorer.right(search, slot)

        def surface(search: Any, slot: int = slot) -> list[Any]:
            return explorer.surface(search, slot)

        app.callback([Output(f"{name}-{slot}", part) for name, part in names], Input("url", "search"))(right)
        drawn = [("surface", "figure"), ("surface-note", "children"), ("surface", "clickData")]
        app.callback([Output(f"{name}-{slot}", part) for name, part in drawn], Input("url", "search"))(surface)

    clicks = [Input(f"{name}-{slot}", "clickData") for slot in SLOTS for name in CLICKABLE]

    @app.callback(
        Output("go", "search"),
        *clicks,
        Input("jump", "value"),
        Input("text", "value"),
        State("url", "search"),
        prevent_initial_call=True,
    )
    def go(*values: Any) -> Any:
        names = [f"{name}-{slot}" for slot in SLOTS for name in CLICKABLE] + ["jump", "text"]
        given = dict(zip(names, values[:-1], strict=True))
        trigger = ctx.triggered_id
        if not isinstance(trigger, str) or given.get(trigger) is None:
            return no_update
        return explorer.click(values[-1], trigger, given[trigger])


def _first_point(given: Any) -> dict[str, Any]:
    if isinstance(given, dict) and isinstance(given.get("points"), list) and given["points"]:
        point = given["points"][0]
        return point if isinstance(point, dict) else {}
    return {}


def _share(value: Any) -> float | None:
    """A number from 0 to 1; nothing else, not even true."""
    return float(value) if type(value) in (int, float) and 0 <= value <= 1 else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
