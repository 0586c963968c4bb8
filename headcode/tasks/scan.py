"""SCAN: commands in words, and the actions that carry them out, as a task from one sequence to another."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headcode.tasks.base import NOT_ASKED, Batch, Flag, Labels, Task
from headcode.tasks.scan_grammar import (
    ACTIONS,
    CONNECTORS,
    MANNERS,
    MOST_ACTIONS,
    MOST_WORDS,
    SPLITS,
    WORDS,
    Command,
    all_commands,
    divide,
)

TOKENS = ("<padding>", "<start>", "<end>", *WORDS, *ACTIONS)
"""By token number. Words and actions share one vocabulary."""
PADDING, START, END = range(3)
NUM_ANSWERS = MOST_ACTIONS + 1
"""Tokens that are answered: the actions and the end."""
AFTER_THE_END = len(MANNERS)
"""The class of answering tokens that no phrase has anything to do with."""


class Encoded(NamedTuple):
    """All commands as tokens, and what governs each of their actions."""

    words: np.ndarray
    """(command, MOST_WORDS), padded on the right."""
    actions: np.ndarray
    """(command, NUM_ANSWERS), the end last, padded on the right."""
    manner: np.ndarray
    """(command, NUM_ANSWERS): the manner of the phrase that an action belongs to; AFTER_THE_END from the end on."""
    connector: np.ndarray
    """(command,): a place in CONNECTORS."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scan(Task):
    """The actions of a command, as in: jump around left after walk  ->  WALK LEFT JUMP LEFT JUMP LEFT JUMP LEFT JUMP.

    x is the command's words, padded to 9, and behind them the start token and the actions, padded to 49: what an
    encoder-decoder with teacher forcing reads. y is what follows each of the latter: an action or the end, and -100
    where there is nothing to answer.

        x    jump around left after walk · · · ·    <start>  WALK  LEFT  JUMP …
        y                                           WALK     LEFT  JUMP  LEFT … <end>  -100 …

    A composition is a command, and `scan_split` names the published division of all 20,910 into training and test.
    `train` draws training lines with replacement; `iid` has every training command once; `compositional` has every test
    command once: none of them was in training, all of their words were. Both are in a random order, and begin anew
    after the last one. A command has one right answer, so `iid` says how well training commands were learned.

    `info` of a batch: `composition` (B,), `manner` (B, 49) of the phrase that each answer belongs to, `connector` (B,),
    `instance` (B,).
    """

    name: ClassVar[str] = "scan"
    task_id: ClassVar[int] = 5
    version: ClassVar[int] = 1
    objective: ClassVar[str] = "classification"
    main_metric: ClassVar[str] = "exact_match"
    labels: ClassVar[tuple[str, ...]] = ("composition", "manner", "connector")
    label_kind: ClassVar[str] = "manner"
    flags: ClassVar[Mapping[str, Flag]] = {"scan_split": Flag(str, "NAME", f"SCAN: one of {', '.join(SPLITS)}.")}
    model_kind: ClassVar[str] = "encoder_decoder"

    scan_split: Literal["simple", "jump", "turn_left", "around_right", "length"] = "simple"
    """What is held out: a fifth of all commands, drawn by the seed; jump or turn left in any context; around right; or
    commands of more than 22 actions."""

    @functools.cached_property
    def training_lines(self) -> np.ndarray:
        """Numbers of commands, as often as each stands in the training file."""
        return self._division[0]

    @functools.cached_property
    def split_compositions(self) -> dict[str, np.ndarray]:
        training = np.unique(self.training_lines)
        return {"train": training, "iid": training, "compositional": self._division[1]}

    @functools.cached_property
    def _division(self) -> tuple[np.ndarray, np.ndarray]:
        return divide(self.scan_split, self._stream("parts").order(0, len(all_commands())))

    @property
    def model_sizes(self) -> dict[str, int | None]:
        return {
            "input_dim": None,
            "vocab_size": len(TOKENS),
            "output_dim": len(TOKENS),
            "max_length": self.sequence_length,
            "source_length": MOST_WORDS,
        }

    @property
    def input_dim(self) -> int:
        return len(TOKENS)

    @property
    def output_dim(self) -> int:
        return len(TOKENS)

    @property
    def sequence_length(self) -> int:
        return MOST_WORDS + NUM_ANSWERS

    @property
    def queries(self) -> slice:
        return slice(-NUM_ANSWERS, None)

    @property
    def code_queries(self) -> slice:
        """The start token, from which the first action follows."""
        return slice(MOST_WORDS, MOST_WORDS + 1)

    def split_size(self, split: str) -> int | None:
        return None if split == "train" else len(self.split_compositions[self._checked_split(split)])

    def _make(self, split: str, numbers: np.ndarray) -> Batch:
        known = encoded()
        chosen = self._commands_of(split, numbers)
        actions = known.actions[chosen]
        x = np.concatenate([known.words[chosen], np.full((len(chosen), 1), START), actions[:, :-1]], 1)
        x[x == END] = PADDING
        y = np.where(actions == PADDING, NOT_ASKED, actions)
        info = {
            "composition": chosen,
            "manner": known.manner[chosen],
            "connector": known.connector[chosen],
            "instance": numbers,
        }
        return Batch(
            torch.from_numpy(x), torch.from_numpy(y), {name: torch.from_numpy(value) for name, value in info.items()}
        )

    def _commands_of(self, split: str, numbers: np.ndarray) -> np.ndarray:
        if split == "train":
            lines = self.training_lines
            return lines[self._stream(split).integers(numbers, [len(lines)])[:, 0]]
        order = self._evaluation_orders[split]
        return order[numbers % len(order)]

    @functools.cached_property
    def _evaluation_orders(self) -> dict[str, np.ndarray]:
        splits = self.split_compositions
        return {
            split: splits[split][self._stream(split).order(0, len(splits[split]))] for split in ("iid", "compositional")
        }

    def score(self, prediction: Tensor, batch: Batch) -> dict[str, float]:
        """Sums for `exact_match` and `token_accuracy` from logits (B, 49, tokens).

        The prediction is made with the right actions before each one. Greedy decoding has the same exact matches: as
        long as it is right it reads the right actions, and after its first mistake the command is lost either way.
        """
        y = batch.y.to(prediction.device)
        if prediction.shape[:2] != y.shape:
            raise ValueError(f"score takes logits {(*y.shape, len(TOKENS))}, got shape {tuple(prediction.shape)}.")
        asked = y != NOT_ASKED
        right = (prediction.argmax(-1) == y) & asked
        return {
            "count": float(len(y)),
            "exact": float((right | ~asked).all(1).sum()),
            "right": float(right.sum()),
            "tokens": float(asked.sum()),
        }

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """`exact_match`: commands whose actions and end are all right; `token_accuracy`: each after right ones."""
        return {
            "exact_match": sums["exact"] / sums["count"],
            "token_accuracy": sums["right"] / max(sums["tokens"], 1.0),
        }

    def judge(self, prediction: Tensor, batch: Batch) -> dict[str, np.ndarray]:
        answers = prediction.argmax(-1)
        right = (answers == batch.y) | (batch.y == NOT_ASKED)
        return {
            "predictions": answers.numpy(),
            "targets": batch.y.numpy(),
            "feature_correct": right.numpy(),
            "correct": right.all(1).numpy(),
        }

    def ceiling(self, split: str, size: int) -> float:
        return 1.0

    def decodable(self, codes: Mapping[str, Any]) -> Labels:
        """The manner of the phrase that an answer belongs to: plain, side, opposite, around; or after the end."""
        places = np.asarray(codes["queries"]) - MOST_WORDS
        if (places < 0).any():
            raise ValueError(f"Manners are known of answers, the tokens from {MOST_WORDS} on, not of the words.")
        return Labels(np.asarray(codes["manner"])[:, places], np.arange(AFTER_THE_END + 1), False)

    @classmethod
    def label_name(cls, label: int) -> str:
        return (*MANNERS, "after the end")[label]

    def map_labels(self, codes: Mapping[str, Any], query: int) -> dict[str, np.ndarray]:
        found = {"connector": np.asarray(codes["connector"])}
        if query >= MOST_WORDS:
            found["manner"] = np.asarray(codes["manner"])[:, query - MOST_WORDS]
        return found

    def as_text(self, batch: Batch, answer: bool = False, colour: bool = False) -> str:
        words = spelled(batch.x[0, :MOST_WORDS].tolist())
        return f"{words}\n{spelled(batch.y[0].tolist())}" if answer else words

    def remarks(self, batch: Batch, split: str, answer: bool = False) -> list[str]:
        command = all_commands()[int(batch.info["composition"][0])]
        seen = "held out" if split == "compositional" else "in training"
        return [f"{len(command.words)} words, {len(command.actions)} actions, {seen} in the split {self.scan_split}"]


def spelled(tokens: list[int]) -> str:
    """Tokens in words, up to the end.

    >>> spelled([3, 12, 0, 0])
    'walk twice'
    """
    return " ".join(TOKENS[token] for token in tokens if token > END)


def encode(words: list[str]) -> list[int]:
    """Words or actions as tokens."""
    return [TOKENS.index(word) for word in words]


@functools.cache
def encoded() -> Encoded:
    """All commands as tokens."""
    commands = all_commands()
    words = np.full((len(commands), MOST_WORDS), PADDING, dtype=np.int64)
    actions = np.full((len(commands), NUM_ANSWERS), PADDING, dtype=np.int64)
    manner = np.full((len(commands), NUM_ANSWERS), AFTER_THE_END, dtype=np.int64)
    numbers = {word: number for number, word in enumerate(TOKENS)}
    for row, command in enumerate(commands):
        words[row, : len(command.words)] = [numbers[word] for word in command.words]
        done = [numbers[action] for action in command.actions]
        actions[row, : len(done) + 1] = [*done, END]
        manner[row, : len(done)] = _manners(command)
    connector = np.array([CONNECTORS.index(command.connector) for command in commands])
    return Encoded(words, actions, manner, connector)


def _manners(command: Command) -> list[int]:
    return [MANNERS.index(phrase.manner) for phrase in command.carried_out for _ in phrase.actions]
