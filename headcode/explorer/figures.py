"""The plots, as plain dictionaries for plotly; colours of text and lines come from the page's style sheet."""

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

Figure = dict[str, Any]

BLUE, ORANGE, GREEN, GREY, PINK = "#2f7fd1", "#d9691e", "#2a9d5c", "#98a1b0", "#e0245e"
RULE_COLOURS = ("#8a93a3", "#2f7fd1", "#6bb7f0", "#d9691e", "#f2a35e", "#2a9d5c", "#b455b6", "#c7a500")
SIGNED = [[0.0, "#b4531a"], [0.25, "#eba876"], [0.5, "#f7f7f5"], [0.75, "#7fb3e0"], [1.0, "#1f5f9e"]]
HEIGHT = [[0.0, "#1d2e5c"], [0.35, "#2f7fa8"], [0.65, "#5cc0a0"], [1.0, "#f6e27a"]]
HEIGHTS = {"bars": 180, "sheet": 200, "codes": 360, "network": 280, "surface": 260}
FONT = {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif", "size": 12, "color": GREY}


def _figure(data: list[dict[str, Any]], height: int, revision: str = "", **layout: Any) -> Figure:
    plain = {
        "height": height,
        "margin": {"l": 40, "r": 8, "t": 8, "b": 32},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": FONT,
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": False,
        "uirevision": revision,
        "hoverlabel": {"font": {"family": FONT["family"], "size": 12}},
    }
    return {"data": data, "layout": {**plain, **layout}}


def empty(height: int, words: str = "") -> Figure:
    """No data: a sentence in the middle."""
    nothing = {"visible": False, "fixedrange": True}
    return _figure([], height, annotations=[_note(words, 0.5, 0.5)] if words else [], xaxis=nothing, yaxis=nothing)


def _text(words: Sequence[str]) -> list[str]:
    """Words as labels that show them as they are: plotly takes tags and entities in labels for markup."""
    return [html.escape(word, quote=False) for word in words]


def _axis(**more: Any) -> dict[str, Any]:
    return {"fixedrange": True, "zeroline": False, "showgrid": False, "ticks": "", "automargin": False, **more}


def _note(words: str, x: float, y: float, **more: Any) -> dict[str, Any]:
    """Words at a place of the whole figure, from 0 to 1."""
    return {"text": words, "showarrow": False, "x": x, "y": y, "xref": "paper", "yref": "paper", **more}


def _markers(x: Any, y: Any, marker: dict[str, Any], hover: str, **more: Any) -> dict[str, Any]:
    trace = {"type": "scatter", "mode": "markers", "x": _round(x), "y": _round(y), "marker": marker}
    return {**trace, "hovertemplate": f"{hover}<extra></extra>", **more}


def _star(colour: str, size: int, symbol: str = "star") -> dict[str, Any]:
    return {"size": size, "symbol": symbol, "color": colour, "line": {"width": 1.5, "color": "#ffffff"}}


def _heatmap(matrix: np.ndarray, hover: str, digits: int = 3, **more: Any) -> dict[str, Any]:
    """A matrix in colours of both signs, unless `more` says otherwise."""
    limit = float(np.abs(matrix).max()) or 1.0
    colours = {"colorscale": SIGNED, "zmin": -limit, "zmax": limit, "colorbar": _bar()}
    trace = {"type": "heatmap", "z": [_round(row, digits) for row in matrix], **colours}
    return {**trace, "hovertemplate": f"{hover}<extra></extra>", **more}


def _bar(title: str = "", bottom: float = 0.0, top: float = 1.0) -> dict[str, Any]:
    """A colour bar beside the part of a figure from `bottom` to `top`."""
    place = {"y": (bottom + top) / 2, "len": top - bottom, "lenmode": "fraction", "ypad": 0, "xpad": 4}
    return {"title": {"text": title, "side": "right"}, "thickness": 9, "outlinewidth": 0, "nticks": 5, **place}


def code_bars(code: np.ndarray, donor: np.ndarray | None) -> Figure:
    """The code, one bar a head; a donor's code as rings."""
    heads = list(range(len(code)))
    bars = {
        "type": "bar",
        "x": heads,
        "y": _round(code),
        "marker": {"color": [BLUE if z >= 0 else ORANGE for z in code]},
        "hovertemplate": "head %{x}: %{y:.3f}<extra></extra>",
    }
    data: list[dict[str, Any]] = [bars]
    if donor is not None:
        ring = {"symbol": "circle-open", "size": 9, "color": GREEN, "line": {"width": 2}}
        data.append(_markers(heads, donor, ring, "donor, head %{x}: %{y:.3f}"))
    every = 1 if len(heads) <= 16 else -(-len(heads) // 12)
    return _figure(
        data,
        HEIGHTS["bars"],
        xaxis=_axis(title={"text": "head", "standoff": 4}, dtick=every, tick0=0, range=[-0.6, len(heads) - 0.4]),
        yaxis=_axis(showgrid=True, zeroline=True, nticks=5),
        bargap=0.25,
    )


def code_sheet(codes: np.ndarray, names: Sequence[str], key: int, tokens: Sequence[str] = ()) -> Figure:
    """The codes of one query to all keys, (H, key): a column is a code; the chosen key is framed. Tokens that are words
    stand under their columns, as many as there is room for."""
    places: Figure = {"x": list(range(codes.shape[1])), "y": list(range(len(codes)))}
    words = [_text(names) for _ in codes]
    sheet = _heatmap(codes, "%{customdata}<br>head %{y}: %{z:.3f}", customdata=words, **places)
    frame = {
        "type": "rect",
        "x0": key - 0.5,
        "x1": key + 0.5,
        "y0": -0.5,
        "y1": len(codes) - 0.5,
        "line": {"color": ORANGE, "width": 2.5},
    }
    across = _axis(title={"text": "key (click one)", "standoff": 4}, nticks=10)
    if tokens:
        every = -(-len(tokens) // 16)
        shown = list(range(0, len(tokens), every))
        short = [tokens[k] if len(tokens[k]) <= 9 else tokens[k][:8] + "…" for k in shown]
        across |= {
            "tickvals": shown,
            "ticktext": _text(short),
            "tickangle": -50,
            "automargin": True,
            "tickfont": {"size": 11},
        }
    return _figure(
        [sheet],
        HEIGHTS["sheet"],
        xaxis=across,
        yaxis=_axis(title={"text": "head", "standoff": 2}, nticks=5, autorange="reversed"),
        shapes=[frame],
    )


def map_of_codes(
    points: np.ndarray,
    groups: Sequence[tuple[str, str, np.ndarray]],
    words: Sequence[str],
    shares: tuple[float, float],
    here: np.ndarray | None,
    donor: np.ndarray | None,
) -> Figure:
    """Points (N, 2) in named, coloured groups (name, colour, rows); a star is the code that is looked at."""
    data: list[dict[str, Any]] = []
    for name, colour, rows in groups:
        dot = {"size": 8, "color": colour, "opacity": 0.85, "line": {"width": 0.5, "color": "#ffffff"}}
        labels = _text([words[row] for row in rows])
        x, y = points[rows, 0], points[rows, 1]
        data.append(_markers(x, y, dot, "%{text}", name=name, text=labels, customdata=rows.tolist()))
    for place, name, colour, symbol in ((donor, "donor", GREEN, "diamond"), (here, "this code", PINK, "star")):
        if place is not None:
            data.append(_markers(place[:1], place[1:], _star(colour, 18, symbol), name, name=name))
    titles = [f"direction {i + 1} ({share:.0%} of the variance)" for i, share in enumerate(shares)]
    return _figure(
        data,
        HEIGHTS["codes"],
        showlegend=len(data) <= 12,
        legend={
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "itemclick": False,
            "itemsizing": "constant",
        },
        margin={"l": 28, "r": 8, "t": 64, "b": 28},
        xaxis=_axis(title={"text": titles[0], "standoff": 6}, showticklabels=False, zeroline=True),
        yaxis=_axis(title={"text": titles[1], "standoff": 6}, showticklabels=False, zeroline=True),
    )


def shaded_map(
    points: np.ndarray,
    values: np.ndarray,
    title: str,
    words: Sequence[str],
    shares: tuple[float, float],
    here: np.ndarray | None,
    donor: np.ndarray | None,
) -> Figure:
    """A map whose points are coloured by a number from 0 to 1."""
    figure = map_of_codes(points, [("", GREY, np.arange(len(points)))], words, shares, here, donor)
    figure["data"][0]["marker"] |= {
        "color": _round(values),
        "colorscale": HEIGHT,
        "cmin": 0,
        "cmax": 1,
        "showscale": True,
        "colorbar": _bar(title),
    }
    figure["data"][0]["showlegend"] = False
    figure["layout"] |= {"showlegend": True, "margin": {"l": 28, "r": 8, "t": 36, "b": 28}}
    return figure


def networks(weights: Sequence[np.ndarray], step: int = 1) -> Figure:
    """The generated weights: one matrix, or the layers above each other, outputs and inputs along the width.

    A pixel stands for `step` × `step` weights.
    """
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {}
    several = len(weights) > 1
    shown = [*weights[:-1], weights[-1].T] if several else [weights[0]]
    domains = [(0.0, 1.0)]
    if several:
        domains = [(0.56, 0.94), (0.0, 0.38)] if len(shown) == 2 else [(0.72, 0.94), (0.36, 0.58), (0.0, 0.22)]
    titles = ["W₁: the key's token → hidden units", "W₂: hidden units → the output"]
    hovers = ["input %{x}, hidden %{y}", "hidden %{y}, output %{x}"]
    if len(shown) == 3:
        titles[1:] = ["W₂: hidden units → hidden units", "W₃: hidden units → the output"]
        hovers[1:1] = ["hidden %{x}, next hidden %{y}"]
    for index, matrix in enumerate(shown):
        suffix = "" if index == 0 else str(index + 1)
        hover = hovers[index] if several else "input %{x}, output %{y}"
        axes = {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
        bar = _bar("", *domains[index])
        data.append(_heatmap(matrix, hover + ": %{z:.3f}", 4, dx=step, dy=step, colorbar=bar, **axes))
        layout[f"xaxis{suffix}"] = _axis(anchor=f"y{suffix}", nticks=9, showticklabels=index == len(shown) - 1)
        ticks = {"dtick": 1} if len(matrix) <= 8 else {"nticks": 5}
        layout[f"yaxis{suffix}"] = _axis(domain=domains[index], autorange="reversed", anchor=f"x{suffix}", **ticks)
    if several:
        layout["annotations"] = [
            _note(title, 0, top + 0.01, yanchor="bottom") for title, (_, top) in zip(titles, domains, strict=True)
        ]
    else:
        layout["xaxis"]["title"] = {"text": "from the key's token", "standoff": 4}
        layout["yaxis"]["title"] = {"text": "to the output", "standoff": 2}
    return _figure(data, HEIGHTS["network"], **layout)


def surfaces(
    pictures: Sequence[tuple[str, np.ndarray, np.ndarray]],
    names: tuple[str, str],
    points: np.ndarray,
    levels: np.ndarray,
    hidden: tuple[float, float],
) -> Figure:
    """Functions (title, places, values) over two variables side by side, with the context's points and the hidden one
    as a star; a click moves it."""
    top = max(float(values.max()) for _, _, values in pictures)
    scale = {"colorscale": HEIGHT, "cmin": 0, "cmax": max(top, float(levels.max()))}
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"annotations": []}
    for index, (title, places, values) in enumerate(pictures):
        suffix = "" if index == 0 else str(index + 1)
        axes = {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
        colours: Figure = {"colorscale": HEIGHT, "zmin": 0, "zmax": scale["cmax"], "zsmooth": "best"}
        colours |= {"showscale": index == len(pictures) - 1, "colorbar": _bar("f")}  # one bar: the pictures share it
        square: Figure = {"x": _round(places), "y": _round(places)}
        ground = _heatmap(values, "%{x:.2f}, %{y:.2f}: %{z:.3f}", **square, **colours)
        dot = {"size": 6, "color": _round(levels), **scale, "line": {"width": 1, "color": "#ffffff"}}
        context = _markers(points[:, 0], points[:, 1], dot, "context point, f = %{text}", text=_round(levels))
        target = _markers(hidden[:1], hidden[1:], _star(PINK, 17), "the hidden point")
        data += [{**each, **axes} for each in (ground, context, target)]
        domain = [0, 0.47] if index == 0 else [0.53, 1]
        layout[f"xaxis{suffix}"] = _axis(
            title={"text": names[0], "standoff": 4}, range=[0, 1], dtick=0.5, domain=domain, anchor=f"y{suffix}"
        )
        layout[f"yaxis{suffix}"] = _axis(
            title={"text": names[1] if index == 0 else "", "standoff": 4},
            range=[0, 1],
            dtick=0.5,
            anchor=f"x{suffix}",
            showticklabels=index == 0,
        )
        layout["annotations"].append(_note(title, domain[0], 1.02, xanchor="left", yanchor="bottom"))
    return _figure(data, HEIGHTS["surface"], margin={"l": 40, "r": 8, "t": 26, "b": 34}, **layout)


def _round(values: Any, digits: int = 3) -> list[float]:
    return [round(float(value), digits) for value in values]
