"""README and docs hold: every block runs or says why not, every link leads somewhere, every docstring is right."""

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headcode
from tests.support import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/results").glob("*.md"))]
# A block, with the reason that may stand in a comment on the line before it.
BLOCK = re.compile(r"^(?:<!-- not run: (?P<reason>.+?) -->\n)?```(?P<kind>\w+)[^\n]*\n(?P<code>.*?)^```", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def blocks(page, *kinds):
    """The blocks of a page of these kinds that are to be run."""
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [block["code"] for block in found if block["kind"] in kinds and not block["reason"]]


def identify(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=identify)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "sh", "bash")], ids=identify)
def test_commands_run(page, tmp_path):
    """In an empty folder, one block after the other, as a reader would."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for block in blocks(page, "sh", "bash"):
        ran = subprocess.run(
            ["bash", "-e", "-c", block],
            cwd=tmp_path,
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "2"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert ran.returncode == 0, f"{block}\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"


def test_blocks_that_do_not_run_say_why(capsys):
    reasons = [
        f"{identify(page)}: {block['reason']}"
        for page in PAGES
        for block in BLOCK.finditer(page.read_text(encoding="utf-8"))
        if block["reason"]
    ]
    total = sum(len(blocks(page, "python", "sh", "bash")) for page in PAGES)
    with capsys.disabled():
        print(f"\n{total} blocks of the docs are run, {len(reasons)} are not:", *sorted(reasons), sep="\n  ")
    assert total > 20


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_no_block_escapes_the_tests(page):
    """An indented fence, or one of a kind that nobody runs, would be passed over in silence, and so would a reason that
    does not stand right above its block."""
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^[ \t]*(?:```|~~~)", text, re.M)
    assert all(fence == "```" for fence in fences) and len(fences) % 2 == 0
    for block in re.split(r"^```", text, flags=re.M)[1::2]:
        kind, _, code = block.partition("\n")
        assert kind in ("python", "sh", "bash", "text", ""), f"blocks of kind {kind} are not run"
        if kind in ("text", ""):
            assert not re.search(r"^(?:\$ )?(?:headcode|python|pip|make) ", code, re.M), f"not run: {code}"
    assert text.count("<!-- not run: ") == sum(bool(block["reason"]) for block in BLOCK.finditer(text))


def test_every_command_is_told():
    from headcode.cli import COMMANDS

    told = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    listed = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("- Commands ", 1)[1]
    for name in COMMANDS:
        assert f"headcode {name}" in told, f"no page tells of headcode {name}"
        assert f"`{name}`" in listed, f"the changelog misses {name}"


# Held-out scores × 100 of the paper's Table A1 that the page's first table sets beside ours, as reported.
TABLE_A1 = {"hyla": "0.811", "linear": "0.599", "softmax": "0.633", "linear_rms": "0.689", "without": "0.845"}


def test_the_results_page_tells_the_paper_as_reported():
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    glance = text.split("## At a glance")[1].split("\n## ")[0]
    assert all(number in glance for number in TABLE_A1.values())
    assert "no claim of the paper" in glance and "terms that training never had" in glance
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "results").glob("*.md")]
    assert len(pages) >= 16
    for page in (text, *pages):
        assert "paper's eight methods" not in page and "lead one to expect" not in page and "cannot tell" not in page


def test_a_cost_beside_torch_has_a_shape():
    """HYLA is faster than torch's softmax attention at narrow heads and slower at wide ones."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    sentences = [s for s in re.split(r"(?<=[.!])\s", text) if "torch's softmax" in s.replace("\n", " ")]
    assert sentences and all(re.search(r"\d+ heads of \d+ channels", s.replace("\n", " ")) for s in sentences)


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in LINK.findall(text):
        if target.startswith(("https://", "http://")):
            continue
        file, _, anchor = target.partition("#")
        found = page if not file else page.parent / file
        assert found.exists(), f"{identify(page)} links to {target}"
        if anchor and found.suffix == ".md":
            assert anchor in headings(found.read_text(encoding="utf-8")), f"{identify(page)} links to {target}"


def headings(text):
    """The anchors that a page's headings get."""
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="the site needs the extra headcode[docs]")
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0 and "WARNING" not in ran.stderr, ran.stderr[-3000:]
    site = tmp_path / "site"
    pages = list(site.glob("*.html"))
    assert len(pages) > 10
    for page in pages:
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|link|img|iframe)[^>]*?(?:src|href)="(https?:[^"]+)"', text)
        assert not fetched, f"{page.name} fetches {fetched[0]}"
        for target in re.findall(r'href="([^"#:]+)(?:#[^"]*)?"', text):
            # 404.html is shown at any address, so its links start at the site's root.
            reached = site / target.lstrip("/") if target.startswith("/") else page.parent / target
            assert reached.exists(), f"{page.name} links to {target}"


# Importing these would run a program.
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(headcode.__path__, "headcode.")
    if not module.name.startswith(("headcode.__main__", "headcode.cli"))
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    import torch

    result = doctest.testmod(importlib.import_module(name), extraglobs={"torch": torch})
    assert result.failed == 0
