"""What the lens asks of a layer's codes: which class a (query, key) pair belongs to, of classes known without a parser.

    kind of the key, kind of the query     special, punctuation, number, function word, continuation, word
    relative position                      the key itself, 1 before, 1 after, 2 to 3 before, …
    four relations                         by construction, in the minimal pairs of `sentences`
    relative place                         of image patches: beside, above or below, same row, …

Pairs are drawn by seed, equally many of each class where there are enough.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence

import numpy as np

from headcode.analysis.kinds import KINDS, token_kinds
from headcode.analysis.lens.models import LensModel
from headcode.analysis.lens.reading import Text
from headcode.analysis.lens.sentences import RELATIONS, build, last_tokens, minimal_pair

PAIRS_OF_A_CLASS = 800
FEWEST_PAIRS, FEWEST_TEXTS = 20, 8
"""Of a class, for it to be asked about."""
FEWEST_WORDS = 4
"""Of a passage: headings and list markers are left out."""
LONGEST_SENTENCE = 100
"""Words. What is longer has no full stops, and its lines are read as sentences."""

OFFSETS = ("itself", "1 before", "1 after", "2–3 before", "2–3 after", "further before", "further after")
PLACES = ("itself", "beside", "above or below", "same row", "same column", "elsewhere", "class token")


@dataclasses.dataclass(frozen=True)
class Question:
    """Pairs with a class each; `group` says which pairs belong together when some are held out."""

    name: str
    classes: list[str]
    text: np.ndarray
    query: np.ndarray
    key: np.ndarray
    label: np.ndarray
    group: np.ndarray
    example: str = ""
    """Of a relation: a minimal pair."""

    def __len__(self) -> int:
        return len(self.label)


def passages(text: str, most: int) -> list[str]:
    """The sentences of a text with four words or more, at most `most`, spread evenly over it.

    Where no full stops divide it, its lines are its sentences.

    >>> passages("One two three four. Short one. Five six seven eight!", 9)
    ['One two three four.', 'Five six seven eight!']
    """
    pieces = re.split(r"(?<=[.!?])\s+|\n\s*\n", text)
    lines = [
        line for piece in pieces for line in (piece.splitlines() if len(piece.split()) > LONGEST_SENTENCE else [piece])
    ]
    found = [" ".join(line.split()) for line in lines if len(line.split()) >= FEWEST_WORDS]
    if len(found) <= most:
        return found
    return [found[i] for i in np.linspace(0, len(found) - 1, most).round().astype(int)]


def ask_of_passages(texts: Sequence[Text], causal: bool, seed: int) -> tuple[list[Question], dict[str, str]]:
    """The questions that passages can answer, and why others cannot be asked."""
    pairs = [_visible(text.length, causal) for text in texts]
    number = np.concatenate([np.full(len(q), i) for i, (q, _) in enumerate(pairs)])
    query, key = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    labellers: dict[str, tuple[tuple[str, ...], Callable[[Text], np.ndarray]]]
    if any("patch" in text.kinds for text in texts):
        labellers = {"relative place": (PLACES, _places)}
    else:
        labellers = {
            "kind of the key": (KINDS, lambda text: np.broadcast_to(_kinds(text), (text.length, text.length))),
            "kind of the query": (KINDS, lambda text: np.broadcast_to(_kinds(text)[:, None], (text.length,) * 2)),
            "relative position": (OFFSETS, lambda text: _offsets(text.length)),
        }
    questions: list[Question] = []
    reasons = {}
    for name, (classes, labels) in labellers.items():
        grids = [labels(text) for text in texts]
        label = np.concatenate([grid[q, k] for grid, (q, k) in zip(grids, pairs, strict=True)])
        rng = np.random.default_rng([seed, len(questions)])
        chosen, present = _draw(label, number, rng)
        if len(present) < 2:
            reasons[name] = f"the text has fewer than two classes with {FEWEST_PAIRS} pairs in {FEWEST_TEXTS} passages"
            continue
        new = np.searchsorted(present, label[chosen])
        of = (number[chosen], query[chosen], key[chosen])
        questions.append(Question(name, [classes[i] for i in present], *of, new, number[chosen]))
    return questions, reasons


def ask_of_built(
    model: LensModel, count: int, first: int, seed: int
) -> tuple[list[Text], list[Question], dict[str, str]]:
    """The relations, with their sentences, which are numbered from `first`."""
    texts: list[Text] = []
    questions, reasons = [], {}
    for relation, title in RELATIONS.items():
        rows = []
        for sentence in build(relation, count, seed):
            read = last_tokens(model, sentence.words)
            if read is None or len(read[0]) > model.max_length or max(read[0]) >= (model.vocab_size or 0):
                continue
            ids, ends = read
            names = model.token_names(ids)
            rows.append(
                (first + len(texts), ends[sentence.query], ends[sentence.key], sentence.related, sentence.group)
            )
            texts.append(Text(ids, names, token_kinds(names, model.specials)))
        if len(rows) < FEWEST_PAIRS:
            reasons[title] = "the tokenizer does not keep the words of the built sentences apart"
            continue
        number, query, key, label, group = np.array(rows).T
        classes = ["unrelated", "related"]
        questions.append(Question(title, classes, number, query, key, label, group, minimal_pair(relation, seed)))
    return texts, questions, reasons


def _visible(length: int, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    return np.tril_indices(length) if causal else tuple(np.indices((length, length)).reshape(2, -1))  # type: ignore[return-value]


def _draw(label: np.ndarray, number: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of every class that is frequent enough, and those classes."""
    chosen, present = [], []
    for each in np.unique(label):
        found = np.flatnonzero(label == each)
        if len(found) >= FEWEST_PAIRS and len(np.unique(number[found])) >= FEWEST_TEXTS:
            chosen.append(rng.permutation(found)[:PAIRS_OF_A_CLASS])
            present.append(each)
    return np.sort(np.concatenate(chosen)) if chosen else np.array([], int), np.array(present)


def _kinds(text: Text) -> np.ndarray:
    return np.array([KINDS.index(kind) for kind in text.kinds])


def _offsets(length: int) -> np.ndarray:
    """(query, key): which of OFFSETS."""
    offset = np.arange(length) - np.arange(length)[:, None]
    distance = np.abs(offset)
    far = np.where(distance <= 1, 0, np.where(distance <= 3, 1, 2))
    return np.where(offset == 0, 0, 1 + 2 * far + (offset > 0))


def _places(text: Text) -> np.ndarray:
    """(query, key): which of PLACES."""
    grid = [name.split(",") for name in text.names[1:]]
    row, column = np.array(grid, int).T
    down, right = np.abs(row - row[:, None]), np.abs(column - column[:, None])
    inner = np.select(
        [(down == 0) & (right == 0), (down == 0) & (right == 1), (down == 1) & (right == 0), down == 0, right == 0],
        [0, 1, 2, 3, 4],
        5,
    )
    places = np.full((text.length, text.length), PLACES.index("class token"))
    places[1:, 1:] = inner
    return places
