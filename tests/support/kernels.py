"""A package of three small files with `headcode/jit.py` as it is, called in processes of their own."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import headcode

PACKAGE = Path(headcode.__file__).parent
TINY = {
    "__init__.py": "",
    "ops/__init__.py": "",
    "ops/numbers.py": "FACTOR = 3\n",
    "ops/_tiny.py": """
        from headcode.jit import njit
        from headcode.ops.numbers import FACTOR

        @njit()
        def scaled(x):
            return FACTOR * x + 1
        """,
}
CALL = """
import json
from headcode.ops._tiny import scaled
values = scaled(7), scaled(0.5)
print(json.dumps([*values, sum(scaled.stats.cache_hits.values()), sum(scaled.stats.cache_misses.values())]))
"""


def small_package(tmp_path):
    """The folder to import the small package from; its cache is `cache` beside it."""
    for name, text in TINY.items():
        path = tmp_path / "source" / "headcode" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    for name in ("jit.py", "private_api.py"):
        shutil.copy(PACKAGE / name, tmp_path / "source" / "headcode" / name)
    return tmp_path / "source"


def start(source, code=CALL, *, cache=None, **environment):
    settings = {**os.environ, "PYTHONPATH": str(source), "HEADCODE_CACHE_DIR": str(cache or source.parent / "cache")}
    settings = {name: value for name, value in {**settings, **environment}.items() if value is not None}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=source, env=settings, text=True, **pipes)


def finish(process):
    try:
        output, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return output, errors


def call(source, code=CALL, **settings):
    """What the code printed, as JSON; it may print nothing else."""
    output, errors = finish(start(source, code, **settings))
    assert errors == ""
    return json.loads(output)


def kept(source):
    """The files of the cache."""
    return sorted(path for path in (source.parent / "cache").rglob("*") if path.is_file())
