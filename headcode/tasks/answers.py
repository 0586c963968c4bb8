"""Anyone's answers to exported SRAVEN puzzles: read from a file, and checked; `headcode.tasks.scores` scores them.

A file of answers is JSON lines. The first one says which puzzles are answered, by the hash of their card; then comes
one line for each instance (and for each of its variants, if the export has any):

    {"headcode_answers": 1, "sha256": "…"}
    {"instance": 0, "answer": [3, 4, 1, 0]}
    {"instance": 1, "answer": "7 7 2 5"}

Or it is CSV, with the hash in a column of its own, the same in every row:

    sha256,instance,answer
    …,0,3 4 1 0

Further keys and columns are passed over. An answer that cannot be read as a panel counts as a wrong one; a file that
leaves an instance out, has one twice, or answers other puzzles is refused.
"""

import csv
import dataclasses
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headcode.files import is_count, open_regular, parse_json, read_object
from headcode.tasks.sraven import SRaven
from headcode.tasks.variants import MOST_VARIANTS, variant_names

VERSION = 1
LONGEST_LINE = 1_000_000
LARGEST_FILE = 4 * 10**9
MOST_ANSWERS = 10_000_000
NO_ANSWER = -1


@dataclasses.dataclass(frozen=True)
class Export:
    """What a card says of an exported file."""

    task: SRaven
    split: str
    start: int
    count: int
    variants: int
    sha256: str


def read_card(path: Path) -> Export:
    """The puzzles that a card stands for, made again from its configuration; its hash must be theirs."""
    card = read_object(path)
    config, split, sha256 = card.get("config"), card.get("split"), card.get("sha256")
    if card.get("task") != SRaven.name or not isinstance(config, dict):
        raise ValueError(
            f"{path} is not the card of exported SRAVEN puzzles; give the file or card of headcode export."
        )
    numbers: list[Any] = [card.get("start"), card.get("count"), card.get("variants", 1)]
    sensible = all(is_count(number) for number in numbers) and numbers[1] > 0 and 1 <= numbers[2] <= MOST_VARIANTS
    if not sensible or not isinstance(split, str):
        raise ValueError(f"{path} does not say which puzzles of which split it stands for; export them again.")
    task = SRaven.from_dict(config)
    if numbers[1] * numbers[2] > MOST_ANSWERS:
        raise ValueError(
            f"{path} stands for {numbers[1] * numbers[2]:,} puzzles, and at most {MOST_ANSWERS:,} are scored at once."
        )
    if task.fingerprint(split, numbers[1], numbers[0]) != sha256:
        raise ValueError(
            f"{path} says sha256 {sha256!r:.80}, and the puzzles that it describes have another one: export them again."
        )
    start, count, variants = map(int, numbers)
    return Export(task, split, start, count, variants, sha256)


def find_card(answers: Path) -> Path:
    """The card beside a file of answers that has the hash which the answers name."""
    _, first = next(_rows(answers), (0, None))
    if first is None:
        raise ValueError(f"{answers} has no answers.")
    for card in sorted(answers.parent.glob("*.card.json")):
        try:
            if read_object(card).get("sha256") == first["sha256"]:
                return card
        except (ValueError, OSError):  # some other file; it is not the one
            continue
    raise ValueError(
        f"{answers} answers puzzles with sha256 {first['sha256']!r:.80}, and no card beside it has that hash: "
        "say --puzzles FILE, the file that headcode export wrote."
    )


def read_answers(path: Path, export: Export) -> np.ndarray:
    """(variant, instance, position): every answer, NO_ANSWER where it is no panel of the task."""
    task = export.task
    found = np.full((export.variants, export.count, task.num_features), NO_ANSWER, dtype=np.int64)
    given = np.zeros(found.shape[:2], dtype=bool)
    for line, row in _rows(path):
        if row["sha256"] != export.sha256:
            raise ValueError(
                f"{path} answers other puzzles: its sha256 is {row['sha256']!r:.80}, that of these puzzles (split "
                f"{export.split}, {export.count:,} from instance {export.start} on) is {export.sha256!r}."
            )
        number: Any = row.get("instance")
        variant: Any = row.get("variant", 0)
        if not is_count(number) or not is_count(variant):
            raise ValueError(
                f"{path}, line {line}: instance and variant are whole numbers from 0 on, "
                f"got {number!r:.40} and {variant!r:.40}."
            )
        place = (variant, number - export.start)
        if not (variant < export.variants and 0 <= place[1] < export.count):
            raise ValueError(
                f"{path}, line {line}: there is no instance {number} with variant {variant}; the puzzles are instances "
                f"{export.start} to {export.start + export.count - 1} in {export.variants} variant(s)."
            )
        if given[place]:
            raise ValueError(f"{path}, line {line}: instance {number} with variant {variant} is there twice; keep one.")
        given[place] = True
        answer = panel(row.get("answer"), task, variant_names(task, number, variant))
        if answer is not None:
            found[place] = answer
    if not given.all():
        variant, index = np.argwhere(~given)[0].tolist()
        missing = f"instance {export.start + index}" + (f", variant {variant}" if export.variants > 1 else "")
        raise ValueError(
            f"{path} has no answer for {int((~given).sum()):,} of {given.size:,} puzzles, the first is {missing}; "
            "give an empty answer where there is none."
        )
    return found


def panel(answer: Any, task: SRaven, names: list[str] | None = None) -> list[int] | None:
    """An answer as values, or None if it is no panel of this task; `names` are the letters of a variant's values.

    Of a text only what follows its last "Answer:" is read, one line of it; without that word all of it is the answer.

    >>> panel("3 + 4 = 7, and so on.\\nAnswer: [7, 0]", SRaven(num_features=2))
    [7, 0]
    """
    if isinstance(answer, str):
        _, marked, said = answer.lower().rpartition("answer:")
        words: Any = re.findall(r"-?\d+|[a-z]+", said.strip().partition("\n")[0] if marked else said)
    else:
        words = answer
    if not isinstance(words, list) or len(words) != task.num_features:
        return None
    letters = {name: value for value, name in enumerate(names or ())}
    if not all(type(word) in (str, int) for word in words):
        return None
    values: list[Any] = [letters.get(word, word) for word in words]
    try:
        numbers = [int(value) for value in values]
    except ValueError:
        return None
    return numbers if all(0 <= number < task.num_values for number in numbers) else None


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and content of each answer, JSON or CSV, with the hash of the puzzles that the file names."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > LARGEST_FILE:
            raise ValueError(
                f"{path} has {size:,} bytes, and a file of answers at most {LARGEST_FILE:,}; "
                "keep no more than instance, variant and answer."
            )
        lines = _lines(path, iter(lambda: file.readline(LONGEST_LINE + 1), b""))
        number, first = next(((number, text) for number, text in lines if text.strip()), (1, ""))
        if first.lstrip().startswith("{"):
            yield from _json_rows(path, number, first, lines)
        else:
            yield from _csv_rows(path, number, first, lines)


def _json_rows(
    path: Path, number: int, first: str, lines: Iterator[tuple[int, str]]
) -> Iterator[tuple[int, dict[str, Any]]]:
    header = parse_json(first, f"{path}, line {number}")
    if "headcode_answers" not in header:
        raise ValueError(_how_to_begin(path))
    if header["headcode_answers"] != VERSION:
        raise ValueError(
            f"{path} is of version {header['headcode_answers']!r:.40} of this format, and this is headcode for "
            f"version {VERSION}: install the headcode that it was written for."
        )
    if not isinstance(header.get("sha256"), str):
        raise ValueError(_how_to_begin(path))
    for number, text in lines:
        if not text.strip():
            continue
        row = parse_json(text, f"{path}, line {number}")
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: an answer is an object with instance and answer.")
        yield number, row | {"sha256": header["sha256"]}


def _csv_rows(
    path: Path, number: int, first: str, lines: Iterator[tuple[int, str]]
) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.reader(itertools.chain([first], (text for _, text in lines)), strict=True)
    columns: list[str] = []
    usual = csv.field_size_limit(LONGEST_LINE)  # a cell may be as long as a line of JSON: models reason at length
    try:
        for cells in reader:
            line = number - 1 + reader.line_num
            if not columns:
                columns = cells
                if not {"sha256", "instance", "answer"} <= set(columns):
                    raise ValueError(_how_to_begin(path))
            elif "".join(cells).strip():
                if len(cells) != len(columns):
                    raise ValueError(
                        f"{path}, line {line} has {len(cells)} cells, and the first line names {len(columns)} columns; "
                        "a cell with commas stands in quotes."
                    )
                row: dict[str, Any] = dict(zip(columns, cells, strict=True))
                for name in {"instance", "variant"} & row.keys():
                    if row[name].isdecimal() and len(row[name]) < 20:
                        row[name] = int(row[name])
                yield line, row
    except csv.Error as error:
        raise ValueError(f"{path}, line {number - 1 + max(reader.line_num, 1)} is no line of CSV: {error}.") from None
    finally:
        csv.field_size_limit(usual)
    if not columns:
        raise ValueError(_how_to_begin(path))


def _lines(path: Path, lines: Iterator[bytes]) -> Iterator[tuple[int, str]]:
    """Number and text of each line; endless ones and bytes that are no text are refused."""
    for number, line in enumerate(lines, 1):
        if len(line) > LONGEST_LINE:
            raise ValueError(f"{path}, line {number} has more than {LONGEST_LINE:,} characters; one answer is a line.")
        try:
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{path}, line {number} is not text in UTF-8; answers are JSON lines or CSV.") from None


def _how_to_begin(path: Path) -> str:
    return (
        f'{path} does not say which puzzles it answers. JSON lines begin with {{"headcode_answers": {VERSION}, '
        '"sha256": "…"}, the hash of the puzzles\' card; CSV has the columns sha256, instance and answer.'
    )
