"""The quickstart notebook runs from top to bottom, as Jupyter would run it, and what it keeps is what it gave."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.support import ROOT

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]
PRINTED = "".join("".join(o.get("text", "")) for cell in CODE for o in cell["outputs"] if o.get("name") == "stdout")


def run(code, folder):
    script = folder / "notebook.py"
    script.write_text(code, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, script.name],
        cwd=folder,
        env={**os.environ, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def test_every_cell_was_run_once_and_in_order():
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1)) and len(CODE) >= 10
    kinds = [output["output_type"] for cell in CODE for output in cell["outputs"]]
    assert "error" not in kinds
    pictures = [o for cell in CODE for o in cell["outputs"] if "image/png" in o.get("data", {})]
    assert len(pictures) == 3, "codes, puzzle, curves"
    assert not re.search(r"/(?:home|root|tmp|usr|opt)/", NOTEBOOK.read_text(encoding="utf-8")), "a path of a machine"
    assert NOTEBOOK.stat().st_size < 400_000


def test_the_kept_outputs_say_what_the_text_promises():
    differences = [float(number) for number in re.findall(r"largest difference: (\S+)", PRINTED)]
    assert len(differences) == 2 and max(differences) < 1e-12
    scores = dict(re.findall(r"^(hyla|softmax): R² on held-out combinations after \d+ steps: (\S+)$", PRINTED, re.M))
    assert min(map(float, scores.values())) > 0.2 and set(scores) == {"hyla", "softmax"}
    assert re.search(r"HYLA .* of 64 puzzles right: 0\.\d\d, best possible 0\.\d\d", PRINTED)
    exercises = [cell for cell in CELLS if re.match(r"# Answer \d", "".join(cell["source"]))]
    assert [bool(cell["outputs"]) for cell in exercises] == [True] * 3


def test_it_runs_with_a_short_training(tmp_path):
    code = "\n\n".join("".join(cell["source"]) for cell in CODE)
    assert code.count("STEPS = 1200\n") == 1
    printed = run(code.replace("STEPS = 1200\n", "STEPS = 16\n"), tmp_path)
    # All but the training gives what is kept, up to the last digits.
    for line in PRINTED.splitlines():
        if "R² on" not in line and "largest difference" not in line:
            assert line in printed, line


@pytest.mark.slow
def test_it_learns_as_its_outputs_say(tmp_path):
    printed = run("\n\n".join("".join(cell["source"]) for cell in CODE), tmp_path)
    kept, now = (re.findall(r"after \d+ steps: (\S+)", words) for words in (PRINTED, printed))
    assert [float(score) for score in now] == pytest.approx([float(score) for score in kept], abs=0.1)
