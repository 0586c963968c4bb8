"""Files of codes: what was streamed is what is read, in parts of any size, and nothing else is believed."""

import os
import zipfile

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headcode import files
from headcode.analysis.files import open_arrays, stream_to, write_arrays


@pytest.mark.parametrize("ending", [".npz", ".parquet"])
@given(parts=st.lists(st.integers(1, 5), min_size=1, max_size=4), width=st.integers(1, 7))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_streamed_parts_are_one_array(tmp_path, ending, parts, width):
    rng = np.random.default_rng(0)
    count = sum(parts)
    codes = rng.normal(size=(count, width, 3)).astype(np.float32)
    labels, right = rng.integers(0, 9, count), rng.random(count) < 0.5
    path = tmp_path / f"codes{ending}"
    with stream_to(path) as stream:
        first = 0
        for part in parts:
            rows = slice(first, first + part)
            stream.append({"codes": codes[rows], "labels": labels[rows], "right": right[rows]})
            first += part
        stream.close({"what": "test", "layers": [0, 2]}, {"pairs": np.array([[1, 2]])})
    read = open_arrays(path)
    assert read.card == {"what": "test", "layers": [0, 2]}
    assert set(read) == {"codes", "labels", "right", "pairs"}
    np.testing.assert_array_equal(read["codes"], codes)
    np.testing.assert_array_equal(read["labels"], labels)
    np.testing.assert_array_equal(read["right"], right)
    np.testing.assert_array_equal(read["pairs"], [[1, 2]])
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_npz_is_mapped_and_readable_by_numpy(tmp_path):
    path = write_arrays(tmp_path / "a.npz", {"x": np.arange(6.0).reshape(2, 3), "empty": np.zeros((0, 2))}, {"a": 1})
    read = open_arrays(path)
    assert isinstance(read["x"], np.memmap) and read["empty"].shape == (0, 2)
    np.testing.assert_array_equal(np.load(path)["x"], np.arange(6.0).reshape(2, 3))


def test_an_error_leaves_nothing_behind(tmp_path):
    def fail():
        with stream_to(tmp_path / "codes.npz") as stream:
            stream.append({"x": np.zeros((2, 3))})
            stream.append({"x": np.zeros((2, 4))})

    with pytest.raises(ValueError, match=r"Rows of x are float64 \(3,\), got float64 \(4,\)"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_foreign_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        open_arrays(tmp_path / "none.npz")
    with pytest.raises(ValueError, match="the ending decides"):
        open_arrays(write_bytes(tmp_path / "codes.csv", b"1"))
    with pytest.raises(ValueError, match="damaged"):
        open_arrays(write_bytes(tmp_path / "codes.npz", b"not a zip"))
    np.savez(tmp_path / "pickled.npz", x=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="pickled objects"):
        open_arrays(tmp_path / "pickled.npz")
    np.savez_compressed(tmp_path / "small.npz", x=np.zeros(100))
    with pytest.raises(ValueError, match="compressed"):
        open_arrays(tmp_path / "small.npz")
    with zipfile.ZipFile(tmp_path / "empty.npz", "w"):
        pass
    with pytest.raises(ValueError, match="not written by headcode"):
        open_arrays(tmp_path / "empty.npz")
    pyarrow.parquet.write_table(pyarrow.table({"x": [1]}), tmp_path / "bare.parquet", store_schema=False)
    with pytest.raises(ValueError, match="not written by headcode"):
        open_arrays(tmp_path / "bare.parquet")
    with pytest.raises(ValueError, match="not a Parquet file"):
        open_arrays(write_bytes(tmp_path / "codes.parquet", b"nonsense"))


def test_constant_columns_are_read_back(tmp_path, monkeypatch):
    """Codes of a first layer that all tokens share, flags that are all set: they become small files."""
    monkeypatch.setattr(files, "SMALL_ARCHIVE", 2**10)
    columns = {
        "codes": np.full((5000, 6, 16), 0.25, np.float32),
        "right": np.ones(5000, bool),
        "masks": np.zeros((5000, 640), bool),
        "rules": np.full((5000, 8), 3, np.int8),
        "one_hot": np.tile(np.eye(16, dtype=np.float32), (5000, 1, 1)),
        "labels": np.zeros(5000, np.int64),
    }
    for names in (columns, *([name] for name in columns)):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.parquet"
        with stream_to(path) as stream:
            for first in range(0, 5000, 1000):
                stream.append({name: columns[name][first : first + 1000] for name in names})
            stream.close({}, {})
        read = open_arrays(path)
        for name in names:
            np.testing.assert_array_equal(read[name], columns[name])
            assert read[name].dtype == columns[name].dtype


def test_a_parquet_file_that_would_become_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SMALL_ARCHIVE", 2**10)
    flat = pyarrow.array(np.zeros(10**6, np.int64))
    for column in (flat, pyarrow.FixedSizeListArray.from_arrays(flat, 100)):
        pyarrow.parquet.write_table(pyarrow.table({"x": column}), tmp_path / "bomb.parquet")
        assert (tmp_path / "bomb.parquet").stat().st_size < 40_000
        with pytest.raises(ValueError, match=r"expand to 8,000,000, which no real data do"):
            open_arrays(tmp_path / "bomb.parquet")
    for odd in (["word"], [[1, 2]], [{"a": 1}]):
        pyarrow.parquet.write_table(pyarrow.table({"x": odd}), tmp_path / "odd.parquet")
        with pytest.raises(ValueError, match="it has a column of the type"):
            open_arrays(tmp_path / "odd.parquet")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes as on Unix")
@pytest.mark.parametrize("ending", [".npz", ".parquet"])
def test_a_pipe_is_not_said_to_be_missing(tmp_path, ending):
    os.mkfifo(tmp_path / f"codes{ending}")
    with pytest.raises(ValueError, match="is not a regular file"):
        open_arrays(tmp_path / f"codes{ending}")


def write_bytes(path, content):
    path.write_bytes(content)
    return path
