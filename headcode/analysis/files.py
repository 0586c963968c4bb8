"""Named arrays with equal first axes, written batch by batch and read back by memory map: NPZ or Parquet.

Nothing here holds more than one batch. An NPZ member has its length in its header, so each array is staged beside the
target and copied in when its length is known; members are stored without compression, so that reading maps them.
"""

import json
import os
import shutil
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from headcode.files import array_header, check_expansion, is_there, open_npz, parse_json

CARD = "card"
FORMATS = (".npz", ".parquet")
LARGEST_EXPANSION = 200
"""How many times its own size a Parquet file may become: eight flags in a byte, and what Snappy makes of that (21)."""


class Arrays(Mapping[str, np.ndarray]):
    """The arrays of a file and its `card`, a dictionary that says what they are."""

    def __init__(self, arrays: Mapping[str, np.ndarray], card: dict[str, Any]) -> None:
        self._arrays, self.card = dict(arrays), card

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class NpzStream:
    """Appends rows to named arrays; `close` makes the NPZ file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stage = path.with_name(f".{path.name}.{os.getpid()}")
        shutil.rmtree(self.stage, ignore_errors=True)
        self.stage.mkdir(parents=True)
        self._files: dict[str, tuple[IO[bytes], np.dtype, tuple[int, ...]]] = {}
        self._rows: dict[str, int] = {}

    def append(self, rows: Mapping[str, np.ndarray]) -> None:
        for name, array in rows.items():
            array = np.ascontiguousarray(array)
            if name not in self._files:
                staged = (self.stage / str(len(self._files))).open("w+b")
                self._files[name] = (staged, array.dtype, array.shape[1:])
                self._rows[name] = 0
            file, dtype, shape = self._files[name]
            if array.dtype != dtype or array.shape[1:] != shape:
                raise ValueError(f"Rows of {name} are {dtype} {shape}, got {array.dtype} {array.shape[1:]}.")
            file.write(array.tobytes())
            self._rows[name] += len(array)

    def close(self, card: Mapping[str, Any], constants: Mapping[str, np.ndarray]) -> None:
        draft = self.stage / "draft.npz"
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, array in {**constants, CARD: np.array(json.dumps(card))}.items():
                with archive.open(_member(name), "w", force_zip64=True) as member:
                    npy.write_array(member, np.asanyarray(array), allow_pickle=False)
            for name, (file, dtype, shape) in self._files.items():
                header = {
                    "descr": npy.dtype_to_descr(dtype),
                    "fortran_order": False,
                    "shape": (self._rows[name], *shape),
                }
                file.seek(0)
                with archive.open(_member(name), "w", force_zip64=True) as member:
                    npy.write_array_header_2_0(member, header)
                    shutil.copyfileobj(file, member, 1 << 20)
                file.close()
                Path(file.name).unlink()
        draft.replace(self.path)

    def discard(self) -> None:
        for file, _, _ in self._files.values():
            file.close()
        shutil.rmtree(self.stage, ignore_errors=True)


class ParquetStream:
    """Appends rows to a Parquet file: one row per instance, arrays as flat lists whose shapes the metadata keeps."""

    def __init__(self, path: Path) -> None:
        _pyarrow()
        self.path = path
        self.draft = path.with_name(f".{path.name}.{os.getpid()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._writer: Any = None
        self._shapes: dict[str, list[int]] = {}

    def append(self, rows: Mapping[str, np.ndarray]) -> None:
        pa, pq = _pyarrow()
        columns = {}
        for name, array in rows.items():
            flat = pa.array(np.ascontiguousarray(array).reshape(-1))
            width = int(np.prod(array.shape[1:])) if array.ndim > 1 else None
            columns[name] = flat if width is None else pa.FixedSizeListArray.from_arrays(flat, width)
            self._shapes[name] = list(array.shape[1:])
        table = pa.table(columns)
        if self._writer is None:
            # Without dictionaries, constant columns have a size by which a reader can tell them from an attack.
            self._writer = pq.ParquetWriter(self.draft, table.schema, use_dictionary=False)
        self._writer.write_table(table)

    def close(self, card: Mapping[str, Any], constants: Mapping[str, np.ndarray]) -> None:
        about = {
            "card": dict(card),
            "shapes": self._shapes,
            "constants": {name: np.asarray(array).tolist() for name, array in constants.items()},
        }
        self._writer.add_key_value_metadata({"headcode": json.dumps(about)})
        self._writer.close()
        self.draft.replace(self.path)

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self.draft.unlink(missing_ok=True)


@contextmanager
def stream_to(path: str | Path) -> Iterator[NpzStream | ParquetStream]:
    """A stream for the file's ending; whatever happens, no half file stays behind."""
    path = Path(path)
    check_ending(path)
    stream = NpzStream(path) if path.suffix == ".npz" else ParquetStream(path)
    try:
        yield stream
    finally:
        stream.discard()


def check_ending(path: Path) -> None:
    if path.suffix not in FORMATS:
        raise ValueError(f"{path.name!r} ends in none of {', '.join(FORMATS)}: the ending decides the format.")


def write_arrays(path: str | Path, arrays: Mapping[str, np.ndarray], card: Mapping[str, Any]) -> Path:
    """Small results in one go: an NPZ file with a card."""
    with stream_to(path) as stream:
        stream.close(card, arrays)
    return Path(path)


def open_arrays(path: str | Path) -> Arrays:
    """What a stream wrote; the arrays of an NPZ file are memory-mapped, so that any part of them can be read."""
    path = Path(path)
    if not is_there(path):
        raise ValueError(f"{path} does not exist; make it with headcode codes.")
    check_ending(path)
    return _open_npz(path) if path.suffix == ".npz" else _open_parquet(path)


def _open_npz(path: Path) -> Arrays:
    arrays: dict[str, np.ndarray] = {}
    with open_npz(path, "is damaged or was not written by headcode") as (archive, _), path.open("rb") as file:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                raise ValueError("it has compressed members; headcode writes them stored")
            file.seek(member.header_offset)
            name_length, extra_length = struct.unpack("<26xHH", file.read(30))
            file.seek(name_length + extra_length, os.SEEK_CUR)
            shape, fortran, dtype = array_header(file, member.file_size)
            name = member.filename.removesuffix(".npy")
            if shape == () or 0 in shape:
                arrays[name] = np.fromfile(file, dtype, int(np.prod(shape))).reshape(shape)
            else:
                order = "F" if fortran else "C"
                arrays[name] = np.memmap(path, dtype, "r", file.tell(), shape, order)  # type: ignore[call-overload]
        return Arrays(arrays, _card(parse_json(str(arrays.pop(CARD)), "its card")))


def _open_parquet(path: Path) -> Arrays:
    _, pq = _pyarrow()
    try:
        file = pq.ParquetFile(path)
        row = sum(_item_size(field.type) for field in file.schema_arrow)
        check_expansion(path.stat().st_size, row * file.metadata.num_rows, LARGEST_EXPANSION)
        about = parse_json(file.metadata.metadata[b"headcode"].decode(), "its description")
        arrays = {}
        for name, shape in about["shapes"].items():
            column = file.read([name]).column(0).combine_chunks()
            flat = column.flatten() if shape else column
            arrays[name] = flat.to_numpy(zero_copy_only=False).reshape(len(column), *shape)
        constants = {name: np.array(values) for name, values in about["constants"].items()}
        return Arrays({**constants, **arrays}, _card(about["card"]))
    except Exception as error:  # Arrow has an error of its own for each thing that can be wrong
        reason = " ".join(str(error).split()).rstrip(".")[:200]
        raise ValueError(f"{path} is not a Parquet file, or was not written by headcode: {reason}.") from error


def _item_size(kind: Any) -> int:
    """Bytes of one row of a column in memory; columns are numbers or lists of them, and a flag has a byte."""
    types = _pyarrow()[0].types
    if types.is_fixed_size_list(kind):
        return kind.list_size * _item_size(kind.value_type)
    if not types.is_primitive(kind):
        raise ValueError(f"it has a column of the type {kind}")
    return max(8, kind.bit_width) // 8


def _card(card: Any) -> dict[str, Any]:
    if not isinstance(card, dict):
        raise ValueError("its card is no JSON object")
    return card


def _member(name: str) -> str:
    return f"{name}.npy"


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "Parquet files need pyarrow: pip install 'headcode[parquet]', or write .npz."
        ) from None
    return pyarrow, pyarrow.parquet
