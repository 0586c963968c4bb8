"""The quickstart notebook runs from top to bottom, as Jupyter would run it, and is kept without outputs."""

import json
import os
import subprocess
import sys

from tests.support import ROOT

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def test_the_notebook_runs(tmp_path):
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 6 and all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")
    script = tmp_path / "notebook.py"
    script.write_text("\n\n".join(code), encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    difference = float(ran.stdout.split("largest difference: ")[1].split()[0])
    assert difference < 1e-12 and "zoo/sraven-4-hyla, of 64 puzzles right" in ran.stdout and "60 " in ran.stdout
