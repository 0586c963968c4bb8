"""Kernels kept on disk: never stale, never another's, never damaged, and never in the way.

Most tests run a package of three small files in a process of its own, with `headcode/jit.py` as it is.
"""

import contextlib
import hashlib
import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_imports import imported_modules

import headcode
from headcode import jit

PACKAGE = Path(headcode.__file__).parent
needs_modes = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no owners and modes")
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


@pytest.fixture
def tiny(tmp_path):
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
    kernels = [path for path in PACKAGE.rglob("*.py") if "import njit" in path.read_text(encoding="utf-8")]
    assert len(kernels) > 5
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


class Bomb(str):
    """A path; unpickled, it leaves a file there."""

    def __reduce__(self):
        return open, (str(self), "w")


def plant(source, exploded, *, sealed):
    """Every kept kernel becomes a pickle that runs code, with or without a seal that fits."""
    for path in kept(source):
        payload = pickle.dumps(Bomb(exploded))
        seal = hashlib.sha256(path.name.encode() + payload).digest() if sealed else b""
        path.write_bytes(seal + payload)


def test_a_planted_pickle_without_a_seal_is_not_run(tiny, tmp_path):
    call(tiny)
    plant(tiny, tmp_path / "exploded", sealed=False)
    assert call(tiny) == [22, 2.5, 0, 2]
    assert not (tmp_path / "exploded").exists()


@needs_modes
@pytest.mark.parametrize(
    ("place", "mode"), [("parent", 0o777), ("cache", 0o707), ("cache", 0o702), ("kernels", 0o707), ("kernels", 0o1777)]
)
def test_a_kernel_planted_where_others_may_write_is_not_run(tiny, tmp_path, place, mode):
    call(tiny)
    exploded = tmp_path / "exploded"
    plant(tiny, exploded, sealed=True)
    folder = {"parent": tmp_path, "cache": tmp_path / "cache", "kernels": kept(tiny)[0].parent}[place]
    folder.chmod(mode)
    output, errors = finish(start(tiny))
    assert json.loads(output) == [22, 2.5, 0, 2]
    assert not exploded.exists()
    assert errors.count("UserWarning: ") == 1
    assert f"{folder} is writable by other users (mode {mode:o})" in errors and "HEADCODE_CACHE_DIR" in errors


@needs_modes
@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_what_only_the_owner_could_write_is_believed(tiny, tmp_path, mode):
    """A seal is no signature: it is the folder that keeps others out, also inside of a sticky one, such as /tmp."""
    call(tiny)
    plant(tiny, tmp_path / "exploded", sealed=True)
    tmp_path.chmod(mode)
    call(tiny)
    assert (tmp_path / "exploded").exists()


@needs_modes
def test_a_kernel_that_others_may_write_is_not_run(tiny, tmp_path):
    call(tiny)
    plant(tiny, tmp_path / "exploded", sealed=True)
    for path in kept(tiny):
        path.chmod(0o666)
    assert call(tiny) == [22, 2.5, 0, 2]
    assert not (tmp_path / "exploded").exists()
    assert call(tiny) == [22, 2.5, 2, 0]  # written anew
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept(tiny)} == {0o600}


def test_a_kernel_behind_a_link_is_not_run(tiny, tmp_path):
    call(tiny)
    plant(tiny, tmp_path / "exploded", sealed=True)
    for path in kept(tiny):
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    assert call(tiny) == [22, 2.5, 0, 2]
    assert not (tmp_path / "exploded").exists()
    assert call(tiny) == [22, 2.5, 2, 0] and not any(path.is_symlink() for path in kept(tiny))


@pytest.fixture
def another_user(monkeypatch):
    """Makes this process look like another user's, who is not root and owns nothing; gives paths to a third one."""
    monkeypatch.setattr(os, "geteuid", lambda: 4242)

    def give(path):
        if os.getuid() == 0:
            os.chown(path, 4243, 4243)

    return give


@needs_modes
def test_a_folder_of_another_user_is_refused(tmp_path, another_user):
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    another_user(folder)
    with pytest.warns(UserWarning, match="Compiled kernels are not kept .* another user .*HEADCODE_CACHE_DIR"):
        assert jit.private_folder(folder / "kernels") is None
    with pytest.warns(UserWarning, match="Comparisons are not kept on disk"):
        assert jit.private_folder(folder / "kernels", "Comparisons") is None
    assert not (folder / "kernels").exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can own what root trusts")
def test_a_folder_of_root_is_trusted_by_everyone(tmp_path, another_user):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jit.private_folder(tmp_path / "kernels") == (tmp_path / "kernels").resolve()


@needs_modes
@pytest.mark.parametrize(
    ("name", "members", "own"),
    [("me", [], True), ("me", ["me"], True), ("me", ["me", "eve"], False), ("lab", [], False)],
)
def test_a_folder_that_a_group_may_write_to_is_taken_only_if_the_group_is_the_users_own(
    tmp_path, monkeypatch, name, members, own
):
    import grp
    import pwd

    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(0o770)
    number = folder.stat().st_gid
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="me", pw_gid=number))
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_name=name, gr_gid=number, gr_mem=members))
    with contextlib.nullcontext() if own else pytest.warns(UserWarning, match="is writable by other users"):
        assert jit.private_folder(folder) == (folder.resolve() if own else None)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give folders away")
def test_inside_a_container_the_folders_of_root_may_appear_as_nobodys(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    os.chown(tmp_path, 65534, -1)
    with pytest.warns(UserWarning, match="belongs to another user"):
        assert jit.private_folder(tmp_path / "home" / "kernels") is None
    monkeypatch.setattr(jit, "_unmapped_user", lambda: 65534)
    assert jit.private_folder(tmp_path / "home" / "more") == (tmp_path / "home" / "more").resolve()
    os.chown(tmp_path / "home", 65534, -1)
    with pytest.warns(UserWarning, match="belongs to another user"):
        assert jit.private_folder(tmp_path / "home") is None


@needs_modes
def test_links_to_a_folder_are_judged_by_where_they_lead(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "closed").mkdir(mode=0o700)
    for name in ("open", "closed"):
        (tmp_path / f"to-{name}").symlink_to(tmp_path / name)
    with pytest.warns(UserWarning, match="open is writable by other users"):
        assert jit.private_folder(tmp_path / "to-open" / "kernels") is None
    assert jit.private_folder(tmp_path / "to-closed" / "kernels") == (tmp_path / "closed" / "kernels").resolve()


@needs_modes
def test_new_folders_and_files_are_the_users_alone_whatever_the_umask(tiny, tmp_path):
    call(tiny, "import os; os.umask(0)" + CALL, cache=tmp_path / "new" / "cache")
    paths = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    assert sum(path.is_file() for path in paths) == 2
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


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
