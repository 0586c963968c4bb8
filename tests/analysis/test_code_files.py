"""Files of codes: what was streamed is what is read, in parts of any size, and nothing else is believed."""

import zipfile

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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


def write_bytes(path, content):
    path.write_bytes(content)
    return path
