"""The API page has every public name, and every entry of it exists."""

import importlib
import re
from typing import Any

import pytest

from tests.support import ROOT

ROOMS = (
    "headcode",
    "headcode.ops",
    "headcode.nn",
    "headcode.tasks",
    "headcode.train",
    "headcode.sweep",
    "headcode.analysis",
    "headcode.analysis.lens",
    "headcode.zoo",
    "headcode.experiments",
    "headcode.interop",
)
ENTRY = re.compile(r"^::: ([\w.]+)(?:\n    options: \{members: (?:\[([^\]]*)\]|false)\})?$", re.M)
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def resolve(path: str) -> Any:
    """What an entry is about: a module, or something in one."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        try:
            for name in parts[count:]:
                found = getattr(found, name)
        except AttributeError:
            continue
        return found
    raise LookupError(path)


def entries() -> dict[str, list[str]]:
    return {path: [m.strip() for m in members.split(",") if m.strip()] for path, members in ENTRY.findall(PAGE)}


def test_every_line_that_begins_an_entry_is_read_by_this_test():
    assert len(entries()) == PAGE.count("\n::: ") > 100
    assert PAGE.count("options:") == sum(bool(members) for members in entries().values()) + PAGE.count("members: false")


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_is_on_the_page(room):
    if room == "headcode.interop":
        pytest.importorskip("transformers")
    told = {path.rpartition(".")[2] for path in entries()} | {m for ms in entries().values() for m in ms}
    modules = {path.split(".")[-2] for path in entries()}  # headcode.tasks.oracle is told by what it has
    public = [name for name in importlib.import_module(room).__all__ if not name.startswith("_")]
    assert public
    assert [name for name in public if name not in told | modules] == []


def test_every_entry_exists():
    pytest.importorskip("transformers")
    for path, members in entries().items():
        found = resolve(path)
        assert all(hasattr(found, name) for name in members), path
