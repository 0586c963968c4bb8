"""Kernels kept on disk: never stale, never another's, never damaged, and never in the way.

Most tests run a package of three small files in a process of its own, with `headcode/jit.py` as it is.
"""

import json
import os
import re
import shutil
import sys

import pytest

from headcode import jit
from tests.support.kernels import CALL, PACKAGE, call, finish, kept, small_package, start
from tests.support.source import imported_modules

needs_modes = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no owners and modes")


@pytest.fixture
def tiny(tmp_path):
    return small_package(tmp_path)


def test_a_constant_of_another_module_is_part_of_the_key(tiny):
    assert call(tiny) == [22, 2.5, 0, 2]
    assert call(tiny) == [22, 2.5, 2, 0]
    (tiny / "headcode" / "ops" / "numbers.py").write_text("FACTOR = 5\n")
    assert call(tiny) == [36, 3.5, 0, 2]


def test_sources_edited_under_a_running_process_do_not_get_its_kernels(tiny):
    edited = tiny / "headcode" / "ops" / "numbers.py"
    late = CALL.replace("values =", f"open({str(edited)!r}, 'w').write('FACTOR = 5')\nvalues =")
    assert call(tiny, late)[:2] == [22, 2.5]  # this process imported the old constant
    assert call(tiny)[:2] == [36, 3.5]


def test_a_reloaded_module_takes_and_leaves_no_kernel(tiny):
    edited = tiny / "headcode" / "ops" / "_tiny.py"
    before = edited.read_text()
    reload = f"""
    import importlib, json
    import headcode.ops._tiny as tiny
    values = [tiny.scaled(7)]
    open({str(edited)!r}, "w").write({before.replace("+ 1", "+ 200")!r})
    importlib.reload(tiny)
    print(json.dumps([*values, tiny.scaled(7), tiny.scaled(0.5)]))
    """
    assert call(tiny, reload) == [22, 221, 201.5]
    edited.write_text(before)
    assert call(tiny)[:2] == [22, 2.5]


CHANGES = [
    "import numba; numba.__version__ += '.1'",
    "import numba, llvmlite; llvmlite.__version__ += '.1'",
    "import numba, numpy; numpy.__version__ += '.1'",
    "import numba, sys; sys.version += ' changed'",
    "import llvmlite.binding as llvm; llvm.get_host_cpu_name = lambda: 'generic'",
    "import llvmlite.binding as llvm; llvm.get_host_cpu_features = llvm.FeatureMap",
    "import os; os.environ['NUMBA_CPU_NAME'] = 'x86-64'",
    "import os; os.environ['NUMBA_CPU_FEATURES'] = '+sse2'",
]


@pytest.mark.slow
def test_versions_and_processor_are_part_of_the_key(tiny):
    assert call(tiny) == [22, 2.5, 0, 2]
    for change in CHANGES:
        assert call(tiny, change + CALL) == [22, 2.5, 0, 2], change
    assert call(tiny) == [22, 2.5, 2, 0]


def imported_files(path):
    """The files of the package that a module imports, itself included, and so on."""
    found, todo = set(), [path]
    while todo:
        path = todo.pop()
        if path not in found:
            found.add(path)
            places = [PACKAGE.joinpath(*name.split(".")[1:]) for name in imported_modules(path)]
            files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
            todo += [file for file in files if file.is_file()]
    return found


def test_the_fingerprint_covers_every_file_that_a_kernel_can_see():
    # What is compiled asks for njit, or for what `ops.cpu.kernel` makes of it.
    compiles = re.compile(r"import njit|from headcode\.ops\.cpu\.kernel import")
    kernels = [path for path in PACKAGE.rglob("*.py") if compiles.search(path.read_text(encoding="utf-8"))]
    assert len(kernels) > 12
    for path in kernels:
        room = path.relative_to(PACKAGE).parts[0]
        assert imported_files(path) <= set(jit.sources(room)), path


@pytest.mark.slow
def test_changed_dropout_with_a_warm_cache_agrees_with_the_reference(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "source" / "headcode", ignore=shutil.ignore_patterns("__pycache__", "models"))
    code = """
    import json, torch
    from headcode.ops import hyper_attention
    q, k, v = torch.randn(3, 2, 3, 13, 4, generator=torch.Generator().manual_seed(0))
    options = {"dropout": 0.3, "dropout_seed": 5}
    expected = hyper_attention(q, k, v, backend="reference", **options)
    error = (hyper_attention(q, k, v, backend="cpu", **options) - expected).abs().max()
    print(json.dumps([error.item(), expected.double().sum().item()]))
    """
    error, before = call(tmp_path / "source", code)
    assert error < 1e-5
    dropout = tmp_path / "source" / "headcode" / "ops" / "dropout.py"
    dropout.write_text(dropout.read_text().replace("KEY_FACTOR = 0x85EBCA77", "KEY_FACTOR = 0x85EBCA79"))
    error, after = call(tmp_path / "source", code)
    assert error < 1e-5 and after != before


DAMAGE = """
import json, os, random
from pathlib import Path
import numba, numpy

def outcome():
    # 0: the right values; 1: wrong ones or an exception; negative: killed by that signal.
    child = os.fork()
    if child == 0:
        status = 1
        try:
            from headcode.ops._tiny import scaled
            status = 0 if (scaled(7), scaled(0.5)) == (22, 2.5) else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def files():
    folder = Path(os.environ["HEADCODE_CACHE_DIR"])
    return sorted(path for path in folder.rglob("*") if path.is_file())

numba.njit(lambda x: x + 1)(1)  # so that the children need not set up Numba
assert outcome() == 0
sound = {path: path.read_bytes() for path in files()}
assert sound
generator = random.Random(20)
outcomes = []
for case in range(TRIES):
    path, content = generator.choice(sorted(sound.items()))
    damaged = bytearray(content)
    position = generator.randrange(len(damaged))
    if case % 3 == 0:
        damaged[position] ^= 1 << generator.randrange(8)
    elif case % 3 == 1:
        del damaged[position:]
    else:
        damaged[position:] = generator.randbytes(len(damaged) - position)
    path.write_bytes(damaged)
    outcomes.append(outcome())
    for path, content in sound.items():
        path.write_bytes(content)
print(json.dumps(outcomes))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("tries", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_damaged_files_are_compiled_anew(tiny, tries):
    assert call(tiny, DAMAGE.replace("TRIES", str(tries))) == [0] * tries


def test_a_kernel_under_another_kernels_name_is_not_taken(tiny):
    call(tiny)
    first, second = kept(tiny)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    assert call(tiny) == [22, 2.5, 0, 2]
    assert call(tiny) == [22, 2.5, 2, 0]


def test_processes_that_compile_at_once(tiny):
    for output, errors in [finish(process) for process in [start(tiny) for _ in range(3)]]:
        assert json.loads(output)[:2] == [22, 2.5] and errors == ""
    assert call(tiny) == [22, 2.5, 2, 0]
    assert len(kept(tiny)) == 2  # and no temporary file


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits on the size of a file")
def test_a_full_disk_leaves_no_file(tiny):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))"
    assert call(tiny, limit + CALL) == [22, 2.5, 0, 2]
    assert kept(tiny) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder that even root cannot write to")
def test_a_home_that_cannot_be_written(tiny):
    nowhere = {"HEADCODE_CACHE_DIR": None, "NUMBA_CACHE_DIR": None, "XDG_CACHE_HOME": None, "HOME": "/proc"}
    assert call(tiny, **nowhere) == [22, 2.5, 0, 2]


def test_a_cache_may_move(tiny, tmp_path):
    call(tiny)
    shutil.copytree(tmp_path / "cache", tmp_path / "moved")
    shutil.copytree(tiny, tmp_path / "elsewhere")
    assert call(tmp_path / "elsewhere", cache=tmp_path / "moved") == [22, 2.5, 2, 0]


def test_recompile_takes_and_leaves_no_kernel(tiny):
    recompile = """
    import json
    import headcode.ops._tiny as tiny
    tiny.scaled(7)
    tiny.FACTOR = 11
    tiny.scaled.recompile()
    print(json.dumps(tiny.scaled(7)))
    """
    assert call(tiny, recompile) == 78
    assert call(tiny)[:2] == [22, 2.5]
