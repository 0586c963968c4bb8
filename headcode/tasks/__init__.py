"""The tasks: fuzzy logic, SRAVEN, SCAN and relations in graphs, which measure compositional generalisation, and
language modelling."""

import importlib.metadata
import warnings

from headcode.tasks import oracle
from headcode.tasks.base import AuxiliaryTarget, Batch, Flag, Labels, Task, add_sums
from headcode.tasks.datasets import TaskDataset, TaskStream
from headcode.tasks.fuzzy_logic import FuzzyLogic
from headcode.tasks.language import LanguageModelling
from headcode.tasks.relations import Relations
from headcode.tasks.scan import Scan
from headcode.tasks.sraven import SRaven
from headcode.tasks.sraven_rules import RULE_NAMES

TASKS: dict[str, type[Task]] = {task.name: task for task in (SRaven, FuzzyLogic, LanguageModelling, Scan, Relations)}
"""All tasks by name, the one first that commands show unless told otherwise. A package adds its own by an entry point
in the group `headcode.tasks`, as docs/extend.md shows."""

for _entry in importlib.metadata.entry_points(group="headcode.tasks"):
    try:
        _task = _entry.load()
        TASKS.setdefault(_task.name, _task)
    except Exception as _error:  # one broken package must not take the others away
        warnings.warn(f"The task {_entry.name} of {_entry.value} cannot be used: {_error}", stacklevel=2)

__all__ = [
    "RULE_NAMES",
    "TASKS",
    "AuxiliaryTarget",
    "Batch",
    "Flag",
    "FuzzyLogic",
    "Labels",
    "LanguageModelling",
    "Relations",
    "SRaven",
    "Scan",
    "Task",
    "TaskDataset",
    "TaskStream",
    "add_sums",
    "oracle",
]
