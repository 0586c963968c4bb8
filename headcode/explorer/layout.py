"""The page's frame: what stays while states come and go, so that plots are updated and not built anew."""

from typing import Any

from dash import dcc, html

from headcode.explorer.figures import HEIGHTS, empty
from headcode.explorer.parts import Piece
from headcode.explorer.state import MAX_INSTANCE, MAX_TEXT

SLOTS = (0, 1)
CONFIG: dict[str, Any] = {"displayModeBar": False, "responsive": True, "showTips": False, "doubleClick": False}


def page() -> Piece:
    return html.Div(
        [
            dcc.Location(id="url", refresh=False),
            # A second view of the same address: callbacks write here and read above, which is no circle.
            dcc.Location(id="go", refresh="callback-nav"),
            html.Header(
                [
                    html.Div(
                        [
                            html.H1("See a code decide"),
                            html.P(
                                "One query looks at one key. Their scores across the heads are a code; the code "
                                "configures a small network; the networks make the answer."
                            ),
                        ],
                        className="title",
                    ),
                    html.Div(id="top", className="top"),
                ]
            ),
            html.Div(id="notices", role="status"),
            html.Main([_question(), html.Div([_slot(slot) for slot in SLOTS], className="slots")]),
            html.Footer(
                "All of it runs on this machine. The address above is the whole state: copy it to share what you see."
            ),
        ],
        id="page",
        className="loading one",
    )


def _question() -> Piece:
    jump = dcc.Input(
        id="jump",
        type="number",
        min=0,
        max=MAX_INSTANCE,
        step=1,
        placeholder="go to number…",
        debounce=True,
        className="field jump",
    )
    text = dcc.Input(
        id="text",
        type="text",
        maxLength=MAX_TEXT,
        placeholder="type a sentence, press Enter",
        debounce=True,
        className="field text",
    )
    return html.Div(
        [
            html.Section(
                [
                    html.Div(id="stage-title"),
                    html.Div(id="source"),
                    html.Div([html.Span("", className="label"), jump], className="row jump-row"),
                    html.Div([text], className="text-row"),
                    html.Div(id="stage"),
                ],
                className="card stage",
            ),
            html.Section(id="patch", className="card patch"),
        ],
        className="question",
    )


def _slot(slot: int) -> Piece:
    def graph(name: str) -> Piece:
        height = HEIGHTS[name]
        style = {"height": f"{height}px"}
        return dcc.Graph(
            id=f"{name}-{slot}", figure=empty(height), config=CONFIG, className=f"graph {name}", style=style
        )

    def words(name: str, *classes: str) -> Piece:
        return html.Div(id=f"{name}-{slot}", className=" ".join((name, *classes)))

    surface = html.Div(
        [html.H3("The function: click to move the hidden point"), graph("surface"), words("surface-note")],
        className="surface-box",
    )
    answer = html.Section([words("answer-title"), words("answer"), surface], className="card answer-card")
    code = html.Section(
        [
            words("code-title"),
            words("pair-box"),
            graph("bars"),
            html.H3("The query's codes to all keys"),
            graph("sheet"),
        ],
        className="card code-card",
    )
    codes = html.Section(
        [
            words("map-title"),
            words("around"),
            graph("codes"),
            words("near-box"),
        ],
        className="card map-card",
    )
    network = html.Section(
        [words("network-title"), words("network-note", "explained"), graph("network")],
        className="card network-card",
    )
    stacks = [html.Div([answer, codes], className="stack"), html.Div([code, network], className="stack")]
    return html.Div(
        [words("head"), html.Div(stacks, className="cards")], id=f"slot-{slot}", className=f"slot slot-{slot}"
    )
