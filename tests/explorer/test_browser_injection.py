"""Hostile names, tokens and sentences in a real browser: they are read as they are written, and nothing runs."""

from urllib.parse import urlencode

import pytest

pytest.importorskip("selenium", reason="the browser tests need selenium (pip install -e '.[dev]')")
pytest.importorskip("transformers", reason="the lens needs headcode[hf]")

from selenium.webdriver.common.action_chains import ActionChains

from tests.support import hostile_names
from tests.support.browser import MARKS, all_of, choose, find, settled, text, until
from tests.support.live import complaints, open_browser, requested, running

pytestmark = MARKS

MADE = """
return [...document.querySelectorAll("#page script, #page iframe, #page object, #page svg a, #page b b, #page s")]
  .concat([...document.querySelectorAll("#page img")].filter(i => !i.src.startsWith("data:image/svg+xml")))
  .concat([...document.querySelectorAll("#page a")].filter(a => !(a.getAttribute("href") || "?").startsWith("?")))
  .concat([...document.querySelectorAll("#page *")].filter(e => [...e.attributes].some(a => a.name.startsWith("on"))))
  .map(e => e.outerHTML.slice(0, 200));
"""
"""Elements and attributes that only markup in somebody's text could have made."""


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    with running(
        *hostile_names.runs(folder), "--lens", hostile_names.lens(folder), "--text", hostile_names.TEXT
    ) as found:
        yield found


@pytest.fixture
def browser(live):
    browser = open_browser()
    try:
        browser.get(live.printed)
        requested(browser), complaints(browser)
        yield browser
        assert browser.execute_script("return window.hacked") is None
        assert browser.execute_script(MADE) == []
        assert complaints(browser) == []
        assert [url for url in requested(browser) if not url.startswith((live.address + "/", "data:", "blob:"))] == []
    finally:
        browser.quit()


def test_tokens_are_read_as_they_are(browser, live):
    browser.get(f"{live.address}/?{urlencode({'model': 'lens/' + hostile_names.LENS})}")
    settled(browser)
    assert [token.text for token in all_of(browser, ".sentence .token")] == hostile_names.TOKENS
    ticks = [token if len(token) <= 9 else token[:8] + "…" for token in hostile_names.TOKENS]
    assert [tick.text for tick in all_of(browser, "#sheet-0 .xtick text")] == ticks
    assert text(browser, "#head-0 .model-name") == "lens/" + hostile_names.LENS
    # The name of the token under the pointer stands in a box beside it.
    sheet = find(browser, "#sheet-0 .drag.nsewdrag")
    find(browser, "#sheet-0").location_once_scrolled_into_view  # noqa: B018
    width = sheet.size["width"]
    for place in (1, 4):
        offset = round(width * ((place + 0.5) / len(hostile_names.TOKENS) - 0.5))
        ActionChains(browser).move_to_element_with_offset(sheet, offset, 0).perform()
        name = f"{place} {hostile_names.TOKENS[place]}"
        until(browser, lambda name=name: name in text(browser, "#sheet-0 .hoverlayer"), f"{name} was not shown")
        assert browser.execute_script(MADE) == []


def test_names_of_folders_are_read_as_they_are_and_lead_to_their_models(browser, live):
    words = {"model": hostile_names.FOLDERS[0], "shown": 1, "<img src=x onerror=window.hacked=1>": "</script>"}
    browser.get(f"{live.address}/?{urlencode(words)}")
    settled(browser)
    assert "<img src=x onerror=" in text(browser, "#notices")
    for name in hostile_names.FOLDERS[1:3]:
        choose(browser, "choose-model", name)
        until(browser, lambda name=name: text(browser, "#head-0 .model-name") == name, f"{name} was not opened")
    choose(browser, "choose-other", hostile_names.FOLDERS[0])
    until(browser, lambda: text(browser, "#head-1 .model-name") == hostile_names.FOLDERS[0])
    choose(browser, "choose-model", "lens/" + hostile_names.LENS)
    until(browser, lambda: len(all_of(browser, ".sentence .token")) == len(hostile_names.TOKENS))
    choose(browser, "choose-model", hostile_names.FOLDERS[1])
    until(browser, lambda: text(browser, "#head-0 .model-name") == hostile_names.FOLDERS[1])
