"""Names of folders, tokens and sentences stay text, whatever they say: in components, in links, in plots' labels."""

import html
from urllib.parse import urlencode

import pytest
from dash.development.base_component import Component

from headcode.explorer.app import create_app, prepare
from tests.support import hostile_names
from tests.support.live import words_of

pytest.importorskip("transformers", reason="the lens needs headcode[hf]")
SHOWN = {"A", "B", "Details", "Div", "H2", "H3", "Img", "Li", "Ol", "P", "Span", "Summary", "Ul"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    return create_app(hostile_names.runs(folder), lens=hostile_names.lens(folder), text=hostile_names.TEXT)


@pytest.fixture(scope="module")
def attacked(made):
    return made[1]


def search(**words):
    return "?" + urlencode(words)


def pieces(given):
    """All components and all strings of plots."""
    if isinstance(given, list | tuple):
        for each in given:
            yield from pieces(each)
    elif isinstance(given, Component):
        yield given
        yield from pieces(getattr(given, "children", None))


def strings(figure):
    """All that plotly may show as text."""
    if isinstance(figure, dict):
        for value in figure.values():
            yield from strings(value)
    elif isinstance(figure, list | tuple):
        for value in figure:
            yield from strings(value)
    elif isinstance(figure, str):
        yield figure


def test_every_name_is_a_model_of_its_own_and_every_link_leads_to_one(attacked):
    names = attacked.catalogue.names
    assert names == [*hostile_names.FOLDERS, "lens/" + hostile_names.LENS]
    for name in names:
        parts = [*attacked.left(search(model=name, shown=1)), *attacked.right(search(model=name, shown=1), 0)]
        assert parts[2] == [], name  # no notice
        assert name in words_of(parts)
        links = [piece for piece in pieces(parts) if type(piece).__name__ == "A"]
        assert len(links) > 20
        for link in links:
            assert link.href.startswith("?") and not set(link.href) & set("<>\"' "), link.href
            state, notices = attacked.read(link.href)
            assert notices == [] and state.model in names
        menu = next(piece for piece in pieces(parts) if getattr(piece, "data-menu", "") == "choose-model")
        targets = {link.children: attacked.read(link.href)[0].model for link in menu.children[1].children}
        assert targets == {each: each for each in names}


def test_a_sentence_that_was_entered_comes_back_as_it_is(attacked):
    entered = "<b>b</b>|<s>|<img src=x onerror=window.hacked=1>"
    address = attacked.click(search(model="lens/" + hostile_names.LENS), "text", entered)
    assert not set(address) & set("<>\"' ")
    assert attacked.read(address)[0].text == entered
    stage = attacked.left(address)[5]
    assert [link.children for link in stage[1].children] == entered.split("|")


def test_the_models_are_prepared(attacked):
    prepare(attacked)
    assert set(attacked.atlases._made) == set(hostile_names.FOLDERS)


def test_components_are_plain_elements_with_text(attacked):
    for name in attacked.catalogue.names:
        for words in ({}, {"text": "<script>window.hacked=1</script>", "layer": "<b>", "</script>": "javascript:x"}):
            given = search(model=name, shown=1, **words)
            for piece in pieces([*attacked.left(given), *attacked.right(given, 0)]):
                assert piece._namespace == "dash_html_components" and type(piece).__name__ in SHOWN
                assert getattr(piece, "src", "data:image/svg+xml;base64,").startswith("data:image/svg+xml;base64,")


def test_labels_of_plots_show_tokens_as_they_are(attacked):
    """Plotly takes some tags and entities in labels for markup, <a href> among them: they come escaped."""
    figures = {
        part: figure for part, figure in enumerate(attacked.right(search(model="lens/" + hostile_names.LENS), 0))
    }
    sheet, codes = figures[4], figures[6]
    shown = [token if len(token) <= 9 else token[:8] + "…" for token in hostile_names.TOKENS]
    assert [html.unescape(label) for label in sheet["layout"]["xaxis"]["ticktext"]] == shown
    names = [f"{place} {token}" for place, token in enumerate(hostile_names.TOKENS)]
    assert [html.unescape(name) for name in sheet["data"][0]["customdata"][0]] == names
    pairs = {
        row: text for trace in codes["data"][:-1] for row, text in zip(trace["customdata"], trace["text"], strict=True)
    }
    for row, text in pairs.items():
        query, key = divmod(row, len(hostile_names.TOKENS))
        assert html.unescape(text) == f"{names[query]} → {names[key]}"
    own = {"%{customdata}<br>head %{y}: %{z:.3f}<extra></extra>"}
    for figure in (figures[3], sheet, codes, figures[9]):
        for text in strings(figure):
            assert "<" not in text.replace("<extra></extra>", "").replace("<br>", "") or text in own, text


def test_the_page_itself_says_nothing_of_the_address(made):
    client = made[0].server.test_client()
    for path in ("/?</script><script>window.hacked=1</script>", "/?model=<img src=x onerror=window.hacked=1>"):
        page = client.get(path, base_url="http://127.0.0.1:8050")
        assert page.status_code == 200 and "hacked" not in page.text
