"""SCAN's grammar against what was published, a table of expectations, and a second interpreter."""

import hashlib
import re

import numpy as np
import pytest

from headcode.tasks.scan_grammar import SPLITS, WORDS, all_commands, divide, line, parse
from tests.support import GOLDENS

ACTIONS = dict(zip("wlrj<>", ("I_WALK", "I_LOOK", "I_RUN", "I_JUMP", "I_TURN_LEFT", "I_TURN_RIGHT"), strict=True))
EXPECTED = [row.split("  ") for row in re.sub("  +", "  ", (GOLDENS / "scan_commands.txt").read_text()).splitlines()]
EXPECTED = [(row[0], row[1]) if len(row) == 2 else tuple(row[0].rsplit(" ", 1)) for row in EXPECTED]


@pytest.mark.parametrize(("words", "letters"), EXPECTED)
def test_a_command_means_what_the_table_says(words, letters):
    assert parse(words).actions == [ACTIONS[letter] for letter in letters]


def test_the_table_has_200_commands_of_every_word():
    assert len(EXPECTED) == len({words for words, _ in EXPECTED}) == 200
    assert {word for words, _ in EXPECTED for word in words.split()} == set(WORDS)


@pytest.mark.parametrize(
    ("text", "actions"),
    [
        # Lines of the published file tasks.txt, in short.
        ("jump opposite right thrice after look opposite left twice", "<<l<<l>>j>>j>>j"),
        ("walk right and turn around left thrice", ">w<<<<<<<<<<<<"),
        ("turn right after jump opposite left", "<<j>"),
        ("look left twice and jump thrice", "<l<ljjj"),
        ("run around right thrice after turn around right twice", ">>>>>>>>>r>r>r>r>r>r>r>r>r>r>r>r"),
        ("turn opposite left twice after look right", ">l<<<<"),
        ("walk thrice after run around right twice", ">r>r>r>r>r>r>r>rwww"),
        ("run left after turn around left thrice", "<<<<<<<<<<<<<r"),
        ("jump left twice", "<j<j"),
        ("turn left", "<"),
    ],
)
def test_published_lines_are_met(text, actions):
    assert parse(text).actions == [ACTIONS[letter] for letter in actions]


def letters_of(text):
    """A second interpreter, which takes the text apart from its end."""
    for connector in (" and ", " after "):
        if connector in text:
            parts = [letters_of(part) for part in text.split(connector)]
            return "".join(parts if connector == " and " else reversed(parts))
    for word, times in ((" twice", 2), (" thrice", 3)):
        if text.endswith(word):
            return times * letters_of(text.removesuffix(word))
    verb, *rest = text.split()
    act = "" if verb == "turn" else verb[0]
    if not rest:
        return act
    turn = "<" if rest[-1] == "left" else ">"
    return {"opposite": 2 * turn + act, "around": 4 * (turn + act)}.get(rest[0], turn + act)


def test_all_commands_mean_what_a_second_interpreter_says():
    commands = all_commands()
    assert len(commands) == len({str(command) for command in commands}) == 20_910
    for command in commands:
        assert command.actions == [ACTIONS[letter] for letter in letters_of(str(command))], command


def test_the_longest_commands_are_as_long_as_published():
    assert max(len(command.words) for command in all_commands()) == 9
    assert max(len(command.actions) for command in all_commands()) == 48


ORDER = np.random.default_rng(0).permutation(20_910)
# Lines of training, different ones among them, lines of test: as published.
SIZES = {
    "simple": (16_728, 16_728, 4182),
    "jump": (14_670, 13_204, 7706),
    "turn_left": (21_890, 19_702, 1208),
    "around_right": (15_225, 15_225, 4476),
    "length": (16_990, 16_990, 3920),
}


@pytest.mark.parametrize("split", SPLITS)
def test_splits_have_their_published_sizes_and_share_no_command(split):
    training, test = divide(split, ORDER)
    assert (len(training), len(np.unique(training)), len(test)) == SIZES[split]
    assert not set(training) & set(test) and len(np.unique(test)) == len(test)


def characters(numbers):
    return sum(len(line(all_commands()[number])) + 1 for number in numbers)


def test_files_have_as_many_characters_as_the_published_ones():
    """Those of tasks.txt and the two files of the split turn_left in the published repository."""
    assert characters(range(20_910)) == 4_080_388
    assert [characters(part) for part in divide("turn_left", ORDER)] == [3_974_537, 173_679]


@pytest.mark.parametrize(
    ("manner", "training", "test"), [("side", 3_173_282, 729_823), ("opposite", 2_990_057, 871_363)]
)
def test_the_rule_of_around_right_gives_the_published_files_of_its_sister_splits(manner, training, test):
    """Their files were at hand, that of around_right was not: a manner to the right is held out, turning left out."""
    rights = [[p for p in command.phrases if (p.manner, p.side) == (manner, "right")] for command in all_commands()]
    assert characters([number for number, held_out in enumerate(rights) if not held_out]) == training
    held_out = [n for n, found in enumerate(rights) if found and all(phrase.verb != "turn" for phrase in found)]
    assert characters(held_out) == test


HASHES = {
    "jump": ("0683daacfdce23cf", "522454c6280eab95"),
    "turn_left": ("e0c26b51b6bba265", "14dd6316d16204d2"),
    "around_right": ("f2b91818e1216d5c", "8e1297eb61d98ff6"),
    "length": ("7ffb97f45029871c", "3297fd0b676c391f"),
}


def content_hash(numbers):
    """Of the lines in alphabetical order, as the published files write them."""
    return hashlib.sha256("".join(sorted(f"{line(all_commands()[n])}\n" for n in numbers)).encode()).hexdigest()[:16]


@pytest.mark.parametrize("split", SPLITS[1:])
def test_the_hashes_of_split_files_are_fixed(split):
    assert tuple(map(content_hash, divide(split, ORDER))) == HASHES[split]


def test_what_is_held_out_is_what_the_split_says():
    texts = [str(command) for command in all_commands()]
    held_out = {split: {texts[n] for n in divide(split, ORDER)[1]} for split in SPLITS}
    training = {split: {texts[n] for n in divide(split, ORDER)[0]} for split in SPLITS}
    assert {text for text in training["jump"] if "jump" in text} == {"jump"}
    assert {text for text in training["turn_left"] if "turn left" in text} == {"turn left"}
    assert {"turn around left", "turn opposite left"} <= training["turn_left"]
    assert all("around right" in text and "turn around right" not in text for text in held_out["around_right"])
    assert not any("around right" in text for text in training["around_right"])
    longest = [max(len(parse(text).actions) for text in part) for part in (training["length"], held_out["length"])]
    assert longest == [22, 48] and min(len(parse(text).actions) for text in held_out["length"]) == 24


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hop twice", "no word 'hop'"),
        ("jump twice left", "is no command of SCAN"),
        ("turn", "is no command of SCAN"),
        ("walk and run and jump", "is no command of SCAN"),
        ("", "is no command of SCAN"),
    ],
)
def test_other_words_are_refused_in_a_sentence(text, words):
    with pytest.raises(ValueError, match=words):
        parse(text)
