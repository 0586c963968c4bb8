"""Relations composed along a path of a graph: who is the last person to the first one?

Relations are the elements of a dihedral group, an exact kinship algebra, as section systems have it: a (mother) and b
(father) with a^n = 1, b² = 1 and b·a = a^-1·b. With n = 4 these are the eight relations of an eight-subsection system,
with n = 2 the four of a four-section one. Element i + n·j stands for a^i b^j; "the mother's father" is a·b, read from
the left.

    A --mother--> B --father--> C,  and aside  D --mother's mother--> B
    the question: what is C to A?       a · b = the mother's father

Each edge says what the node at its head is to the node at its tail. The asked path leads from one node, marked as the
start, to the last node of the graph. Other persons (bystanders) hang on it by edges of either direction, so that the
graph is a tree and the answer follows from the path alone.

A composition is an ordered pair of relations that follow one another on the path. Some are held out: no path of
training has them, and each path of the split `compositional` has one of them, between pairs of training.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from headcode.tasks.base import Batch, Flag, Labels, Task
from headcode.tasks.compositions import check_share, divide, whole_share

NONE, NODE, START = 0, 1, 2
"""Entries of x that are no relation: no edge; the self-loop of a node; that of the node where the path starts."""
FIRST_RELATION = 2
"""Relation r stands in x as r + 2: relation 0, of a person to itself, is on no edge."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
UNKNOWN = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relations(Task):
    """Paths in graphs of relations; see the module.

    x (B, nodes, nodes): [b, i, j] says what node i is to node j, if there is an edge from j to i. The diagonal says
    which nodes there are, and where the path starts. y (B, 1): the answer, of 2·generations relations.
    """

    name: ClassVar[str] = "graph"
    task_id: ClassVar[int] = 6
    version: ClassVar[int] = 1
    objective: ClassVar[str] = "classification"
    main_metric: ClassVar[str] = "accuracy"
    model_kind: ClassVar[str] = "graph_network"
    labels: ClassVar[tuple[str, ...]] = ("composition", "last", "steps")
    label_kind: ClassVar[str] = "last relation"
    code_keys: ClassVar[str | tuple[int, ...]] = (-2,)  # the node before the last one: the last step of the path
    flags: ClassVar[Mapping[str, Flag]] = {
        "generations": Flag(int, "N", "Relations: half as many as there are."),
        "max_steps": Flag(int, "N", "Relations: steps of the longest path of training."),
        "longer_steps": Flag(int, "N", "Relations: steps of the longest path of the split longer."),
        "bystanders": Flag(int, "N", "Relations: persons beside the path."),
    }

    generations: int = 4
    """Mothers until one is back at oneself; there are twice as many relations."""
    max_steps: int = 4
    """Steps of the longest path of training; the shortest has 2."""
    longer_steps: int = 6
    """Steps of the longest path of the split `longer`; its shortest has one more than training."""
    bystanders: int = 3
    """Persons beside the path."""
    held_out: float = 0.25
    """Share of the ordered pairs of relations that no path of training has."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("held_out", self.held_out)
        if not 2 <= self.generations <= 16:
            raise ValueError(f"generations must lie in 2..16, got {self.generations}.")
        if not 2 <= self.max_steps < self.longer_steps <= 16:
            raise ValueError(
                f"The paths of training have 2 steps or more, those of the split longer more than them, and at most "
                f"16: got max_steps={self.max_steps} and longer_steps={self.longer_steps}."
            )
        if not 0 <= self.bystanders <= 9:
            raise ValueError(f"bystanders must lie in 0..9, got {self.bystanders}.")

    @property
    def num_relations(self) -> int:
        """How many relations there are, that to oneself included."""
        return 2 * self.generations

    @functools.cached_property
    def table(self) -> np.ndarray:
        """(relation, relation): the relation that comes of one and then the other."""
        return compose(np.arange(self.num_relations)[:, None], np.arange(self.num_relations), self.generations)

    @functools.cached_property
    def compositions(self) -> np.ndarray:
        """(composition, 2): all ordered pairs of the relations that edges have."""
        count = self.num_relations - 1
        return np.stack(np.divmod(np.arange(count * count), count), 1) + 1

    @functools.cached_property
    def split_compositions(self) -> dict[str, np.ndarray]:
        pairs, count = self.compositions, self.num_relations
        # Every relation must occur in training as the first one of a pair, and as the second one.
        roles = pairs + np.array([0, count])
        parts = np.concatenate([np.arange(1, count), np.arange(1, count) + count])
        out = divide(
            self._stream("split"),
            roles,
            parts,
            whole_share(self.held_out, len(pairs)),
            part="relation",
            cover_held_out=False,
        )
        seen = np.flatnonzero(~out)
        found = {"train": seen, "iid": seen, "compositional": np.flatnonzero(out), "longer": seen}
        return {split: ids for split, ids in found.items() if len(ids)}

    @property
    def vocab_size(self) -> int:
        """Kinds of entries of x."""
        return FIRST_RELATION + self.num_relations

    @property
    def input_dim(self) -> int:
        return self.sequence_length

    @property
    def output_dim(self) -> int:
        return self.num_relations

    @property
    def model_sizes(self) -> dict[str, int | None]:
        return {
            "vocab_size": self.vocab_size,
            "output_dim": self.output_dim,
            "max_length": self.sequence_length,
        }

    @property
    def sequence_length(self) -> int:
        return self.longer_steps + 1 + self.bystanders

    @property
    def queries(self) -> slice:
        return slice(-1, None)

    def steps_of(self, split: str) -> tuple[int, int]:
        """The fewest and the most steps of a split's paths."""
        return (self.max_steps + 1, self.longer_steps) if split == "longer" else (2, self.max_steps)

    def _make(self, split: str, numbers: np.ndarray) -> Batch:
        longest, nodes, rows = self.longer_steps, self.sequence_length, np.arange(len(numbers))
        words = self._stream(split).words(numbers, 3 + longest + 3 * self.bystanders)
        few, many = self.steps_of(split)
        steps = few + _below(words[:, 0], many - few + 1)
        ids = self.split_compositions[split]
        composition = ids[_below(words[:, 1], len(ids))]
        path = self._paths(composition, _below(words[:, 2], steps - 1), steps, words[:, 3 : 3 + longest])

        x = np.zeros((len(numbers), nodes, nodes), dtype=np.int64)
        answer = np.zeros(len(numbers), dtype=np.int64)
        first = nodes - 1 - steps  # of the nodes of the path, which are the last ones
        for step in range(longest):
            on_path = step < steps
            tail = np.minimum(first + step, nodes - 2)
            relation = np.where(on_path, path[:, step], 0)
            x[rows[on_path], tail[on_path] + 1, tail[on_path]] = FIRST_RELATION + relation[on_path]
            answer = self.table[answer, relation]
        diagonal = np.arange(nodes)
        there = (diagonal < self.bystanders) | (diagonal >= first[:, None])
        x[:, diagonal, diagonal] = np.where(diagonal == first[:, None], START, np.where(there, NODE, NONE))
        self._add_bystanders(x, first, words[:, 3 + longest :])
        last = path[rows, steps - 1]
        info = {"composition": composition, "steps": steps, "last": last, "instance": numbers}
        known = {label: torch.from_numpy(values.astype(np.int64)) for label, values in info.items()}
        return Batch(torch.from_numpy(x), torch.from_numpy(answer[:, None]), known)

    def _paths(self, composition: np.ndarray, place: np.ndarray, steps: np.ndarray, words: np.ndarray) -> np.ndarray:
        """(path, step): relations with the composition at `place`, and pairs of training before and after it."""
        rows = np.arange(len(composition))
        path = np.zeros((len(composition), self.longer_steps), dtype=np.int64)
        path[rows, place], path[rows, place + 1] = self.compositions[composition].T
        for distance in range(1, self.longer_steps):
            for following, current in ((True, place + distance), (False, place - distance)):
                # Forwards, steps are counted from the second one of the pair.
                current, neighbour = (current + 1, current) if following else (current, current + 1)
                inside = (current >= 0) & (current < steps)
                at = np.flatnonzero(inside)
                given = path[at, neighbour[at]]
                options, counts = self._neighbours[following]
                path[at, current[at]] = options[given, _below(words[at, current[at]], counts[given])]
        return path

    @functools.cached_property
    def _neighbours(self) -> dict[bool, tuple[np.ndarray, np.ndarray]]:
        """Of each relation those that may follow it in training (True) or go before it (False), and how many."""
        seen = np.zeros((self.num_relations, self.num_relations), dtype=bool)
        seen[tuple(self.compositions[self.split_compositions["train"]].T)] = True
        found = {}
        for following, allowed in ((True, seen), (False, seen.T)):
            # Sorted so that the allowed ones come first.
            found[following] = np.argsort(~allowed, axis=1, kind="stable"), allowed.sum(1)
        return found

    def _add_bystanders(self, x: np.ndarray, first: np.ndarray, words: np.ndarray) -> None:
        """Hang each bystander on the path or on an earlier bystander, by an edge of either direction."""
        rows, nodes = np.arange(len(x)), self.sequence_length
        for person in range(self.bystanders):
            parent, direction, relation = words[:, 3 * person : 3 * person + 3].T
            parent = _below(parent, nodes - first + person)
            parent = np.where(parent < person, parent, parent - person + first)
            entry = FIRST_RELATION + 1 + _below(relation, self.num_relations - 1)
            inwards = _below(direction, 2) == 1
            x[rows, np.where(inwards, parent, person), np.where(inwards, person, parent)] = entry

    def score(self, prediction: Tensor, batch: Batch) -> dict[str, float]:
        right = (prediction.detach().cpu().argmax(-1) == batch.y.cpu())[:, 0].double()
        sums = {"count": float(len(right)), "right": float(right.sum())}
        for steps in range(2, self.longer_steps + 1):
            such = batch.info["steps"].cpu() == steps
            sums |= {f"count_{steps}": float(such.sum()), f"right_{steps}": float(right[such].sum())}
        return sums

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        by_steps = {
            f"accuracy_{steps}_steps": sums[f"right_{steps}"] / sums[f"count_{steps}"]
            for steps in range(2, self.longer_steps + 1)
            if sums[f"count_{steps}"]
        }
        return {"accuracy": sums["right"] / sums["count"], **by_steps}

    def ceiling(self, split: str, size: int) -> float:
        batch = self.instances(split, np.arange(size))
        return float((solve(self, batch.x.numpy()) == batch.y[:, 0].numpy()).mean())

    def decodable(self, codes: Mapping[str, Any]) -> Labels:
        return Labels(np.asarray(codes["last"])[:, None], np.arange(1, self.num_relations), False)

    def map_labels(self, codes: Mapping[str, Any], query: int) -> dict[str, np.ndarray]:
        return {self.label_kind: np.asarray(codes["last"]), "steps": np.asarray(codes["steps"])}

    @classmethod
    def label_name(cls, label: int) -> str:
        return f"relation {label}"

    def relation_name(self, relation: int) -> str:
        """A relation in words.

        >>> Relations().relation_name(6)
        "mother's mother's father"
        """
        fathers, mothers = divmod(relation, self.generations)
        return "'s ".join(["mother"] * mothers + ["father"] * fathers) or "self"

    def token_words(self, x: np.ndarray) -> list[str]:
        return ["·" if x[i, i] == NONE else LETTERS[i] for i in range(len(x))]

    def as_text(self, batch: Batch, answer: bool = False, colour: bool = False) -> str:
        x = batch.x[0].numpy()
        start, end = LETTERS[int((x.diagonal() == START).argmax())], LETTERS[len(x) - 1]
        facts = [
            f"{LETTERS[head]} is {LETTERS[tail]}'s {self.relation_name(int(x[head, tail]) - FIRST_RELATION)}."
            for head, tail in np.argwhere(x > START)
        ]
        truth = self.relation_name(int(batch.y[0, 0])) if answer else "?"
        return "\n".join([*facts, f"What is {end} to {start}? {truth}"])

    def remarks(self, batch: Batch, split: str, answer: bool = False) -> list[str]:
        one, other = self.compositions[int(batch.info["composition"][0])].tolist()
        where = "held out of training" if split == "compositional" else "a pair of training"
        lines = [f"{self.relation_name(one)}, then {self.relation_name(other)}: {where}"]
        if answer:
            found = int(solve(self, batch.x[:1].numpy())[0])
            lines.append(f"the solver's closure says: {self.relation_name(found)}")
        return lines


def compose(first: np.ndarray, second: np.ndarray, generations: int) -> np.ndarray:
    """The relation that comes of `first` and then `second`.

    >>> int(compose(np.array(1), np.array(4), 4)), int(compose(np.array(4), np.array(1), 4))
    (5, 7)
    """
    (fathers, mothers), (more_fathers, more_mothers) = (np.divmod(part, generations) for part in (first, second))
    turned = np.where(fathers == 1, -more_mothers, more_mothers)
    return (mothers + turned) % generations + generations * ((fathers + more_fathers) % 2)


def solve(task: Relations, x: np.ndarray) -> np.ndarray:
    """The exact answers to graphs (N, nodes, nodes), by closure from the start; -1 where no path leads to the end."""
    rows = np.arange(len(x))
    known = np.full(x.shape[:2], UNKNOWN)
    known[rows, (x.diagonal(axis1=1, axis2=2) == START).argmax(1)] = 0
    graph, head, tail = np.nonzero(x > START)
    relation = x[graph, head, tail] - FIRST_RELATION
    for _ in range(x.shape[1] - 1):
        reached = known[graph, tail] != UNKNOWN
        known[graph[reached], head[reached]] = task.table[known[graph, tail][reached], relation[reached]]
    return known[:, -1]


def last_step(task: Relations, x: np.ndarray) -> np.ndarray:
    """The relation of the last step, as if the path had no other."""
    return _steps_backwards(task, x)[:, 0]


def last_two_steps(task: Relations, x: np.ndarray) -> np.ndarray:
    """The composition of the last two steps, as if the path had no others."""
    back = _steps_backwards(task, x)
    return task.table[back[:, 1], back[:, 0]]


def any_order(task: Relations, x: np.ndarray) -> np.ndarray:
    """All steps of the path, as if their order did not matter: mothers and fathers counted."""
    fathers, mothers = np.divmod(_steps_backwards(task, x), task.generations)
    return mothers.sum(1) % task.generations + task.generations * (fathers.sum(1) % 2)


SHORTCUTS: dict[str, Callable[[Relations, np.ndarray], np.ndarray]] = {
    "last step alone": last_step,
    "last two steps": last_two_steps,
    "steps in any order": any_order,
}


def _steps_backwards(task: Relations, x: np.ndarray) -> np.ndarray:
    """(N, step): the relations of the asked path from its end, 0 beyond its start."""
    rows, nodes = np.arange(len(x)), x.shape[1]
    found = np.zeros((len(x), task.longer_steps), dtype=np.int64)
    start = (x.diagonal(axis1=1, axis2=2) == START).argmax(1)
    for step in range(task.longer_steps):
        head = nodes - 1 - step
        found[:, step] = np.where(head > start, x[rows, head, head - 1] - FIRST_RELATION, 0)
    return found


def _below(words: np.ndarray, bounds: np.ndarray | int) -> np.ndarray:
    """Random 32-bit words as integers below bounds of their own, each of them far below 2**32."""
    return ((words.astype(np.uint64) * np.asarray(bounds).astype(np.uint64)) >> np.uint64(32)).astype(np.int64)
