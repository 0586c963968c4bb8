"""A running explorer, a browser that can reach nothing else, and what a page says."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

CHROMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclasses.dataclass(frozen=True)
class Live:
    """A running explorer."""

    address: str
    printed: str
    """The address with the token, which sets the cookie; the plain one where no token is asked for."""

    @property
    def cookie(self) -> str:
        """The header that a browser sends once it has opened the printed address."""
        return f"headcode-explorer-{self.address.rpartition(':')[2]}={self.printed.rpartition('=')[2]}"


@contextmanager
def running(*arguments: str) -> Iterator[Live]:
    """`headcode explore` as a process of its own."""
    command = [sys.executable, "-m", "headcode", "explore", *arguments, "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            found = re.search(r"(http://127\.0\.0\.1:\d+)/\S*", line)
            assert found is not None, f"the explorer did not start: {line!r}"
            yield Live(found[1], found[0])
            assert server.poll() is None, "the explorer died"
        finally:
            server.terminate()


def browser_paths() -> tuple[str, str] | None:
    """Chromium and its driver, if they are installed."""
    chrome = next((path for name in CHROMES if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    return (chrome, driver) if chrome and driver else None


def open_browser(width: int = 1400, height: int = 900, dark: bool = False):
    """Headless Chromium for which no name but 127.0.0.1 exists."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    paths = browser_paths()
    assert paths is not None
    options = webdriver.ChromeOptions()
    options.binary_location = paths[0]
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--disable-background-networking",
        "--disable-component-update",
        f"--window-size={width},{height}",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(paths[1]))
    show_as(browser, width, height, dark)
    return browser


def show_as(browser, width: int, height: int, dark: bool) -> None:
    """The size of the window, and whether its owner likes the dark."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def requested(browser) -> list[str]:
    """The addresses of all requests since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return [each["request"]["url"] for each in sent]


def complaints(browser) -> list[str]:
    """What the console said: scripts' errors, refused resources, breaches of the content policy."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def requests_of(live):
    """The page's callbacks on an address, as its browser would send them."""
    request = urllib.request.Request(live.address + "/_dash-dependencies", headers={"Cookie": live.cookie})
    with urllib.request.urlopen(request, timeout=120) as answer:
        known = json.load(answer)
    found = []
    for each in known:
        if [given["id"] for given in each["inputs"]] != ["url"]:
            continue
        names = each["output"].strip(".").split("...")
        outputs = [dict(zip(("id", "property"), name.rsplit(".", 1), strict=True)) for name in names]
        found.append({"output": each["output"], "outputs": outputs, "changedPropIds": ["url.search"]})
    return found


def ask(live, body, timeout=120):
    """What the server answers to a callback's request; None where there is nothing to change."""
    request = urllib.request.Request(
        live.address + "/_dash-update-component",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Origin": live.address, "Cookie": live.cookie},
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        assert answer.status in (200, 204)
        text = answer.read()
    return json.loads(text)["response"] if text else None


def warm(live, models):
    """Look at every model once: on a machine that never ran it, kernels compile first, for minutes."""
    for model in models:
        for body in requests_of(live):
            search = f"?model={model}&shown=1&donor=n-1"
            ask(live, {**body, "inputs": [{"id": "url", "property": "search", "value": search}]}, timeout=900)


def words_of(piece):
    """All text in components, as one string."""
    if isinstance(piece, str):
        return piece
    if isinstance(piece, list | tuple):
        return " ".join(map(words_of, piece))
    return words_of(getattr(piece, "children", None) or "")
