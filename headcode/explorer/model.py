"""A model that the explorer was started with, and the lock that its forward passes share."""

import dataclasses
import functools
import threading
from typing import TYPE_CHECKING

from headcode.analysis.runs import OpenRun
from headcode.explorer.state import Limits
from headcode.tasks import Task

if TYPE_CHECKING:
    from headcode.explorer.view import View

COMPUTING = threading.RLock()
"""One forward pass at a time: captured and edited codes hang on the modules, and two cores gain nothing from more."""


@dataclasses.dataclass(frozen=True)
class Model:
    """An opened run or zoo model under the name that addresses use."""

    name: str
    run: OpenRun
    view: "View"
    """How the questions of its task are shown."""

    @property
    def task(self) -> Task:
        return self.run.task

    @property
    def method(self) -> str:
        return self.run.config.model.method

    @functools.cached_property
    def limits(self) -> Limits:
        model = self.run.config.model
        limits = self.view.limits(self.task, model.attention_layers)
        # Answers that only read the tokens before them have no code to themselves.
        return dataclasses.replace(limits, key=0) if model.crossing_layers else limits

    def positions(self, layer: int) -> tuple[range, range]:
        """The tokens that are queries and those that are keys in a layer."""
        queries, keys = self.run.config.model.code_positions(layer)
        tokens = range(self.task.sequence_length)
        return tokens[queries], tokens[keys]
