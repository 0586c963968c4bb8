"""The tasks' fields as flags, shared by the commands that make instances."""

import dataclasses
from typing import Annotated, Literal

import tyro

from headcode.tasks import TASKS, Task

_DEFAULT = "(default: the task's)"
Count = Annotated[int, tyro.conf.arg(metavar="N")]
OptionalInt = Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint=_DEFAULT)]
OptionalNumber = Annotated[float | None, tyro.conf.arg(metavar="NUMBER", help_behavior_hint=_DEFAULT)]
OptionalShare = Annotated[float | None, tyro.conf.arg(metavar="0..1", help_behavior_hint=_DEFAULT)]
OptionalBool = Annotated[bool | None, tyro.conf.arg(metavar="{True,False}", help_behavior_hint=_DEFAULT)]
OptionalIds = Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="ID …", help_behavior_hint=_DEFAULT)]
OptionalNorm = Annotated[
    Literal["zadeh", "product"] | None, tyro.conf.arg(metavar="{zadeh,product}", help_behavior_hint=_DEFAULT)
]
OptionalInputs = Annotated[
    Literal["uniform", "fixed_context", "fixed_query"] | None,
    tyro.conf.arg(metavar="{uniform,fixed_context,fixed_query}", help_behavior_hint=_DEFAULT),
]


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """A task and its fields; a field that is not given keeps the task's default (the paper's setting)."""

    task: tyro.conf.Positional[Literal["sraven", "logic"]] = "sraven"
    """Which task."""
    seed: int = 0
    """Seed of the task: of its instances and of which compositions are held out."""
    held_out: OptionalShare = None
    """Share of the compositions that is held out."""
    num_features: OptionalInt = None
    """SRAVEN: features of a panel."""
    num_values: OptionalInt = None
    """SRAVEN: values of a feature."""
    grid: OptionalInt = None
    """SRAVEN: rows and columns."""
    permute: OptionalBool = None
    """SRAVEN: whether each column hides the features behind a permutation."""
    rules: OptionalIds = None
    """SRAVEN: the rule ids in use."""
    aligned: OptionalShare = None
    """SRAVEN: share of training puzzles whose columns share one permutation."""
    blank: OptionalNumber = None
    """SRAVEN: how many features of a training puzzle are left out on average."""
    num_variables: OptionalInt = None
    """Fuzzy logic: variables of the function."""
    num_terms: OptionalInt = None
    """Fuzzy logic: terms of the function."""
    num_points: OptionalInt = None
    """Fuzzy logic: points of a sequence."""
    novel: OptionalShare = None
    """Fuzzy logic: share of the terms that is never trained on."""
    t_norm: OptionalNorm = None
    """Fuzzy logic: min and max, or product and probabilistic sum."""
    inputs: OptionalInputs = None
    """Fuzzy logic: which points all sequences share."""
    authors_novel_terms: OptionalBool = None
    """Fuzzy logic: the last terms are the novel ones, as the authors have it."""

    def make_task(self) -> Task:
        """The task, or one sentence about a flag that it does not have."""
        cls = TASKS[self.task]
        given = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(TaskOptions)
            if field.name != "task" and getattr(self, field.name) is not None
        }
        known = {field.name for field in dataclasses.fields(cls)}
        if foreign := [f"--{name.replace('_', '-')}" for name in given if name not in known]:
            raise ValueError(f"The task {self.task} has no {', '.join(foreign)}; leave it out.")
        return cls(**given)
