"""Planted modules: nothing of theirs is run."""

import os
import subprocess
import sys

from headcode.processes import safe_python


def test_no_module_comes_from_the_working_folder(tmp_path):
    """`python -m` would import every one of these; ours gets the arguments and the search path of the user, no more."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "trusted.py").write_text("import sys, json; print(sys.argv[1:], __name__, sys.path[0])")
    for name in ("json", "runpy", "trusted", "torch"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'planted')!r}, 'w')")
    run = subprocess.run(
        [*safe_python(), "-u", "-m", "trusted", "-m", "7"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "elsewhere")},
        capture_output=True,
        text=True,
    )
    assert run.stderr == ""
    assert run.stdout == f"['-m', '7'] __main__ {tmp_path / 'elsewhere'}\n"
    assert not (tmp_path / "planted").exists()
    # The trap works: Python's own -m falls into it.
    subprocess.run([sys.executable, "-m", "json"], cwd=tmp_path, capture_output=True)
    assert (tmp_path / "planted").exists()
