"""Instances as files for other tools: Parquet, JSONL, NPZ or text prompts, each with a card that fixes its content.

The card (`NAME.card.json`, and inside Parquet and NPZ files) has the task's configuration with its seed, the version of
the generator, the split, the range of instances, and `sha256`: the hash of all of that and of the instances' bytes.
`task.fingerprint(split, count, start)` gives the same hash from nothing but the configuration.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from headcode.files import open_own, to_json, write_bytes
from headcode.tasks import oracle, text
from headcode.tasks.base import Batch, Task, instance_bytes
from headcode.tasks.sraven import SRaven
from headcode.tasks.variants import MOST_VARIANTS, as_variant, variant_names
from headcode.version import __version__

FORMATS = {"parquet": ".parquet", "jsonl": ".jsonl", "npz": ".npz", "text": ".prompts.jsonl"}
CHUNK = 4096

COLUMNS = {
    "instance": "number of the instance in its split",
    "variant": "SRAVEN: 0 is the puzzle itself, the others show it under other names (headcode.tasks.variants)",
    "composition": "id of the composition: the row of task.compositions",
    "puzzle": "SRAVEN cells (row, column, position); the last panel is the answer",
    "answer": "SRAVEN: the hidden panel (position); text: the answer as it should be written",
    "rules": "rule of each feature: 0 constant, 1 to 4 progression +1 +2 -1 -2, 5 sum, 6 difference, 7 distribute",
    "permutations": "(column, position): the feature that stands there",
    "aligned": "whether the columns share one permutation",
    "num_answers": "number of answers that some explanation of the visible cells supports",
    "answer_probability": "posterior of the true answer, multisets uniform over this split's own",
    "best_probability": "posterior of the most probable answer; its mean is the split's ceiling",
    "answers": "all supported answers as text, most probable first",
    "terms": "(term, variable): 1 = the variable as it is, 0 = its negation",
    "inputs": "(point, variable), float32",
    "targets": "(point), float32; the last one is the hidden one",
    "prompt": "what a language model reads",
}


def export(
    task: Task,
    split: str,
    count: int,
    path: str | Path,
    format: str,
    start: int = 0,
    with_oracle: bool = False,
    num_variants: int = 1,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Writes instances start … start+count-1 of a split to `path` and its card beside it; returns the card.

    `with_oracle` adds what the exact solver says about each SRAVEN puzzle (text prompts always have it). With
    `num_variants` above 1 each SRAVEN puzzle is there so many times, under other names.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}.")
    if with_oracle and not isinstance(task, SRaven):
        raise ValueError(f"The oracle solves SRAVEN puzzles; {type(task).__name__} has none.")
    if not 1 <= num_variants <= MOST_VARIANTS or (num_variants > 1 and not isinstance(task, SRaven)):
        raise ValueError(
            f"Only SRAVEN puzzles have variants, 1 to {MOST_VARIANTS} each, got {num_variants} for {task.name}."
        )
    card = {**task.identity(split, count, start), "seed": task.seed, "headcode": __version__, "format": format}
    if num_variants > 1:
        card["variants"] = num_variants
    if format == "text":
        card["prompt_version"] = text.PROMPT_VERSION
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for target in (path, card_path(path)):
        if target.is_dir():
            raise ValueError(f"{target} is a folder; give the file another name.")
    draft, card_draft = (target.with_name(f".{target.name}.{os.getpid()}") for target in (path, card_path(path)))
    digest = hashlib.sha256(json.dumps(task.identity(split, count, start), sort_keys=True).encode())
    names: list[str] = []

    def tables() -> Iterator[dict[str, Any]]:
        for first in range(start, start + count, CHUNK):
            batch = task.instances(split, np.arange(first, min(first + CHUNK, start + count)))
            digest.update(instance_bytes(batch))
            for variant in range(num_variants):
                shown = as_variant(task, batch, variant) if isinstance(task, SRaven) else batch
                table = columns(task, shown)
                if num_variants > 1:
                    table["variant"] = np.full(len(batch.x), variant)
                if isinstance(task, SRaven) and (with_oracle or format == "text"):
                    table |= _oracle_columns(task, split, shown, variant)
                if format == "text":
                    table = _text_columns(task, shown, table, variant)
                names[:] = table
                yield table
            if progress is not None:
                progress(len(batch.x))

    try:
        with open_own(draft, "wb") as file, contextlib.closing(_WRITERS[format](file)) as writer:
            for table in tables():
                writer.add(table)
            card["columns"] = {name: COLUMNS[name] for name in names}
            card["sha256"] = digest.hexdigest()
            writer.finish(card)
        write_bytes(card_draft, to_json(card))
        draft.replace(path)
        card_draft.replace(card_path(path))
    finally:
        draft.unlink(missing_ok=True)
        card_draft.unlink(missing_ok=True)
    return card


def card_path(path: str | Path) -> Path:
    """Where the card of an exported file stands."""
    path = Path(path)
    return path.with_name(f"{path.name}.card.json")


def columns(task: Task, batch: Batch) -> dict[str, np.ndarray]:
    """The instances of a batch as named NumPy columns."""
    table = {name: batch.info[name].numpy() for name in ("instance", "composition")}
    if isinstance(task, SRaven):
        table["puzzle"] = batch.info["puzzles"].numpy()
        table["answer"] = table["puzzle"][:, -1, -1]
        table |= {name: batch.info[name].numpy().astype(np.int8) for name in ("rules", "permutations")}
        table["aligned"] = batch.info["aligned"].numpy()
    else:
        table["terms"] = batch.info["terms"].numpy().astype(np.int8)
        table["inputs"] = batch.x[..., :-1].numpy()
        table["targets"] = batch.info["targets"].numpy()
    return table


def _oracle_columns(task: SRaven, split: str, batch: Batch, variant: int) -> dict[str, Any]:
    puzzles, instances = batch.info["puzzles"].numpy(), batch.info["instance"].tolist()
    names = [variant_names(task, instance, variant) for instance in instances]
    solutions = oracle.solve_split(task, split, puzzles)
    return {
        "num_answers": solutions.num_answers,
        "answer_probability": solutions.probability_of(puzzles[:, -1, -1]),
        "best_probability": solutions.best_probability,
        "answers": [
            [text.sraven_answer(answer, given) for answer in answers]
            for answers, given in zip(solutions.answers, names, strict=True)
        ],
    }


def _text_columns(task: Task, batch: Batch, table: dict[str, Any], variant: int) -> dict[str, Any]:
    pairs = text.prompts(task, batch, variant)
    kept = ("instance", "variant", "composition", "num_answers", "answer_probability", "best_probability", "answers")
    return {
        "instance": table["instance"],
        "prompt": [prompt for prompt, _ in pairs],
        "answer": [answer for _, answer in pairs],
        **{name: table[name] for name in kept if name in table},
    }


class _Writer:
    """Writes tables to a file, and with `finish` the card where the format has a place for it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def add(self, table: dict[str, Any]) -> None:
        raise NotImplementedError

    def finish(self, card: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        """Also after an error; the file itself is closed by whoever opened it."""


class _Jsonl(_Writer):
    def add(self, table: dict[str, Any]) -> None:
        values = [column.tolist() if isinstance(column, np.ndarray) else column for column in table.values()]
        for row in zip(*values, strict=True):
            self.file.write((json.dumps(dict(zip(table, row, strict=True)), ensure_ascii=False) + "\n").encode())


class _Npz(_Writer):
    """All instances are in memory until the end; Parquet and JSONL stream."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.tables: list[dict[str, Any]] = []

    def add(self, table: dict[str, Any]) -> None:
        self.tables.append({name: column for name, column in table.items() if isinstance(column, np.ndarray)})

    def finish(self, card: dict[str, Any]) -> None:
        arrays = {name: np.concatenate([table[name] for table in self.tables]) for name in self.tables[0]}
        card["columns"] = {name: COLUMNS[name] for name in arrays}  # ragged columns do not fit into arrays
        np.savez_compressed(self.file, **{**arrays, "card": np.array(json.dumps(card))})  # type: ignore[arg-type]


class _Parquet(_Writer):
    def __init__(self, file: IO[bytes]) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                'Writing Parquet needs pyarrow: pip install "headcode[parquet]", or use another format.'
            ) from None
        super().__init__(file)
        self.arrow = pyarrow
        self.writer: Any = None

    def add(self, table: dict[str, Any]) -> None:
        arrow = self.arrow
        fields = {name: self._column(column) for name, column in table.items()}
        batch = arrow.table(fields)
        if self.writer is None:
            self.writer = arrow.parquet.ParquetWriter(self.file, batch.schema, compression="zstd")
        self.writer.write_table(batch)

    def _column(self, column: Any) -> Any:
        if not isinstance(column, np.ndarray):
            return self.arrow.array(column)
        values = self.arrow.array(np.ascontiguousarray(column).reshape(-1))
        for size in reversed(column.shape[1:]):
            values = self.arrow.FixedSizeListArray.from_arrays(values, size)
        return values

    def finish(self, card: dict[str, Any]) -> None:
        assert self.writer is not None
        self.writer.add_key_value_metadata({"headcode.card": json.dumps(card)})

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


_WRITERS: dict[str, type[_Writer]] = {"parquet": _Parquet, "jsonl": _Jsonl, "npz": _Npz, "text": _Jsonl}
