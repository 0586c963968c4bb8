"""Planted links, pipes and modules: nothing outside our folders is written, nothing waits, nothing of theirs is run."""

import os
import subprocess
import sys

import pytest

from headcode.safety import is_plain_name, open_regular, safe_python

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="links and pipes as on Unix")


@pytest.mark.parametrize("mode", ["wb", "ab", "a+", "r+"])
def test_only_regular_files_are_opened(tmp_path, mode):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "dangling", "pipe", "folder"):
        with pytest.raises(OSError, match=rf"{name} is not a regular file .*; remove it"):
            open_regular(tmp_path / name, mode)
    assert (tmp_path / "victim").read_text() == "mine" and not (tmp_path / "new").exists()


def test_regular_files_are_opened_as_ever(tmp_path):
    path = tmp_path / "file"
    for mode, content, expected in (("w", "long", "long"), ("w", "new", "new"), ("a", "er", "newer")):
        with open_regular(path, mode, encoding="utf-8") as file:
            file.write(content)
        assert path.read_text() == expected
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing", "r")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "a\\b", "C:x", "..", ".", "", "a\0b", None, 3])
def test_names_that_lead_elsewhere(name):
    assert not is_plain_name(name)


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
