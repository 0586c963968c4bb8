"""Every Python block of the README and the docs runs, and so does every example in a docstring."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import headcode

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [
    page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if BLOCK.search(page.read_text())
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in BLOCK.findall(page.read_text()):
        exec(compile(block, str(page), "exec"), names)


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
