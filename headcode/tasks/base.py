"""What every task is: a frozen configuration whose instances are pure functions of (seed, split, instance number).

    task.sample("train", index, batch_size)    batch `index` of that size: instances index·size … index·size+size-1
    task.instances("train", [5, 3, 8])         any instances, in any order: the same bytes as in any batch
    task.score(prediction, batch)              sums that add up over batches; task.metrics(sums) divides at the end

The random numbers come from `streams`; the compositions of the splits come from the seed by `divide` below.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headcode.config import Config
from headcode.memory import aligned
from headcode.tasks.streams import MAX_INSTANCE, MAX_SEED, Stream

# A random division that must cover every part is redrawn at most this often before we say that it cannot be made.
MAX_REDRAWS = 2000
# … and less often where there are many compositions, so that nobody waits for minutes: so many in all draws together.
MAX_DRAWN = 10_000_000
MAX_COMPOSITIONS = 1_000_000
NOT_ASKED = -100  # the class that cross-entropy leaves out


class Batch(NamedTuple):
    """What a task gives: model inputs, targets, and what is known about each instance (all CPU tensors)."""

    x: Tensor
    y: Tensor
    info: dict[str, Tensor]

    def aligned(self) -> "Batch":
        """The same batch, whose results do not depend on where NumPy had room for it."""
        return Batch(aligned(self.x), aligned(self.y), self.info)

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        moved = {name: value.to(device) for name, value in self.info.items()}
        return Batch(self.x.to(device), self.y.to(device), moved)


@dataclasses.dataclass(frozen=True)
class Questions:
    """Questions of one kind about every token, which training can answer beside the task itself: hints."""

    name: str
    depth: int
    """They are put to the tokens before the last so many layers: 1, and others without a gap."""
    count: int
    """So many questions about a token …"""
    size: int
    """… with so many possible answers each."""
    weight: float
    """Of the mean over all answers in the loss."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(Config):
    """Base of the tasks. A task is its configuration: equal ones are equal, hash alike, pickle small."""

    name: ClassVar[str]
    """The word for the task on the command line and in files."""
    task_id: ClassVar[int]
    """The task's own part of the random addresses; never used twice."""
    version: ClassVar[int]
    """Version of the generator: raised whenever the bytes of any instance change."""
    objective: ClassVar[str]
    """`regression` (squared error on y) or `classification` (cross-entropy on y)."""
    newer_fields: ClassVar[tuple[str, ...]] = ()
    """Fields younger than the first published instances: a fingerprint names them only where they are set."""
    scores_in_place: ClassVar[bool] = False
    """`score` takes the outputs as the model gives them and sums the loss itself: for outputs too large to copy."""

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed must lie in 0..2**64-1, got {self.seed}.")

    def __reduce__(self) -> tuple[Any, ...]:
        # Caches stay behind: a worker process gets the configuration and makes its own.
        return type(self).from_dict, (self.to_dict(),)

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that this configuration has."""
        return tuple(self.split_compositions)

    @functools.cached_property
    def split_compositions(self) -> dict[str, np.ndarray]:
        """For each split the ids of its compositions: rows of `compositions`."""
        raise NotImplementedError

    @property
    def input_dim(self) -> int:
        """Channels of one token of x."""
        raise NotImplementedError

    @property
    def output_dim(self) -> int:
        """Channels that a model must give for each token that is read."""
        raise NotImplementedError

    @property
    def sequence_length(self) -> int:
        """Tokens of x."""
        raise NotImplementedError

    @property
    def queries(self) -> slice:
        """The tokens whose outputs are the prediction, always the last ones."""
        raise NotImplementedError

    @property
    def model_queries(self) -> slice | None:
        """`queries` as a model takes them: None for all."""
        return None if self.queries == slice(None) else self.queries

    @property
    def model_sizes(self) -> dict[str, int | None]:
        """The fields of a ModelConfig that the task decides."""
        return {"input_dim": self.input_dim, "output_dim": self.output_dim, "max_length": self.sequence_length}

    @property
    def questions(self) -> tuple[Questions, ...]:
        """What hints tell about the tokens of training instances; nothing for most tasks."""
        return ()

    @property
    def hint_dims(self) -> tuple[int, ...]:
        """How many outputs the heads of a model need for `questions`, from the last layer back."""
        depths = range(1, max((asked.depth for asked in self.questions), default=0) + 1)
        return tuple(sum(q.count * q.size for q in self.questions if q.depth == depth) for depth in depths)

    def hints(self, batch: Batch) -> list[Tensor]:
        """The answers to `questions`, each (B, T, count), -100 where there is none."""
        raise NotImplementedError

    @property
    def period(self) -> int | None:
        """Tokens after which a position means the same again, such as a row of a grid; None if there is none."""
        return None

    def split_size(self, split: str) -> int | None:
        """How many instances a split has; None if there is no end to them."""
        return None

    def run_files(self) -> dict[str, bytes]:
        """Files of the task in a run folder, by name."""
        return {}

    def read_run_files(self, run_folder: Path) -> None:
        """Read the `run_files` of a run folder."""

    def sample(self, split: str, index: int, batch_size: int) -> Batch:
        """Batch `index` of size `batch_size`: instances index·batch_size … index·batch_size + batch_size - 1."""
        if not _is_integer(index) or index < 0:
            raise ValueError(f"index counts batches from 0, got {index!r}.")
        if not _is_integer(batch_size) or batch_size < 1:
            raise ValueError(f"batch_size must be a whole number, 1 or more, got {batch_size!r}.")
        if (int(index) + 1) * int(batch_size) > MAX_INSTANCE:
            raise ValueError(f"Instance numbers end at 2**63-1; batch {index} of size {batch_size} lies beyond.")
        first = int(index) * int(batch_size)
        numbers = np.arange(first, first + int(batch_size), dtype=np.int64)
        return self._make(self._checked_split(split), numbers).aligned()

    def instances(self, split: str, numbers: Sequence[int] | np.ndarray | Tensor) -> Batch:
        """The instances with these numbers, in this order."""
        return self._make(self._checked_split(split), check_instances(numbers)).aligned()

    def fingerprint(self, split: str, count: int, start: int = 0, chunk: int = 4096) -> str:
        """SHA-256 of the configuration, the generator's version and the bytes of `count` instances."""
        digest = hashlib.sha256(json.dumps(self.identity(split, count, start), sort_keys=True).encode())
        for first in range(start, start + count, chunk):
            digest.update(instance_bytes(self.instances(split, np.arange(first, min(first + chunk, start + count)))))
        return digest.hexdigest()

    def identity(self, split: str, count: int, start: int = 0) -> dict[str, Any]:
        """What fixes the bytes of a stretch of instances: task, version, configuration, split and range."""
        split = self._checked_split(split)
        if not _is_integer(start) or not _is_integer(count) or start < 0 or count < 1:
            raise ValueError(f"A stretch of instances starts at 0 or later and has 1 or more, got {start} and {count}.")
        if start + count > MAX_INSTANCE:
            raise ValueError(f"Instance numbers end below 2**63-1; {count} from {start} on lie beyond.")
        defaults = {field.name: field.default for field in dataclasses.fields(self) if field.name in self.newer_fields}
        unset = {name for name, default in defaults.items() if getattr(self, name) == default}
        return {
            "task": self.name,
            "generator_version": self.version,
            "config": {name: value for name, value in self.to_dict().items() if name not in unset},
            "split": split,
            "start": int(start),
            "count": int(count),
        }

    def score(self, prediction: Tensor, batch: Batch) -> dict[str, float]:
        """Sums over the batch, to be added up over batches and given to `metrics`."""
        raise NotImplementedError

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The task's metrics from accumulated sums."""
        raise NotImplementedError

    def _make(self, split: str, numbers: np.ndarray) -> Batch:
        raise NotImplementedError

    def _stream(self, name: str) -> Stream:
        return Stream(self.seed, self.task_id, self.version, name)

    def _checked_split(self, split: str) -> str:
        if split not in self.split_compositions:
            known = ", ".join(map(repr, self.splits))
            raise ValueError(f"This {type(self).__name__} has no split {split!r}; its splits are {known}.")
        return split


def check_instances(numbers: Sequence[int] | np.ndarray | Tensor) -> np.ndarray:
    """Instance numbers as int64, or one clear sentence."""
    array = np.asarray(numbers)
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= MAX_INSTANCE:
        raise ValueError("Instance numbers are a list of whole numbers from 0 on, below 2**63-1.")
    return array.astype(np.int64)


def instance_bytes(batch: Batch) -> bytes:
    """All tensors of a batch, instance after instance: the same bytes however the instances were batched."""
    tensors = [batch.x, batch.y, *(batch.info[key] for key in sorted(batch.info))]
    rows = [np.ascontiguousarray(tensor.numpy()).reshape(len(tensor), -1).view(np.uint8) for tensor in tensors]
    return np.concatenate(rows, axis=1).tobytes()


def add_sums(total: dict[str, float], sums: Mapping[str, float]) -> dict[str, float]:
    """Adds a batch's sums to the total, in place, and returns it.

    >>> add_sums(add_sums({}, {"count": 2.0, "right": 1.0}), {"count": 2.0, "right": 2.0})
    {'count': 4.0, 'right': 3.0}
    """
    for key, value in sums.items():
        total[key] = total.get(key, 0.0) + value
    return total


def whole_share(share: float, count: int) -> int:
    """How many of `count` things a share is, rounded down; 0.29 of 100 is 29 in spite of binary fractions."""
    return int(share * count + 1e-9)


def check_share(name: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"{name} is a share and must lie in 0..1, got {share}.")


def divide(
    stream: Stream, members: np.ndarray, parts: np.ndarray, num_held_out: int, *, part: str, cover_held_out: bool
) -> np.ndarray:
    """Which of the compositions are held out, drawn uniformly until every part occurs in training.

    members is (composition, n), the part ids of each composition, and parts lists the ids that must occur; the
    result is (composition,) with True for held out. With `cover_held_out` every part must occur among the held-out
    ones too.
    """
    count = len(members)
    held_out = np.zeros(count, dtype=bool)
    if num_held_out == 0:
        return held_out

    def covers(chosen: np.ndarray) -> bool:
        occurs = np.zeros(parts.max() + 1, dtype=bool)
        occurs[members[chosen]] = True
        return bool(occurs[parts].all())

    draws = min(MAX_REDRAWS, max(MAX_DRAWN // count, 10))
    for attempt in range(draws):
        held_out[:] = False
        held_out[stream.order(attempt, count)[:num_held_out]] = True
        if covers(~held_out) and (not cover_held_out or covers(held_out)):
            return held_out
    where = "both in training and held out" if cover_held_out else "in training"
    raise ValueError(
        f"Holding out {num_held_out} of {count} compositions, no split was found in which every {part} occurs {where} "
        f"({draws} draws tried): change held_out or the sizes of the task."
    )


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
