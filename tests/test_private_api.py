"""Names that torch does not promise to keep stand in one file, which says with which version it was tested."""

import re
from pathlib import Path

import headcode
from headcode import private_api

PRIVATE = re.compile(r"\b(torch|aten|forward_ad)(\.\w+)*\._[a-z]\w*|\bfrom torch[\w.]*\._\w+ import|\._init_fn\b")


def test_private_names_of_torch_are_used_in_one_file_alone():
    root = Path(headcode.__file__).parent
    found = {path.name for path in root.rglob("*.py") if PRIVATE.search(path.read_text(encoding="utf-8"))}
    assert found == {"private_api.py"}


def test_the_version_they_were_tested_with_is_that_of_the_constraints():
    constraints = (Path(__file__).parents[1] / "constraints.txt").read_text(encoding="utf-8")
    tested = re.search(r"^torch==(\S+)", constraints, re.MULTILINE)[1]
    assert f"torch {tested}" in private_api.__doc__
