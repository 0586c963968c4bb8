"""How values are written on the command line, for `headcode sweep --set` and `headcode results --where`."""

from typing import Any

from headcode.files import parse_json

_WORDS = {"True": True, "False": False, "None": None}


def split_values(text: str) -> list[str]:
    """The parts between commas that stand outside of brackets.

    >>> split_values("0.5,[[0,1],[100,0]]")
    ['0.5', '[[0,1],[100,0]]']
    """
    parts, depth = [""], 0
    for character in text:
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def value_of(text: str) -> Any:
    """A number, true or false, null or a list as JSON or Python has them; anything else is a word.

    >>> [value_of(text) for text in ("3", "true", "True", "None", "[0,1]", "hyla")]
    [3, True, True, None, [0, 1], 'hyla']
    """
    if text in _WORDS:
        return _WORDS[text]
    try:
        return parse_json(text)
    except ValueError:
        return text
