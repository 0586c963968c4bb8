"""What the browser tests do on a page."""

from urllib.parse import parse_qs, urlsplit

import pytest
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.support.live import browser_paths

PATIENCE = 60
MARKS = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(
        browser_paths() is None,
        reason="no browser is installed: the end-to-end tests need chromium and chromedriver "
        "(Debian: apt-get install chromium chromium-driver)",
    ),
]


def until(browser, what, message=""):
    return WebDriverWait(browser, PATIENCE, ignored_exceptions=[StaleElementReferenceException]).until(
        lambda _: what(), message
    )


def find(browser, css):
    return browser.find_element(By.CSS_SELECTOR, css)


def all_of(browser, css):
    return browser.find_elements(By.CSS_SELECTOR, css)


def text(browser, css):
    return find(browser, css).text


def settled(browser):
    until(browser, lambda: "loading" not in find(browser, "#page").get_attribute("class"), "the page did not load")
    until(browser, lambda: text(browser, "#head-0"), "no model appeared")
    until(browser, lambda: all_of(browser, "#bars-0 .bars path, #bars-0 .points path"), "no bars were drawn")


def parameters(browser):
    return {name: values[0] for name, values in parse_qs(urlsplit(browser.current_url).query).items()}


def choose(browser, menu, words):
    """Open a menu and take an option."""
    find(browser, f".{menu} summary").click()
    options = all_of(browser, f".{menu} .options a")
    next(option for option in options if option.text == words).click()


def bars(browser, slot=0):
    return browser.execute_script(f"return document.querySelector('#bars-{slot} .js-plotly-plot').data[0].y")
