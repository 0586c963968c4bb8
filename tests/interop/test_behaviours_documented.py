"""The list of behaviours in docs/huggingface.md is that of the tests, and so are its counts."""

import ast
import re

from tests.support import ROOT

PAGE = ROOT / "docs" / "huggingface.md"


def functions(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [part.name for part in tree.body if isinstance(part, ast.FunctionDef) and part.name.startswith("test_")]


def test_the_page_lists_every_behaviour():
    done = [name for path in (ROOT / "tests/interop").glob("test_behaviours_of_*.py") for name in functions(path)]
    text = PAGE.read_text(encoding="utf-8")
    refused, listed = text.split("Refused:")[1].split("Done:")
    assert sorted(re.findall(r"^\|[^|]*\| `(\w+)` \|$", listed, re.M)) == sorted(name[5:] for name in done)
    num_refused = len(re.findall(r"^\| \w", refused, re.M)) - 1
    counts = f"Llama does {len(done) + num_refused} of them; ours do {len(done)} with each of the three methods"
    assert counts in text and f"refuse {num_refused} with one sentence each" in text
    assert len(done) >= 0.9 * (len(done) + num_refused)
    source = (ROOT / "tests/interop/test_behaviours_refused.py").read_text(encoding="utf-8")
    cases = re.findall(r'^    "([^"]+)": \($', source, re.M)
    assert cases == re.findall(r"^\| (\w[^|]*) \|", refused, re.M)[1:-1]
