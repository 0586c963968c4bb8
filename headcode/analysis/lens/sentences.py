"""Sentences whose syntax is known because they are built: minimal pairs for four relations.

The two words that are compared stand at the same positions in both sentences of a pair, which are equally long, and
(but for "same word") they are the same words; in the first sentence they are related, in the second they are not. For
"subject" and "bracket" all other words are the same too, in another order; for the other two the untrained control says
what these other words give away.

    subject       now the dog near the king slept .        slept → dog: its subject
                  near the dog now the king slept .        slept → dog: in the phrase before
    determiner    the old quiet dogs slept .               dogs → the: theirs
                  the king saw dogs today .                dogs → the: the king's
    bracket       ( the dog slept ) ( now ) .              first ) → first (: its partner
                  ( the ( dog ) slept ) now .              first ) → first (: the partner of the other )
    same word     the dog saw the dog today .              dog → dog: the same word
                  the king saw the dog today .             dog → king: another
"""

import dataclasses

import numpy as np

from headcode.analysis.lens.models import LensModel
from headcode.analysis.lens.reading import start_of

NOUNS = "dog cat king boy girl bird horse man woman doctor teacher farmer".split()  # noqa: SIM905
PLURALS = "dogs cats kings boys girls birds horses men women doctors teachers farmers".split()  # noqa: SIM905
VERBS = "slept ran left fell waited sang smiled laughed".split()  # noqa: SIM905
SEEING = "saw met heard followed found knew".split()  # noqa: SIM905
PLACES = "near behind beside with under".split()  # noqa: SIM905
TIMES = "now today yesterday there then".split()  # noqa: SIM905
ADJECTIVES = "old small young tall quiet big".split()  # noqa: SIM905
RELATIONS = {
    "subject": "verb and its subject",
    "determiner": "noun and its determiner",
    "bracket": "bracket and its partner",
    "same word": "same word twice",
}


@dataclasses.dataclass(frozen=True)
class Built:
    """A sentence in words, and the pair of words that is asked about."""

    words: tuple[str, ...]
    query: int
    key: int
    related: bool
    group: int
    """Sentences of one minimal pair have the same number."""


def build(relation: str, count: int, seed: int = 0) -> list[Built]:
    """`count` minimal pairs for one of RELATIONS: related, unrelated, related, …

    >>> for sentence in build("subject", 1):
    ...     print(" ".join(sentence.words), sentence.words[sentence.query], sentence.words[sentence.key])
    now the doctor near the man left . left doctor
    near the doctor now the man left . left doctor
    """
    rng = np.random.default_rng([seed, list(RELATIONS).index(relation)])
    built = []
    for group in range(count):
        one, other = rng.choice(len(NOUNS), 2, replace=False)
        noun, second, plural = NOUNS[one], NOUNS[other], PLURALS[one]
        verb, seeing, place, time = (str(rng.choice(words)) for words in (VERBS, SEEING, PLACES, TIMES))
        first, next_ = (str(word) for word in rng.choice(ADJECTIVES, 2, replace=False))
        if relation == "subject":
            related, query, key = f"{time} the {noun} {place} the {second} {verb} .", 6, 2
            unrelated = f"{place} the {noun} {time} the {second} {verb} ."
        elif relation == "determiner":
            related, query, key = f"the {first} {next_} {plural} {verb} .", 3, 0
            unrelated = f"the {second} {seeing} {plural} {time} ."
        elif relation == "bracket":
            related, query, key = f"( the {noun} {verb} ) ( {time} ) .", 4, 0
            unrelated = f"( the ( {noun} ) {verb} ) {time} ."
        else:
            related, query, key = f"the {noun} {seeing} the {noun} {time} .", 4, 1
            unrelated = f"the {second} {seeing} the {noun} {time} ."
        for text, is_related in ((related, True), (unrelated, False)):
            built.append(Built(tuple(text.split()), query, key, is_related, group))
    return built


def minimal_pair(relation: str, seed: int = 0) -> str:
    """The first minimal pair in words.

    >>> minimal_pair("bracket")
    ') → ( in “( the dog fell ) ( then ) .” and not in “( the ( dog ) fell ) then .”'
    """
    related, unrelated = build(relation, 1, seed)
    pair, other = (f"{each.words[each.query]} → {each.words[each.key]}" for each in (related, unrelated))
    against = "not in" if pair == other else f"not {other} in"
    return f"{pair} in “{' '.join(related.words)}” and {against} “{' '.join(unrelated.words)}”"


def last_tokens(model: LensModel, words: tuple[str, ...]) -> tuple[list[int], list[int]] | None:
    """A sentence's ids and where each word ends in them; None if the tokenizer mixes the words."""
    ids, plain = model.encode(" ".join(words)), model.encode(" ".join(words), special=False)
    start = start_of(ids, plain)
    ends = []
    for count in range(1, len(words) + 1):
        beginning = model.encode(" ".join(words[:count]), special=False)
        if not beginning or plain[: len(beginning)] != beginning:
            return None
        ends.append(start + len(beginning) - 1)
    return (ids, ends) if len(set(ends)) == len(ends) else None
