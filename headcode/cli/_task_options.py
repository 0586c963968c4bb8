"""The tasks' fields as flags, shared by the commands that make instances."""

import dataclasses
import typing
from typing import Annotated, Any, Literal, TypeVar

import tyro

from headcode.tasks import TASKS, Task

Count = Annotated[int, tyro.conf.arg(metavar="N")]
C = TypeVar("C", bound="TaskOptions")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """A task and its seed; `with_task_flags` adds the fields of all tasks."""

    task: str
    """Which task."""
    seed: int = 0
    """Seed of the task: of its instances and of which compositions are held out."""

    def make_task(self) -> Task:
        """The task, or one sentence about a flag that it does not have."""
        cls, given = TASKS[self.task], self.given_flags()
        known = {field.name for field in dataclasses.fields(cls)}
        if foreign := [f"--{name.replace('_', '-')}" for name in given if name not in known]:
            raise ValueError(f"The task {self.task} has no {', '.join(foreign)}; leave it out.")
        return cls(seed=self.seed, **given)

    def given_flags(self) -> dict[str, Any]:
        """The fields of the task that were given."""
        flags = {name for task in TASKS.values() for name in task.flags}
        return {name: value for name, value in vars(self).items() if name in flags and value is not None}


def with_task_flags(command: type[C]) -> type[C]:
    """The command with a flag for each field that a task names; one not given keeps the task's default."""
    names = [name for name, task in TASKS.items() if not task.reads_text]
    annotated, literal = typing.cast(Any, Annotated), typing.cast(Any, Literal)
    which = annotated[literal[tuple(names)], tyro.conf.Positional]
    fields: list[Any] = []
    for task in TASKS.values():
        for name, (kind, metavar, words) in task.flags.items():
            if name not in [field[0] for field in fields]:
                shown = tyro.conf.arg(metavar=metavar, help=words, help_behavior_hint="(default: the task's)")
                fields.append((name, Annotated[kind | None, shown], None))
    # By their place among the bases the tasks' flags stand before the command's own.
    flags = dataclasses.make_dataclass("TaskFlags", fields, bases=(TaskOptions,), frozen=True, kw_only=True)
    chosen = [("task", which, names[0])]
    return dataclasses.make_dataclass("Command", chosen, bases=(command, flags), frozen=True, kw_only=True)
