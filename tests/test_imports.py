"""Imports point one way, and `import headcode` needs torch and numpy alone."""

import subprocess
import sys
from pathlib import Path

import pytest

import headcode
from tests.support.source import imported_modules

ROOT = Path(headcode.__file__).parent
# Each room may import from itself and from rooms in earlier rows.
ROWS = [
    {"private_api"},
    {"files", "jit", "memory", "processes", "suggest", "version"},
    {"config"},
    {"tasks", "ops"},
    {"nn"},
    {"interop", "graph"},
    {"run"},
    {"train"},
    {"sweep"},
    {"analysis"},
    {"report"},
    {"presets"},
    {"experiments", "zoo"},
    {"explorer"},
    {"bench"},
    {"cli"},
]
RANK = {room: rank for rank, row in enumerate(ROWS) for room in row}


def room_of(module: str) -> str:
    return module.split(".")[1]


def test_imports_point_one_way():
    checked = 0
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if len(parts) == 1 and parts[0] in ("__init__", "__main__"):
            continue
        room = parts[0]
        assert room in RANK, f"{path}: the room {room!r} is not in the layout"
        for module in imported_modules(path):
            other = room_of(module)
            if other in ("__version__",):
                continue
            allowed = other == room or RANK.get(other, 99) < RANK[room]
            assert allowed, f"{path.relative_to(ROOT)} imports {module}: {other} does not come before {room}"
            checked += 1
    assert checked > 20


ONLY_TORCH_AND_NUMPY = """
import importlib.metadata as metadata, re, sys

def needs(name, seen):
    # The distributions that `name` requires, itself included.
    name = re.sub(r"[-_.]+", "-", name).lower()
    if name in seen:
        return seen
    seen.add(name)
    try:
        requirements = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return seen
    for requirement in requirements:
        if "extra ==" not in requirement:
            needs(re.match(r"[A-Za-z0-9._-]+", requirement)[0], seen)
    return seen

allowed = needs("torch", needs("numpy", set())) | {"headcode"}
blocked = {
    module
    for module, owners in metadata.packages_distributions().items()
    if not {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners} & allowed
}
assert {"numba", "tyro", "rich", "safetensors", "matplotlib"} <= blocked, blocked

# Blocked packages are not found, as if they were not installed.
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.split(".")[0] in blocked else find(name, *rest)
import torch, headcode, headcode.interop, headcode.nn, headcode.ops, headcode.tasks
x = torch.randn(2, 5, 8)
print(headcode.HyperAttention(8, 4)(x).shape)
"""


def test_import_and_use_with_torch_and_numpy_alone():
    run = subprocess.run([sys.executable, "-c", ONLY_TORCH_AND_NUMPY], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "torch.Size([2, 5, 8])"


def test_import_brings_in_no_heavy_optional_module():
    heavy = ["torch._dynamo", "numba", "tyro", "matplotlib", "pandas", "sklearn", "transformers", "triton", "ray"]
    code = f"import sys, headcode; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_command_line_needs_no_torch_until_a_command_is_named():
    names = ["torch", "numpy", "tyro"]
    code = (
        f"import sys; from headcode.cli import main; main(['--help']); print([n for n in {names} if n in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


def test_public_names_and_rooms_come_when_they_are_used():
    assert set(headcode.__all__) <= set(dir(headcode))
    for name in headcode.__all__:
        assert getattr(headcode, name) is not None
    assert headcode.tasks.TASKS
    with pytest.raises(AttributeError, match="no attribute 'dodo'"):
        _ = headcode.dodo


@pytest.mark.parametrize("name", ["dodo", "_dodo", "x.y", "cli.train", "tasks..x", ""])
def test_what_is_no_name_of_the_package_is_an_attribute_error(name):
    assert not hasattr(headcode, name)


def test_a_training_run_does_not_import_the_compiler_of_torch(tmp_path):
    code = """
import sys
from headcode.cli import main
main(["train", "logic", "--num-points", "5", "--steps", "1", "--eval-every", "0", "--out", sys.argv[1]])
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[]"
