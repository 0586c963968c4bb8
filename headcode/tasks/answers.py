"""Anyone's answers to exported SRAVEN puzzles: read from a file, checked, and scored beside the exact solver.

A file of answers is JSON lines. The first one says which puzzles are answered, by the hash of their card; then comes
one line for each instance (and for each of its variants, if the export has any):

    {"headcode_answers": 1, "sha256": "…"}
    {"instance": 0, "answer": [3, 4, 1, 0]}
    {"instance": 1, "answer": "7 7 2 5"}

Or it is CSV, with the hash in a column of its own, the same in every row:

    sha256,instance,answer
    …,0,3 4 1 0

Further keys and columns are passed over. An answer that cannot be read as numbers counts as a wrong one; a file that
leaves an instance out, has one twice, or answers other puzzles is refused.
"""

import csv
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headcode.files import is_count, open_regular, parse_json, read_object
from headcode.tasks import oracle
from headcode.tasks.sraven import SRaven
from headcode.tasks.sraven_rules import RULE_NAMES
from headcode.tasks.variants import MOST_VARIANTS, variant_names, variant_puzzles

VERSION = 1
LONGEST_LINE = 100_000
MOST_PUZZLES = 10_000_000
CHUNK = 4096
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
    if numbers[1] > MOST_PUZZLES:
        raise ValueError(f"{path} stands for {numbers[1]:,} puzzles, and at most {MOST_PUZZLES:,} are scored at once.")
    if task.fingerprint(split, numbers[1], numbers[0]) != sha256:
        raise ValueError(
            f"{path} says sha256 {sha256!r:.80}, and the puzzles that it describes have another one: export them again."
        )
    start, count, variants = map(int, numbers)
    return Export(task, split, start, count, variants, sha256)


def read_answers(path: Path, export: Export) -> np.ndarray:
    """(variant, instance, position): every answer, NO_ANSWER where it has no number that a value can be."""
    task = export.task
    found = np.full((export.variants, export.count, task.num_features), NO_ANSWER, dtype=np.int64)
    given = np.zeros(found.shape[:2], dtype=bool)
    for line, row in _rows(path, export.sha256):
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
        answer = _numbers(row.get("answer"), task, variant_names(task, number, variant))
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


def _rows(path: Path, sha256: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and content of each answer, JSON or CSV, once the file has said that it answers these puzzles."""
    with open_regular(path) as file:
        lines = _lines(path, iter(lambda: file.readline(LONGEST_LINE + 1), b""))
        number, first = next(lines, (1, ""))
        if first.lstrip().startswith("{"):
            header = parse_json(first, f"{path}, line {number}")
            if not isinstance(header, dict) or "headcode_answers" not in header:
                raise ValueError(_how_to_begin(path, sha256))
            if header["headcode_answers"] != VERSION:
                raise ValueError(
                    f"{path} is of version {header['headcode_answers']!r:.40} of this format, and this is headcode for "
                    f"version {VERSION}: install the headcode that it was written for."
                )
            _check_hash(path, header.get("sha256"), sha256)
            for number, text in lines:
                row = parse_json(text, f"{path}, line {number}")
                if not isinstance(row, dict):
                    raise ValueError(f"{path}, line {number}: an answer is an object with instance and answer.")
                yield number, row
            return
        columns = _cells(path, number, first)
        if not {"sha256", "instance", "answer"} <= set(columns):
            raise ValueError(_how_to_begin(path, sha256))
        for number, text in lines:
            cells: dict[str, Any] = dict(zip(columns, _cells(path, number, text), strict=False))
            _check_hash(path, cells.get("sha256"), sha256)
            for name in {"instance", "variant"} & cells.keys():
                cells[name] = int(cells[name]) if cells[name].isdecimal() and len(cells[name]) < 20 else None
            yield number, cells


def _cells(path: Path, number: int, text: str) -> list[str]:
    try:
        return next(csv.reader([text]), [])
    except csv.Error as error:
        raise ValueError(f"{path}, line {number} is no line of CSV: {error}.") from None


def _lines(path: Path, lines: Iterator[bytes]) -> Iterator[tuple[int, str]]:
    """Number and text of the lines that are not empty; endless ones and other kinds of files are refused."""
    for number, line in enumerate(lines, 1):
        if len(line) > LONGEST_LINE:
            raise ValueError(f"{path}, line {number} has more than {LONGEST_LINE:,} characters; one answer is a line.")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{path}, line {number} is no text; answers are JSON lines or CSV.") from None
        if text.strip():
            yield number, text


def _how_to_begin(path: Path, sha256: str) -> str:
    header = json.dumps({"headcode_answers": VERSION, "sha256": sha256})
    return (
        f"{path} does not say which puzzles it answers. JSON lines begin with {header}; CSV has the columns "
        "sha256, instance and answer."
    )


def _check_hash(path: Path, given: Any, sha256: str) -> None:
    if given != sha256:
        raise ValueError(f"{path} answers other puzzles: its sha256 is {given!r:.80}, that of the card is {sha256!r}.")


def _numbers(answer: Any, task: SRaven, names: list[str] | None) -> list[int] | None:
    """An answer as values, or None if it is not a panel of this task; letters where a prompt had letters."""
    words = re.findall(r"-?\d+|[a-z]", answer.lower()) if isinstance(answer, str) else answer
    if not isinstance(words, list) or len(words) != task.num_features:
        return None
    letters = {name: value for value, name in enumerate(names or ())}
    values = [letters.get(word, word) for word in words] if all(type(word) in (str, int) for word in words) else []
    try:
        numbers = [int(value) for value in values]
    except ValueError:
        return None
    return numbers if numbers and all(0 <= number < task.num_values for number in numbers) else None


def score(export: Export, answers: np.ndarray) -> dict[str, Any]:
    """What the answers (variant, instance, position) are worth: shares are of puzzles, with 95 % Wilson intervals."""
    task = export.task
    right = np.zeros(answers.shape[:2], dtype=bool)
    by_feature = np.zeros((export.count, task.num_features), dtype=bool)
    posterior, supported, best, ambiguous = (np.zeros(export.count) for _ in range(4))
    rules = np.zeros((export.count, task.num_features), dtype=np.int64)
    for first in range(0, export.count, CHUNK):
        part = slice(first, min(first + CHUNK, export.count))
        batch = task.instances(export.split, np.arange(export.start + first, export.start + part.stop))
        puzzles, instances = batch.info["puzzles"].numpy(), batch.info["instance"].numpy()
        for variant in range(export.variants):
            truth = variant_puzzles(task, puzzles, instances, variant)[:, -1, -1]
            right[variant, part] = (answers[variant, part] == truth).all(1)
        by_feature[part] = answers[0, part] == puzzles[:, -1, -1]
        rules[part] = batch.info["token_rules"].numpy()[:, -task.num_features :]
        solutions = oracle.solve_split(task, export.split, puzzles)
        posterior[part] = solutions.probability_of(answers[0, part])
        supported[part] = solutions.supports(answers[0, part])
        best[part], ambiguous[part] = solutions.best_probability, solutions.num_answers > 1
    ceiling = float(best.mean())
    found = {
        "split": export.split,
        "puzzles": export.count,
        "features": task.num_features,
        "accuracy": _share(right[0]),
        "ceiling": ceiling,
        "share_of_ceiling": float(right[0].mean()) / ceiling,
        "feature_accuracy": _share(by_feature.ravel()),
        "posterior": float(posterior.mean()),
        "supported": _share(supported > 0),
        "one_answer": _share(right[0][ambiguous == 0]),
        "several_answers": _share(right[0][ambiguous == 1]),
        "rules": {RULE_NAMES[rule]: _share(by_feature[rules == rule]) for rule in task.rule_ids},
        "distinct_rules": {
            str(number): _share(right[0][_distinct(rules) == number]) for number in range(1, task.num_features + 1)
        },
    }
    if export.variants > 1:
        found |= {"variants": export.variants, "pass_any": _share(right.any(0)), "pass_all": _share(right.all(0))}
    return found


def _distinct(rules: np.ndarray) -> np.ndarray:
    """(N,): how many different rules each puzzle has."""
    changes = np.diff(np.sort(rules, axis=1), axis=1) != 0
    return 1 + changes.sum(1)


def _share(hits: Any) -> dict[str, float | int | None]:
    """The share of hits with its interval; None where nothing was asked."""
    if hits.size == 0:
        return {"share": None, "low": None, "high": None, "count": 0}
    share = float(hits.mean())
    low, high = wilson_interval(share, hits.size)
    return {"share": share, "low": low, "high": high, "count": int(hits.size)}


def wilson_interval(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of `count` trials: sensible for few trials and for shares of 0 and 1.

    >>> [round(bound, 3) for bound in wilson_interval(0.0, 49)]
    [0.0, 0.073]
    """
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * (share * (1 - share) / count + z**2 / (4 * count**2)) ** 0.5
    return min(max(centre - half, 0.0), share), max(min(centre + half, 1.0), share)
