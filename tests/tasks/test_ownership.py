"""A task owns what is known about it: no other room names a task, and a new task needs one file and one entry."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headcode
from headcode.tasks import TASKS, Task

ROOT = Path(headcode.__file__).parent
FREE = ("tasks/", "experiments/", "presets.py")
"""Rooms that are about tasks."""
ALLOWED = {
    "bench/tasks.py": "measures the generators and solvers of these two tasks",
    "bench/peers.py": "measures training steps of other libraries at the sizes of these tasks",
    "bench/train.py": "measures the training step on these two tasks, for which goals were set",
    "cli/bench.py": "lm is the name of a bench",
    "explorer/puzzles.py": "the questions of one view, typed with the task that declares it",
    "explorer/functions.py": "the questions of one view, typed with the task that declares it",
}


def task_words(tree):
    """(line, word) of every task that the code names, by class or by word, and of every isinstance on a task."""
    classes = {cls.__name__ for cls in TASKS.values()}
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) if name in classes:
                yield node.lineno, name
            case ast.Constant(value=str(word)) if word in TASKS and id(node) not in docstrings:
                yield node.lineno, repr(word)
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id="task") | ast.Attribute(attr="task"), _]):
                yield node.lineno, "isinstance on a task"


def test_no_room_outside_tasks_names_a_task():
    named = {}
    for path in ROOT.rglob("*.py"):
        place = path.relative_to(ROOT).as_posix()
        if not place.startswith(FREE):
            named[place] = list(task_words(ast.parse(path.read_text(encoding="utf-8"))))
    found = {place: words for place, words in named.items() if words}
    assert len(named) > 100 and found.keys() == ALLOWED.keys(), {p: w for p, w in found.items() if p not in ALLOWED}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("from headcode.tasks import SRaven", ["SRaven"]),
        ("isinstance(run.task, tuple(KINDS))", ["isinstance on a task"]),
        ("x = tasks.FuzzyLogic if name == 'lm' else None", ["FuzzyLogic", "'lm'"]),
        ("def f():\n    'sraven'\n    return 'logic-small'", []),
    ],
)
def test_task_words_of_code_are_found(code, words):
    assert sorted(word for _, word in task_words(ast.parse(code))) == sorted(words)


def test_every_task_has_what_reports_need():
    for name, cls in TASKS.items():
        assert issubclass(cls, Task) and cls.name == name and cls.main_metric
        fields = set(cls.__dataclass_fields__)
        assert set(cls.flags) <= fields and set(cls.derived_fields) <= fields


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """A package with the task of docs/extend.md, found by its entry point; returns how to run a command beside it."""
    folder = tmp_path_factory.mktemp("plugin")
    page = (ROOT.parent / "docs" / "extend.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "class Lookup" in block)
    (folder / "lookup.py").write_text(code, encoding="utf-8")
    info = folder / "lookup-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lookup\nVersion: 1.0\n", encoding="utf-8")
    entry = re.search(r"^\[project\.entry-points\.\"(.+)\"\]\nlookup = \"(.+)\"$", page, re.M)
    (info / "entry_points.txt").write_text(f"[{entry[1]}]\nlookup = {entry[2]}\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT.parent)]), "OMP_NUM_THREADS": "1"}

    def run(*words, code=0):
        command = [sys.executable, *words] if words[0] == "-c" else [sys.executable, "-m", "headcode", *words]
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        assert ran.returncode == code, ran.stderr[-2000:]
        return ran.stdout if code == 0 else ran.stderr

    run.folder = folder
    return run


SMALL = ("--dim", "32", "--num-heads", "4", "--qk-dim", "16", "--v-dim", "16", "--mlp-dim", "32")

EXPLORE = """
from headcode.explorer.app import create_app
app, explorer = create_app(["run"])
left = str(explorer.left("?model=run&shown=1&donor=n-1"))
right = str(explorer.right("?model=run&shown=1&donor=n-1", 0))
assert "place" in left and "plus" in left and "The instance" in left, left
assert "patched" in right and "Nearest codes" in right, right
print(explorer.click("?model=run", "codes-0", {"points": [{"customdata": 3}]}))
"""


@pytest.mark.slow
def test_the_task_of_the_docs_trains_evaluates_reports_sweeps_decodes_and_explores(plugin):
    out = plugin("train", "lookup", *SMALL, "--steps", "400", "--eval-every", "0", "--eval-size", "256", "--out", "run")
    accuracy = float(re.search(r"iid +loss [\d.]+ +accuracy ([\d.]+)", out)[1])
    assert accuracy > 0.9
    assert f'"accuracy": {accuracy}' in plugin("eval", "run", "--split", "iid", "--size", "256", "--json")
    assert "lookup" in plugin("train", "--help") and "--num-places" in plugin("train", "lookup", "--help")
    assert "place" in plugin("puzzle", "lookup", "--answer", "--num-places", "3")

    plugin("decode", "run", "--size", "128", "--out", "run/analysis", "--json")
    decoded = json.loads((plugin.folder / "run/analysis/decode.json").read_text())
    assert decoded["card"]["task"] == "lookup"
    rows = [row for row in decoded["rows"] if row["subset"] == "all"]
    assert {row["source"] for row in rows} == {"codes", "residual", "untrained", "shuffled", "position"}
    assert all(row["instances"] == 128 and 0 <= row["macro_f1"] <= 1 for row in rows)
    assert "names no pairs of instances" in plugin("decode", "run", "--patch", code=2)

    plugin("report", "run", "--out", "report.html")
    page = (plugin.folder / "report.html").read_text(encoding="utf-8")
    assert "accuracy" in page and "best possible" in page and "macro_f1" in page

    values = ("method=softmax,hyla", "steps=5", "eval_size=32")
    plugin("sweep", "lookup", *(word for value in values for word in ("--set", value)), "--out", "many")
    assert len((plugin.folder / "many" / "results.csv").read_text().splitlines()) == 3


@pytest.mark.slow
def test_the_task_of_the_docs_is_shown_by_the_plain_view(plugin):
    pytest.importorskip("dash", reason="the explorer needs headcode[explorer]")
    if not (plugin.folder / "run").exists():
        plugin("train", "lookup", *SMALL, "--steps", "20", "--eval-size", "0", "--out", "run")
    assert "n=3" in plugin("-c", EXPLORE)


@pytest.mark.slow
def test_a_broken_package_takes_no_task_away(plugin):
    info = plugin.folder / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[headcode.tasks]\nbroken = nowhere:Task\n", encoding="utf-8")
    names = plugin("-c", "from headcode.tasks import TASKS; print(list(TASKS))")
    assert "'lookup'" in names and "broken" not in names
