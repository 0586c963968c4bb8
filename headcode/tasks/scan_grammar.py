"""SCAN's grammar: commands in words, the actions that they mean, and the published ways to divide them.

    command   phrase | phrase "and" phrase | phrase "after" phrase
    phrase    manner | manner "twice" | manner "thrice"
    manner    verb | verb side | verb "opposite" side | verb "around" side
    verb      "walk" | "look" | "run" | "jump" | "turn"        "turn" only with a side: to turn is no action of its own
    side      "left" | "right"

A side is turned to before the action; "opposite" turns twice and acts; "around" turns and acts four times. "twice" and
"thrice" repeat all that. "and" keeps the order of the phrases, "after" exchanges it. From Lake and Baroni,
"Generalization without systematicity" (ICML 2018), and for `around_right` Loula, Baroni and Lake, "Rearranging the
familiar" (2018).
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

VERBS = ("walk", "look", "run", "jump", "turn")
MANNERS = ("plain", "side", "opposite", "around")
SIDES = ("left", "right")
REPEATS = ("", "twice", "thrice")
CONNECTORS = ("", "and", "after")
WORDS = (*VERBS, *SIDES, *MANNERS[2:], *REPEATS[1:], *CONNECTORS[1:])
ACTIONS = ("I_WALK", "I_LOOK", "I_RUN", "I_JUMP", "I_TURN_LEFT", "I_TURN_RIGHT")
MOST_WORDS = 9
"""Of a command: two phrases of four words and what connects them."""
MOST_ACTIONS = 48
"""Of a command: "around" and "thrice", in two phrases."""
SPLITS = ("simple", "jump", "turn_left", "around_right", "length")
TRAINING_SHARE_OF_PRIMITIVE = 0.1
"""Of the training lines of `jump` and `turn_left`: the command that is taught alone, again and again."""
LONGEST_IN_TRAINING = 22
"""Actions, in the split `length`."""
NUM_SIMPLE_TEST = 4182
"""Commands that the split `simple` holds out, a fifth of all."""


class Phrase(NamedTuple):
    """A verb with its manner, side and number of times; `side` is empty where the manner is plain."""

    verb: str
    manner: str
    side: str
    times: int

    @property
    def words(self) -> list[str]:
        """
        >>> Phrase("jump", "around", "left", 2).words
        ['jump', 'around', 'left', 'twice']
        """
        manner = self.manner if self.manner in MANNERS[2:] else ""
        return [word for word in (self.verb, manner, self.side, REPEATS[self.times - 1]) if word]

    @property
    def actions(self) -> list[str]:
        """
        >>> Phrase("look", "opposite", "right", 1).actions
        ['I_TURN_RIGHT', 'I_TURN_RIGHT', 'I_LOOK']
        """
        act = [] if self.verb == "turn" else [f"I_{self.verb.upper()}"]
        turn = [f"I_TURN_{self.side.upper()}"] if self.side else []
        once = {"plain": act, "side": turn + act, "opposite": turn + turn + act, "around": 4 * (turn + act)}
        return self.times * once[self.manner]


class Command(NamedTuple):
    """One phrase, or two and their connector."""

    first: Phrase
    connector: str = ""
    second: Phrase | None = None

    @property
    def phrases(self) -> list[Phrase]:
        """In the order of the words."""
        return [self.first] if self.second is None else [self.first, self.second]

    @property
    def carried_out(self) -> list[Phrase]:
        """In the order of the actions."""
        return self.phrases[::-1] if self.connector == "after" else self.phrases

    @property
    def words(self) -> list[str]:
        return [*self.first.words, *([] if self.second is None else [self.connector, *self.second.words])]

    @property
    def actions(self) -> list[str]:
        return [action for phrase in self.carried_out for action in phrase.actions]

    def __str__(self) -> str:
        return " ".join(self.words)


@functools.cache
def all_commands() -> tuple[Command, ...]:
    """Every command of the grammar; its place here is its number."""
    manners = [(verb, "plain", "") for verb in VERBS[:4]]
    manners += list(itertools.product(VERBS, MANNERS[1:], SIDES))
    phrases = [Phrase(*manner, times) for manner in manners for times in (1, 2, 3)]
    pairs = itertools.product(phrases, CONNECTORS[1:], phrases)
    return (*map(Command, phrases), *itertools.starmap(Command, pairs))


@functools.cache
def _numbers() -> dict[str, int]:
    return {str(command): number for number, command in enumerate(all_commands())}


def parse(text: str) -> Command:
    """The command in these words.

    >>> parse("jump after walk left").actions
    ['I_TURN_LEFT', 'I_WALK', 'I_JUMP']
    """
    words = text.split()
    if unknown := [word for word in words if word not in WORDS]:
        raise ValueError(f"SCAN has no word {unknown[0]!r}; its words are: {', '.join(WORDS)}.")
    number = _numbers().get(" ".join(words))
    if number is None:
        raise ValueError(
            f"{text!r} is no command of SCAN: write a verb with its manner, side and repetition in this order, such as "
            f"'jump around left twice', and at most two of them, with and or after between."
        )
    return all_commands()[number]


def line(command: Command) -> str:
    """A command and its actions as the published files write them."""
    return f"IN: {command} OUT: {' '.join(command.actions)}"


def divide(split: str, order: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of a published split's training lines, which may repeat a command, and of its test commands.

    `order` is a random order of all commands. Only `simple`, which was drawn at random when it was published, uses it.
    """
    commands = all_commands()
    if split == "simple":
        test = np.sort(np.asarray(order)[:NUM_SIMPLE_TEST])
        return np.setdiff1d(np.arange(len(commands)), test), test
    if split == "length":
        lengths = np.array([len(command.actions) for command in commands])
        return np.flatnonzero(lengths <= LONGEST_IN_TRAINING), np.flatnonzero(lengths > LONGEST_IN_TRAINING)
    if split == "around_right":
        held_out = _with_phrase(lambda phrase: (phrase.manner, phrase.side) == ("around", "right"))
        # To turn around right is to turn right four times: the published files leave it out on both sides.
        turning = _with_phrase(lambda phrase: phrase[:3] == ("turn", "around", "right"))
        return np.flatnonzero(~held_out), np.flatnonzero(held_out & ~turning)
    taught = {"jump": ("jump", "plain", ""), "turn_left": ("turn", "side", "left")}[split]
    held_out = _with_phrase(lambda phrase: phrase.verb == "jump" if split == "jump" else phrase[:3] == taught)
    primitive = commands.index(Command(Phrase(*taught, 1)))
    others = np.flatnonzero(~held_out)
    copies = round(len(others) * TRAINING_SHARE_OF_PRIMITIVE / (1 - TRAINING_SHARE_OF_PRIMITIVE))
    held_out[primitive] = False
    return np.concatenate([others, np.full(copies, primitive)]), np.flatnonzero(held_out)


def _with_phrase(holds) -> np.ndarray:  # type: ignore[no-untyped-def]
    """Which commands have a phrase for which `holds`."""
    return np.array([any(map(holds, command.phrases)) for command in all_commands()])
