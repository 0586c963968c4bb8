"""Whose kernels are loaded: those of a folder that nobody else can write to, and no others."""

import contextlib
import hashlib
import json
import os
import pickle
import stat
import warnings
from types import SimpleNamespace

import pytest

from headcode import jit
from tests.support.kernels import CALL, call, finish, kept, small_package, start

needs_modes = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no owners and modes")


@pytest.fixture
def tiny(tmp_path):
    return small_package(tmp_path)


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
