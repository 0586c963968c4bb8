"""The state of the page is its address: every link is a state, and a state that came by mail opens as it was sent.

Nothing of an address is trusted: names must be in the catalogue, numbers in range, words among the known ones. What is
not becomes the default and a sentence for the reader.
"""

import dataclasses
import math
import re
from typing import Any
from urllib.parse import parse_qsl, urlencode

MAX_ADDRESS = 4096
MAX_INSTANCE = 2**31 - 1
MAX_TEXT = 240
CLICKS = ("query", "key", "edit")
KEYS = ("key", "all")
START_PAIR = (2, 1)
"""Query and key that a sentence opens with: two tokens, the key first, so that a causal model has a code for them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What an address may ask of one model: its task's sizes."""

    kind: str
    """The view: puzzle, function, plain; or lens."""
    length: int = 1
    """Tokens of a sequence."""
    layers: int = 1
    splits: tuple[str, ...] = ()
    rule_ids: tuple[int, ...] = ()
    num_features: int = 0
    num_values: int = 0
    num_visible: int = 0
    """SRAVEN: tokens that can be edited."""
    num_terms: int = 0
    num_variables: int = 0
    query: int = 0
    """The first answering token: chosen unless the address says otherwise."""
    key: int | None = None
    """The key that the first answering token is first seen with; itself unless given."""
    donor_rules: tuple[int, ...] = ()
    """SRAVEN: rules that a puzzle can be rewritten to, for a patch."""

    @property
    def split(self) -> str:
        return "compositional" if "compositional" in self.splits else next(iter(self.splits), "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """All that the page shows, in the words of the address."""

    model: str
    other: str = ""
    """A second model, of the same task, to compare with."""
    split: str = ""
    n: int = 0
    """The instance of the split."""
    rules: tuple[int, ...] = ()
    """SRAVEN, a drawn puzzle: the rule of each feature."""
    terms: tuple[int, ...] = ()
    """Fuzzy logic, a drawn function: its terms."""
    seed: int = 0
    """Of what is drawn."""
    shuffle: bool = True
    """Whether a drawn puzzle hides its features behind a permutation in each column."""
    edits: tuple[tuple[int, int], ...] = ()
    """(token, value) of cells set by hand."""
    point: tuple[float, ...] = ()
    """Fuzzy logic: the hidden point, where it was moved to."""
    axes: tuple[int, ...] = ()
    """Fuzzy logic: the two variables of the pictures."""
    layer: int = 0
    query: int = 0
    key: int = 0
    click: str = "key"
    """What a click on a token does."""
    shown: bool = False
    guess: tuple[int, ...] = ()
    """The reader's own answer per feature, -1 where there is none yet."""
    donor: str = ""
    """Where the patch takes its codes from: n-INSTANCE, rule-ID, terms-A.B."""
    swap: str = "all"
    """Which keys' codes are patched: the chosen key's or all."""
    deep: bool = False
    """Patch all layers, not the chosen one alone."""
    around: str = "key"
    """The map is of the chosen pair's codes, or of the query's codes to all keys."""
    text: str = ""

    @property
    def drawn(self) -> bool:
        return bool(self.rules or self.terms)

    def change(self, **changes: Any) -> "State":
        return dataclasses.replace(self, **changes)

    def link(self, **changes: Any) -> str:
        """The address of this state with changes."""
        return self.change(**changes).search()

    def visit(self, split: str, row: int) -> "State":
        """Another instance, and nothing of what was drawn or changed by hand."""
        return self.change(split=split, n=row, rules=(), terms=(), edits=(), point=(), guess=())

    def search(self) -> str:
        """`?model=…`: what differs from the plain state of the model; layer, query and key are always said."""
        words: dict[str, str] = {"model": self.model}
        if self.text:
            words["text"] = self.text
        plain = State(model=self.model)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("model", "text") or value == getattr(plain, field.name):
                continue
            words[field.name] = _word(field.name, value)
        words |= {"layer": str(self.layer), "query": str(self.query), "key": str(self.key)}
        return "?" + urlencode(words)


def start(model: str, **words: str) -> str:
    """The address of a model's start page."""
    return "?" + urlencode({"model": model, **words}, safe="/")


def _word(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if name == "edits":
        return ".".join(f"{token}-{number}" for token, number in value)
    if name == "point":
        return "_".join(f"{x:.3f}" for x in value)
    if name == "guess":
        return ".".join("" if number < 0 else str(number) for number in value)
    if isinstance(value, tuple):
        return ".".join(map(str, value))
    return str(value)


def parse(search: Any, limits: dict[str, Limits], peers: dict[str, list[str]], text: str) -> tuple[State, list[str]]:
    """The state that an address means, and a sentence for everything in it that means nothing.

    `limits` has every model of the catalogue, `peers` the models that each can be compared with, `text` the sentence
    that a lens starts with.
    """
    reader = _Reader(search)
    chosen = reader.words.get("model") in limits
    name = reader.choice("model", tuple(limits), next(iter(limits)))
    known = limits[name]
    state = State(
        model=name,
        # An address that names no model opens with two side by side, where there are two.
        other=reader.choice("other", ("", *peers[name]), "" if chosen else next(iter(peers[name]), "")),
        layer=reader.number("layer", known.layers - 1, known.layers - 1),
        shown=reader.flag("shown", False),
        around=reader.choice("around", KEYS, "key"),
        click=reader.choice("click", CLICKS if known.kind == "puzzle" else CLICKS[:2], "key"),
    )
    if known.kind == "lens":
        state = state.change(text=reader.text("text", text))
        # How many tokens a sentence has is known once it was read.
        query, key = START_PAIR
        state = state.change(query=reader.number("query", 511, query), key=reader.number("key", 511, key))
        return state, reader.finish()
    query = reader.number("query", known.length - 1, known.query)
    state = state.change(
        query=query,
        key=reader.number(
            "key", known.length - 1, known.key if known.key is not None and query == known.query else query
        ),
        split=reader.choice("split", known.splits, known.split),
        n=reader.number("n", MAX_INSTANCE, 0),
        seed=reader.number("seed", MAX_INSTANCE, 0),
        swap=reader.choice("swap", KEYS, "all"),
        deep=reader.flag("deep", False),
    )
    if known.kind == "puzzle":
        state = state.change(
            rules=reader.numbers("rules", known.num_features, known.rule_ids),
            shuffle=reader.flag("shuffle", True),
            edits=reader.edits("edits", known.num_visible, known.num_values),
            guess=reader.guess("guess", known.num_features, known.num_values),
            donor=reader.donor(rules=known.donor_rules),
        )
    elif known.kind == "function":
        everything = tuple(range(2**known.num_variables))
        state = state.change(
            terms=reader.numbers("terms", known.num_terms, everything, distinct=True),
            point=reader.point("point", known.num_variables),
            axes=reader.numbers("axes", 2, tuple(range(known.num_variables)), distinct=True),
            donor=reader.donor(terms=(known.num_terms, everything)),
        )
    else:
        state = state.change(donor=reader.donor())
    return state, reader.finish()


class _Reader:
    """Takes parameters from an address one by one; what is wrong is noted and replaced."""

    def __init__(self, search: Any) -> None:
        self.notices: list[str] = []
        self.words: dict[str, str] = {}
        if search is None or search == "":
            return
        if not isinstance(search, str) or len(search) > MAX_ADDRESS:
            self.notices.append("The address was not understood: it is too long or no text.")
            return
        try:
            pairs = parse_qsl(search.removeprefix("?"), keep_blank_values=True, max_num_fields=40, errors="strict")
        except (ValueError, UnicodeError):
            self.notices.append("The address was not understood.")
            return
        self.words = dict(pairs)

    def finish(self) -> list[str]:
        if self.words:
            self.notices.append(f"The address has parameters that mean nothing here: {_quote(', '.join(self.words))}.")
        return self.notices

    def _wrong(self, name: str, word: str, allowed: str) -> None:
        self.notices.append(f"{name}={_quote(word)} is not possible here; {allowed}.")

    def choice(self, name: str, options: tuple[str, ...], default: str) -> str:
        word = self.words.pop(name, default)
        if word in options:
            return word
        shown = [option for option in options if option][:8]
        self._wrong(name, word, f"it can be {', '.join(shown)}" if shown else "there is nothing to choose")
        return default

    def flag(self, name: str, default: bool) -> bool:
        return self.choice(name, ("0", "1"), "1" if default else "0") == "1"

    def number(self, name: str, most: int, default: int) -> int:
        word = self.words.pop(name, None)
        if word is None:
            return default
        if (found := _whole(word)) is not None and found <= most:
            return found
        self._wrong(name, word, f"it is a whole number from 0 to {most}")
        return default

    def numbers(self, name: str, count: int, allowed: tuple[int, ...], distinct: bool = False) -> tuple[int, ...]:
        word = self.words.pop(name, None)
        if word is None or word == "":
            return ()
        if (found := _several(word, count, allowed, distinct)) is not None:
            return found
        different = " different" if distinct else ""
        self._wrong(
            name, word, f"it is {count}{different} numbers from {allowed[0]} to {allowed[-1]} with dots between"
        )
        return ()

    def edits(self, name: str, tokens: int, values: int) -> tuple[tuple[int, int], ...]:
        word = self.words.pop(name, "")
        if not word:
            return ()
        found: dict[int, int] = {}
        for part in word.split("."):
            match = re.fullmatch(r"(\d{1,4})-(\d{1,4})", part, re.ASCII)
            if match is None or int(match[1]) >= tokens or int(match[2]) >= values:
                self._wrong(name, word, f"it is token-value pairs with dots between, tokens below {tokens}")
                return ()
            found[int(match[1])] = int(match[2])
        return tuple(sorted(found.items()))

    def guess(self, name: str, features: int, values: int) -> tuple[int, ...]:
        word = self.words.pop(name, "")
        if not word:
            return ()
        numbers = [-1 if part == "" else _whole(part) for part in word.split(".")]
        if len(numbers) != features or any(number is None or number >= values for number in numbers):
            self._wrong(name, word, f"it is {features} numbers below {values} with dots between")
            return ()
        return tuple(number for number in numbers if number is not None)

    def point(self, name: str, variables: int) -> tuple[float, ...]:
        word = self.words.pop(name, "")
        if not word:
            return ()
        parts = word.split("_")
        # Plain decimals alone: float() would take "nan", "1e400" and more.
        if len(parts) == variables and all(re.fullmatch(r"[01](\.\d{1,6})?", part, re.ASCII) for part in parts):
            numbers = tuple(float(part) for part in parts)
            if all(0 <= x <= 1 and math.isfinite(x) for x in numbers):
                return numbers
        self._wrong(name, word, f"it is {variables} numbers from 0 to 1 with _ between")
        return ()

    def donor(self, rules: tuple[int, ...] = (), terms: tuple[int, tuple[int, ...]] | None = None) -> str:
        word = self.words.pop("donor", "")
        if not word:
            return ""
        kind, _, rest = word.partition("-")
        if kind == "n" and (number := _whole(rest)) is not None and number <= MAX_INSTANCE:
            return f"n-{number}"
        if kind == "rule" and _whole(rest) in rules:
            return f"rule-{_whole(rest)}"
        if kind == "terms" and terms is not None and (found := _several(rest, *terms, True)) is not None:
            return f"terms-{'.'.join(map(str, found))}"
        self._wrong(
            "donor", word, f"it is n-INSTANCE{' or terms-A.B' if terms else ' or rule-NUMBER' if rules else ''}"
        )
        return ""

    def text(self, name: str, default: str) -> str:
        word = self.words.pop(name, default)
        text = " ".join("".join(c if c.isprintable() else " " for c in word).split())
        if not text:
            return default
        if len(text) > MAX_TEXT:
            self.notices.append(f"The sentence was cut after {MAX_TEXT} characters.")
        return text[:MAX_TEXT]


def _several(word: str, count: int, allowed: tuple[int, ...], distinct: bool) -> tuple[int, ...] | None:
    numbers = [_whole(part) for part in word.split(".")]
    if len(numbers) != count or any(number is None or number not in allowed for number in numbers):
        return None
    if distinct and len(set(numbers)) < count:
        return None
    return tuple(number for number in numbers if number is not None)


def _whole(word: str) -> int | None:
    return int(word) if re.fullmatch(r"\d{1,10}", word, re.ASCII) else None


def _quote(word: str) -> str:
    return word if len(word) <= 40 else word[:39] + "…"
