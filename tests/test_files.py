"""Reading files that may be hostile: regular, bounded, strict, and never unpickled."""

import errno
import io
import json
import os
import struct
import tempfile
import zipfile

import numpy as np
import pytest

from headcode import files
from headcode.files import (
    is_locked,
    is_plain_name,
    open_own,
    parse_json,
    read_bytes,
    read_json,
    read_npz,
    read_object,
    read_text,
    take_lock,
    temporary_folder,
)


def written(path, content):
    path.write_bytes(content)
    return path


def test_a_good_file_is_read_as_it_is(tmp_path):
    path = written(tmp_path / "a.json", '{"ü": [1, -2.5, null, true], "n": 18446744073709551615}'.encode())
    assert read_object(path) == {"ü": [1, -2.5, None, True], "n": 2**64 - 1}
    assert read_bytes(path) == path.read_bytes() and read_text(path).startswith('{"ü"')


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        with pytest.raises(ValueError, match=f"{name} is not a regular file"):
            read_bytes(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "nothing")


def test_what_is_there_but_no_regular_file_is_not_missing(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "link").symlink_to(written(tmp_path / "file", b"1"))
    for name in ("pipe", "."):
        with pytest.raises(ValueError, match=r"is not a regular file"):
            files.is_there(tmp_path / name)
    found = [files.is_there(tmp_path / name) for name in ("file", "link", "dangling", "nothing", "file/x")]
    assert found == [True, True, False, False, False]


def test_the_beginning_of_a_text(tmp_path):
    path = written(tmp_path / "a", "aü€😀".encode())  # 1 + 2 + 3 + 4 bytes
    texts = [files.read_beginning(path, limit) for limit in range(12)]
    assert texts == ["", "a", "a", "aü", "aü", "aü", *["aü€"] * 4, "aü€😀", "aü€😀"]
    for content in (b"a\xffb", b"ab\xc3"):  # the second ends within a character, and is not cut
        with pytest.raises(ValueError, match=r"is not text in UTF-8 \(byte"):
            files.read_beginning(written(tmp_path / "b", content), 3)


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = written(tmp_path / "a", b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.replace_file(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_file_has_a_largest_size(tmp_path):
    path = written(tmp_path / "a", b"12345")
    assert read_bytes(path, limit=5) == b"12345"
    with pytest.raises(ValueError, match="larger than the 4 bytes"):
        read_bytes(path, limit=4)
    with path.open("wb") as file:
        file.truncate(2**40)  # takes no room on disk
    with pytest.raises(ValueError, match="larger than the 536,870,912 bytes"):
        read_json(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value"),
        ("{} {}", "Extra data"),
        ("[NaN]", "NaN is not a number of JSON"),
        ("[-Infinity]", "-Infinity is not a number"),
        ("[1e400]", "1e400 is beyond the largest float"),
        ("9" * 301, "has 301 digits, more than 300"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "the key 'b' stands twice"),
        (r'"\ud800"', "surrogates not allowed"),
        ("[" * 100_000, "nested too deeply"),
        ("[" * 65 + "]" * 65, "nested too deeply"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested too deeply"),
    ],
)
def test_strict_json(tmp_path, text, words):
    path = written(tmp_path / "a.json", text.encode())
    with pytest.raises(ValueError) as caught:
        read_json(path)
    assert str(caught.value).startswith(f"{path} is not valid JSON: ") and words in str(caught.value)


def test_the_largest_json_that_is_allowed():
    assert parse_json("9" * 300) == int("9" * 300) < float("inf")
    assert parse_json("[" * 64 + "]" * 64)[0][0] != []
    assert parse_json(r'"\ud83d\ude00"') == "😀"


def test_text_and_objects(tmp_path):
    with pytest.raises(ValueError, match=r"not text in UTF-8 \(byte 1\)"):
        read_text(written(tmp_path / "a", b"a\xff"))
    with pytest.raises(KeyError, match="must hold a JSON object, got list"):
        read_object(written(tmp_path / "a", b"[]"), KeyError)


def test_arrays_come_back(tmp_path):
    arrays = {"a/b": np.arange(35.0).reshape(5, 7), "f": np.asfortranarray(np.eye(3, 2)), "none": np.zeros((0, 3))}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **arrays)
        found = read_npz(tmp_path / "a.npz")
        assert list(found) == list(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[name], array)


class Trap:
    """Unpickled, it raises."""

    def __reduce__(self):
        return exec, ("raise SystemError('it was unpickled')",)


def member(shape, descr="<f4", content=b"\0" * 16):
    """An .npz file with one member that says this of itself."""
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode()
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"not a zip", "File is not a zip file"),
        (member((10**12,)), "has 4000000000000 bytes, and 16 are there"),
        (member((5,)), "has 20 bytes, and 16 are there"),
        (member((-4,)), "has -16 bytes"),
        (member((-2, -2)), "has 16 bytes"),
        (member(("4",)), "x"),
        (member((4,), "|O8"), "pickled objects, which are never loaded"),
        (member((4,), [("a", "|O8")]), "pickled objects, which are never loaded"),
        (member((4,), "("), "x"),
    ],
)
def test_arrays_that_lie(tmp_path, content, words):
    path = written(tmp_path / "x.npz", content)
    with pytest.raises(ValueError) as caught:
        read_npz(path)
    assert str(caught.value).startswith(f"{path} is not an .npz file of arrays: ") and words in str(caught.value)


def test_nothing_is_unpickled(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.array([Trap()], dtype=object))
    with pytest.raises(ValueError, match="never loaded"):
        read_npz(tmp_path / "x.npz")


def test_a_small_archive_that_would_become_large_is_refused(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "x.npz", x=np.zeros(10**6))
    assert read_npz(tmp_path / "x.npz")["x"].shape == (10**6,)
    monkeypatch.setattr(files, "SMALL_ARCHIVE", 10**6)
    with pytest.raises(ValueError, match="expand to 8,000,128, which no real data do"):
        read_npz(tmp_path / "x.npz")
    np.savez(tmp_path / "x.npz", x=np.zeros(10**6))  # as large as it says: no harm
    assert read_npz(tmp_path / "x.npz")["x"].shape == (10**6,)


def test_predicates():
    assert [files.is_number(v) for v in (1, 2.5, True, "1", None)] == [True, True, False, False, False]
    assert [files.is_count(v) for v in (0, 2**63 - 1, 2**63, -1, 1.0, True)] == [True, True, False, False, False, False]
    assert [files.is_word(v) for v in ("iid", "", "a\nb", "\x1b[2J", "x" * 201, 1)] == [True, True, *[False] * 4]


def test_json_agrees_with_pythons_own():
    values = {"a": [0, -1, 1.5e-7, 'é\n"', [], {}, None, False], "b": {"c": [[1]]}}
    assert parse_json(json.dumps(values)) == values


@pytest.mark.parametrize("mode", ["wb", "ab", "a+", "r+"])
def test_only_regular_files_are_written(tmp_path, mode):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "dangling", "pipe", "folder"):
        with pytest.raises(OSError, match=rf"{name} is not a regular file .*; remove it"):
            open_own(tmp_path / name, mode)
    assert (tmp_path / "victim").read_text() == "mine" and not (tmp_path / "new").exists()


def test_regular_files_are_written_as_ever(tmp_path):
    path = tmp_path / "file"
    for mode, content, expected in (("w", "long", "long"), ("w", "new", "new"), ("a", "er", "newer")):
        with open_own(path, mode, encoding="utf-8") as file:
            file.write(content)
        assert path.read_text() == expected
    with pytest.raises(FileNotFoundError):
        open_own(tmp_path / "missing", "r")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "a\\b", "C:x", "..", ".", "", "a\0b", None, 3])
def test_names_that_lead_elsewhere(name):
    assert not is_plain_name(name)


def test_a_temporary_folder_on_a_full_disk_names_the_disk(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise FileNotFoundError("No usable temporary directory found in […]")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with temporary_folder("test") as folder:
        assert folder.parent == tmp_path and folder.name.startswith(".headcode-test-")
    assert not folder.exists()
    monkeypatch.setattr(os, "mkdir", full)
    with pytest.raises(OSError, match="No space left on device"), temporary_folder("test"):
        pass


def test_looking_at_a_lock_is_seen_by_nobody_and_needs_no_right_to_write(tmp_path):
    path = tmp_path / ".lock"
    with take_lock(path):
        path.chmod(0o444)
        assert is_locked(path)
    assert not is_locked(path)
    if hasattr(os, "O_NOFOLLOW"):  # where the system has shared locks: another who looks at the same moment
        import fcntl

        with open(path) as other:
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
            assert not is_locked(path)
