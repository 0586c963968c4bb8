"""Sentences about a word that is none of those that there are: the nearest one, then all of them."""

import difflib
from collections.abc import Iterable


def nearest_word(word: str, options: Iterable[str]) -> str | None:
    """The option that is most like the word, if one is like it at all.

    >>> nearest_word("num_pionts", ["num_points", "num_terms"])
    'num_points'
    """
    found = difflib.get_close_matches(word, list(options), n=1, cutoff=0.7)
    return found[0] if found else None


def no_such(beginning: str, word: str, options: Iterable[str], listed: str) -> str:
    """The sentence for a word that is none of the options.

    >>> no_such("There is no command", "trian", ["train", "eval"], "the commands are")
    "There is no command 'trian'; did you mean 'train'? The commands are: train, eval."
    >>> no_such("There is no command", "xyz", ["train", "eval"], "the commands are")
    "There is no command 'xyz'; the commands are: train, eval."
    """
    known = list(options)
    near = nearest_word(word, known)
    rest = f"{listed}: {', '.join(known) or 'none'}."
    if near is None:
        return f"{beginning} {word!r:.200}; {rest}"
    return f"{beginning} {word!r:.200}; did you mean {near!r}? {rest[0].upper()}{rest[1:]}"
