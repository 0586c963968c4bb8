"""The models that the explorer was started with: the only ones that a request can name."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

from headcode import zoo
from headcode.analysis.runs import open_run
from headcode.explorer.function_view import FunctionView
from headcode.explorer.model import Model
from headcode.explorer.puzzle_view import PuzzleView
from headcode.explorer.sentences import Lens
from headcode.explorer.state import Limits
from headcode.explorer.view import View
from headcode.tasks import TASKS
from headcode.train.folder import read_run_config

VIEWS: dict[str, View] = {view.kind: view for view in (PuzzleView(), FunctionView(), View())}
"""What a task's `view` names."""


class Catalogue:
    """Models and lenses by name. Paths come from the command line alone; requests only ever give names."""

    def __init__(self, runs: Sequence[str | Path], lens: str | Path | None = None, text: str = "") -> None:
        self.models: dict[str, Model] = {}
        self.lenses: dict[str, Lens] = {}
        self.text = text or "The cat that chased the mice was hungry."
        for path in runs:
            model = _open(path)
            name, count = model.name, 2
            while name in self.models:
                name, count = f"{model.name}-{count}", count + 1
            self.models[name] = dataclasses.replace(model, name=name)
        if lens is not None:
            opened = Lens(lens)
            self.lenses[opened.name] = opened
        if not self.names:
            raise ValueError("There is no model to explore: give a run folder, or zoo/NAME.")

    @property
    def names(self) -> list[str]:
        return [*self.models, *self.lenses]

    @functools.cached_property
    def limits(self) -> dict[str, Limits]:
        found = {name: model.limits for name, model in self.models.items()}
        return found | {name: Limits(kind="lens", layers=lens.num_layers) for name, lens in self.lenses.items()}

    @functools.cached_property
    def peers(self) -> dict[str, list[str]]:
        """The other models with the same task, which can be asked the same question; those of other methods first."""
        found = {}
        for name, model in self.models.items():
            peers = [each for each in self.models.values() if each.name != name and each.task == model.task]
            others = [each.name for each in peers if each.method != model.method]
            found[name] = others + [each.name for each in peers if each.method == model.method]
        return found | {name: [] for name in self.lenses}


def _open(path: str | Path) -> Model:
    run = open_run(path)
    if run.task.reads_text:
        raise ValueError(f"The explorer shows no runs on texts; {path} is a run on {run.task.name}.")
    if run.config.model.cross_layers:
        raise ValueError(
            f"{path} has cross_layers: its answers do not see themselves, and the explorer cannot show it."
        )
    if run.config.model.attention_layers == 0:
        raise ValueError(f"{path} has layers without codes, of which there is nothing to explore.")
    view = VIEWS[run.task.view]
    if reason := view.refuses(run.task):
        raise ValueError(f"{reason}; {path} is one.")
    given = str(path)
    return Model(given if given.startswith("zoo/") else run.path.name, run, view)


def zoo_models() -> list[str]:
    """All models of the zoo that the explorer can show, in the order of the tasks, the best methods first."""
    order = {"hyla": 0, "softmax": 1, "linear": 2}
    shown = [name for name in zoo.names() if not read_run_config(zoo.folder(name)).model.cross_layers]
    cards = [(zoo.card(name), name) for name in shown]
    tasks = list(TASKS)
    cards.sort(key=lambda each: (tasks.index(each[0]["task"]), order.get(each[0]["method"], 9), each[1]))
    return [f"zoo/{name}" for _, name in cards]
