"""What every task is: a frozen configuration whose instances are pure functions of (seed, split, instance number).

    task.sample("train", index, batch_size)    batch `index` of that size: instances index·size … index·size+size-1
    task.instances("train", [5, 3, 8])         any instances, in any order: the same bytes as in any batch
    task.score(prediction, batch)              sums that add up over batches; task.metrics(sums) divides at the end

The random numbers come from `streams`; the compositions of the splits come from the seed by `compositions.divide`.
"""

import dataclasses
import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headcode.config import Config
from headcode.memory import aligned
from headcode.tasks.streams import MAX_INSTANCE, MAX_SEED, Stream

FORMER_NAMES = {
    "hints": "auxiliary_targets",
    "questions": "auxiliary",
    "hint_dims": "auxiliary_dims",
    "companions": "run_files",
    "recall": "read_run_files",
}
"""Of a task's attributes, and what they are called now."""
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
class AuxiliaryTarget:
    """One kind of auxiliary target: what training may predict about every token beside the task itself."""

    name: str
    depth: int
    """Predicted from the tokens before the last `depth` layers: 1, and others without a gap."""
    count: int
    """Targets of this kind per token."""
    size: int
    """Classes of each."""
    weight: float
    """Of the mean over all of them in the loss."""


class Labels(NamedTuple):
    """What decoders look for in the codes of some instances."""

    values: np.ndarray
    """(instance, query): a class each; or (instance, class): which classes are present."""
    classes: np.ndarray
    several: bool
    """Whether an instance has several classes at once."""


class Flag(NamedTuple):
    """A field of a task as a flag of the commands that make instances, `headcode puzzle` and `headcode export`."""

    type: Any
    metavar: str
    help: str


Outputs = Callable[[Tensor], Tensor]
"""A trained model: inputs (B, T, …) -> outputs (B, queries, output_dim)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(Config):
    """Base of the tasks. A task is its configuration: equal ones are equal, hash alike, pickle small."""

    name: ClassVar[str]
    """The word for the task on the command line and in files."""
    task_id: ClassVar[int]
    """The task's own part of the random addresses, 0..255 and never used twice: 1 to 199 are headcode's, 200 to 249 are
    for other packages, 250 to 255 for tests."""
    version: ClassVar[int]
    """Version of the generator: raised whenever the bytes of any instance change."""
    objective: ClassVar[str]
    """`regression` (squared error on y) or `classification` (cross-entropy on y)."""
    main_metric: ClassVar[str]
    """The one of `metrics` that reports and cards show first."""
    run_settings: ClassVar[Mapping[str, Any]] = {}
    """What a run on a task without presets sets, by the names of flags: {"steps": 500, "num_layers": 1}."""
    flags: ClassVar[Mapping[str, Flag]] = {}
    """Fields as flags of the commands that make instances. A task without flags has its seed alone."""
    view: ClassVar[str] = "plain"
    """How the explorer shows an instance: a name in `headcode.explorer.catalogue.VIEWS`."""
    labels: ClassVar[tuple[str, ...]] = ()
    """What files of codes keep of `info`, beside the number of the instance; decoders need `composition` among it."""
    label_kind: ClassVar[str] = "class"
    """The word for what `decodable` finds: rule, term."""
    decoding_inputs: ClassVar[str | None] = None
    """Of a task with a field `inputs`: its value while codes are decoded, unless the user says otherwise."""
    derived_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that nobody sets by hand."""
    newer_fields: ClassVar[tuple[str, ...]] = ()
    """Fields younger than the first published instances: a fingerprint names them only where they are set."""
    causal: ClassVar[bool] = False
    """Whether a model must not see later tokens."""
    reads_text: ClassVar[bool] = False
    """Whether instances come from a text that the user gives."""
    scores_in_place: ClassVar[bool] = False
    """`score` takes the outputs as the model gives them and sums the loss itself: for outputs too large to copy."""
    model_kind: ClassVar[str] = "transformer"
    """The kind of model that reads the task's instances: a name in `headcode.nn.models.MODELS`."""
    code_keys: ClassVar[str | tuple[int, ...]] = "self"
    """The keys whose codes are captured and decoded unless the user says otherwise: `self`, `all` or positions."""

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed must lie in 0..2**64-1, got {self.seed}.")

    def __getattr__(self, name: str) -> Any:
        now = FORMER_NAMES.get(name)
        if now is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warnings.warn(f"Task.{name} is called {now} now.", DeprecationWarning, stacklevel=2)
        return getattr(self, now)

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
    def code_queries(self) -> slice:
        """The tokens whose codes are captured and decoded unless others are named."""
        return self.queries

    @property
    def model_queries(self) -> slice | None:
        """`queries` as a model takes them: None for all."""
        return None if self.queries == slice(None) else self.queries

    @property
    def model_sizes(self) -> dict[str, int | None]:
        """The fields of a ModelConfig that the task decides."""
        return {"input_dim": self.input_dim, "output_dim": self.output_dim, "max_length": self.sequence_length}

    @property
    def auxiliary(self) -> tuple[AuxiliaryTarget, ...]:
        """What a run can predict about the tokens of training instances beside the answer; nothing for most tasks."""
        return ()

    @property
    def auxiliary_dims(self) -> tuple[int, ...]:
        """How many outputs the heads of a model need for `auxiliary`, from the last layer back."""
        depths = range(1, max((kind.depth for kind in self.auxiliary), default=0) + 1)
        return tuple(sum(kind.count * kind.size for kind in self.auxiliary if kind.depth == depth) for depth in depths)

    def auxiliary_targets(self, batch: Batch) -> list[Tensor]:
        """The targets of each kind in `auxiliary`, (B, T, count), -100 where there is none."""
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

    def judge(self, prediction: Tensor, batch: Batch) -> dict[str, np.ndarray]:
        """Per instance: `predictions`, `targets`, `correct`, and more that tells how right an answer was."""
        if self.objective != "classification":
            raise ValueError(f"The task {self.name} does not say when an answer is right: it needs a method judge.")
        answers = prediction.argmax(-1)
        right = answers == batch.y
        return {
            "predictions": answers.numpy(),
            "targets": batch.y.numpy(),
            "feature_correct": right.numpy(),
            "correct": right.all(1).numpy(),
        }

    def ceiling(self, split: str, size: int) -> float | None:
        """The best main metric that any solver can have on the first `size` instances; None if nobody knows."""
        return None

    def missing(self) -> str:
        """What a run needs before it can start, as the end of a sentence: "has no text"; empty if nothing."""
        return ""

    def decodable(self, codes: Mapping[str, Any]) -> Labels:
        """What decoders are to find in codes; `codes` has the arrays of `labels` and of `judge`, and `queries`."""
        raise ValueError(f"The task {self.name} names nothing that could be decoded from codes.")

    @classmethod
    def label_name(cls, label: int) -> str:
        """A class of `decodable` in words."""
        return str(label)

    def map_labels(self, codes: Mapping[str, Any], query: int) -> dict[str, np.ndarray]:
        """What the dots of a map of one query's codes can be coloured by, beside `correct`."""
        return {}

    def as_authors(self) -> tuple["Task", dict[str, Any]]:
        """A task with the same tokens whose codes the paper's authors take, and of which queries and keys."""
        raise ValueError(f"The paper's authors take no codes on the task {self.name}; leave out the authors' way.")

    def patch_pairs(
        self, split: str, size: int, seed: int, outputs: Outputs
    ) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Pairs of instances for patching, by kind of donor; see `headcode.analysis.patch`.

        `recipient` and `donor` are inputs (N, T, …), `token` (N,) the answering token whose code is exchanged, and
        `own`, `donors` and, for classes, `copy` (N,) the answers if nothing changes, if the answer follows the code,
        and if the donor's answer is copied.
        """
        raise ValueError(f"The task {self.name} names no pairs of instances that could exchange their codes.")

    def token_words(self, x: np.ndarray) -> list[str] | None:
        """The tokens of one instance in few letters, for the explorer; None shows their numbers."""
        return None

    def as_text(self, batch: Batch, answer: bool = False, colour: bool = False) -> str:
        """The first instance of a batch for the terminal."""
        tokens = np.atleast_2d(batch.x[0].numpy().T).T
        lines = [" ".join(f"{value:g}" for value in token) for token in tokens.tolist()]
        return "\n".join([*lines, *([f"answer: {batch.y[0].tolist()}"] if answer else [])])

    def remarks(self, batch: Batch, split: str, answer: bool = False) -> list[str]:
        """Lines about the first instance of a batch: its answer, its composition, what a solver says."""
        return []

    def draw(self, batch: Batch, title: str, answer: bool = False, variables: tuple[int, int] | None = None) -> Any:
        """The first instance of a batch as a matplotlib Figure; `variables` (from 1) choose the axes of a function."""
        raise ValueError(f"There is no picture for the task {self.name}; leave out --out.")

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


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
