"""What is wrong with a command's arguments, as one sentence: what was given, what is allowed, where to read more."""

import dataclasses
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tyro

from headcode.config import in_words
from headcode.suggest import nearest_word


class Argument(NamedTuple):
    """An argument of a command."""

    name: str
    """--steps; of a positional one its name alone."""
    kind: Any
    required: bool

    @property
    def positional(self) -> bool:
        return not self.name.startswith("--")


def in_one_sentence(command: type, prog: str, given: Sequence[str], complaint: str) -> str:
    """The mistake for which tyro refused what was given: in our words where they are known, else in tyro's own."""
    known = {argument.name: argument for argument in arguments_of(command)}
    words = _plain(complaint)
    more = f"{prog} --help shows what there is."
    if words.startswith("Unrecognized options"):
        return _unknown(prog, given, list(known), more)
    if words.startswith("Required options"):
        needed = [argument.name.upper() for argument in known.values() if argument.required]
        return f"{prog} needs {', '.join(needed) or 'more'}; {more}"
    if found := re.search(r"(?:Error parsing |for argument ')([^\s':]+)", words):
        flag = found[1].partition("/")[0]
        argument = known.get(flag) or next((each for each in known.values() if each.positional), None)
        if argument is not None:
            values = _values(given, flag) if not argument.positional else list(given[:1])
            wanted = in_words(argument.kind)
            if not values or words.startswith("Missing"):
                return f"{argument.name} needs a value: {wanted}."
            return f"{argument.name} must be {wanted}, got {' '.join(values)!r:.200}."
    return words or f"{prog} could not read its arguments; {more}"


def arguments_of(command: type) -> Iterator[Argument]:
    """The arguments of a command's dataclass, those of its groups and --no-x of switches among them."""
    hints = typing.get_type_hints(command, include_extras=True)
    for field in dataclasses.fields(command):
        kind, notes = _opened(hints[field.name])
        if dataclasses.is_dataclass(kind):
            yield from arguments_of(typing.cast(type, kind))
            continue
        shown = next((note.name for note in notes if getattr(note, "name", None)), None)
        name = (shown or field.name).replace("_", "-")
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if tyro.conf.Positional in notes:
            yield Argument(name, kind, required)
            continue
        yield Argument(f"--{name}", kind, required)
        if kind is bool:
            yield Argument(f"--no-{name}", kind, False)


def _opened(kind: Any) -> tuple[Any, list[Any]]:
    """A type without its annotations, and these."""
    notes: list[Any] = []
    while hasattr(kind, "__metadata__"):
        notes += kind.__metadata__
        kind = kind.__origin__
    return kind, notes


def _unknown(prog: str, given: Sequence[str], known: Sequence[str], more: str) -> str:
    for word in given:
        flag = _flag(word)
        if flag.startswith("--") and flag not in known:
            near = nearest_word(flag, known)
            asked = f"; did you mean {near}?" if near else "."
            return f"{prog} has no option {flag:.200}{asked} {more}"
    if single := [word for word in given if re.match(r"-[^-\d.]", word)]:
        return f"{prog} has no option {single[0]:.200}. {more}"
    return f"{prog} was given words that it does not know in {' '.join(given)!r:.200}. {more}"


def _flag(word: str) -> str:
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def _values(given: Sequence[str], flag: str) -> list[str]:
    """The words after a flag, where it was given last."""
    for place in reversed(range(len(given))):
        if _flag(given[place]) == flag:
            _, equals, value = given[place].partition("=")
            if equals:
                return [value]
            following = list(given[place + 1 :])
            end = next((i for i, word in enumerate(following) if re.match(r"--?[^-\d.]", word)), len(following))
            return following[:end]
    return []


def _plain(complaint: str) -> str:
    """tyro's words without colours, boxes and line breaks."""
    words = re.sub(r"[^\x20-\x7e…×]+", " ", re.sub(r"\x1b\[[0-9;]*m", "", complaint))
    return re.sub(r"^Parsing error ", "", re.sub(r"\s+", " ", words).strip())
