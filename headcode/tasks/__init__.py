"""The two tasks that measure compositional generalisation, exact and fast: fuzzy logic and SRAVEN; and language."""

from headcode.tasks import oracle
from headcode.tasks.base import Batch, Task, add_sums
from headcode.tasks.datasets import TaskDataset, TaskStream
from headcode.tasks.fuzzy_logic import FuzzyLogic
from headcode.tasks.language import LanguageModelling
from headcode.tasks.sraven import RULE_NAMES, SRaven

TASKS: dict[str, type[Task]] = {task.name: task for task in (FuzzyLogic, SRaven, LanguageModelling)}

__all__ = [
    "RULE_NAMES",
    "TASKS",
    "Batch",
    "FuzzyLogic",
    "LanguageModelling",
    "SRaven",
    "Task",
    "TaskDataset",
    "TaskStream",
    "add_sums",
    "oracle",
]
