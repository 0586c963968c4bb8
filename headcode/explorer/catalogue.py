"""The models that the explorer was started with: the only ones that a request can name."""

import dataclasses
import functools
import threading
from collections.abc import Sequence
from pathlib import Path

from headcode import zoo
from headcode.analysis.runs import OpenRun, open_run
from headcode.explorer.sentences import Lens
from headcode.explorer.state import Limits
from headcode.tasks import FuzzyLogic, SRaven, Task
from headcode.tasks.sraven_rules import DISTRIBUTE
from headcode.train.folder import read_run_config

COMPUTING = threading.RLock()
"""One forward pass at a time: captured and edited codes hang on the modules, and two cores gain nothing from more."""


@dataclasses.dataclass(frozen=True)
class Model:
    """An opened run or zoo model under the name that addresses use."""

    name: str
    run: OpenRun

    @property
    def task(self) -> Task:
        return self.run.task

    @property
    def method(self) -> str:
        return self.run.config.model.method

    @functools.cached_property
    def limits(self) -> Limits:
        task, layers = self.task, self.run.config.model.num_layers
        if isinstance(task, SRaven):
            hidden = task.sequence_length - task.num_features
            return Limits(
                kind="sraven",
                length=task.sequence_length,
                layers=layers,
                splits=task.splits,
                rule_ids=task.rule_ids,
                num_features=task.num_features,
                num_values=task.num_values,
                num_visible=hidden,
                query=hidden,
                # The same place in the panel before: a pair whose codes tell rules apart better than most.
                key=hidden - task.num_features,
                donor_rules=tuple(rule for rule in task.rule_ids if rule != DISTRIBUTE),
            )
        assert isinstance(task, FuzzyLogic)
        return Limits(
            kind="logic",
            length=task.num_points,
            layers=layers,
            splits=task.splits,
            num_terms=task.num_terms,
            num_variables=task.num_variables,
            query=task.num_points - 1,
        )


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
        """The other models with the same task, which can be asked the same question."""
        found = {
            name: [other for other, their in self.models.items() if other != name and their.task == model.task]
            for name, model in self.models.items()
        }
        return found | {name: [] for name in self.lenses}


def _open(path: str | Path) -> Model:
    run = open_run(path)
    if not isinstance(run.task, SRaven | FuzzyLogic):
        raise ValueError(f"The explorer shows runs on logic and sraven; {path} is a run on {run.task.name}.")
    if run.config.model.cross_layers:
        raise ValueError(
            f"{path} has cross_layers: its answers do not see themselves, and the explorer cannot show it."
        )
    if isinstance(run.task, FuzzyLogic) and run.task.num_variables < 2:
        raise ValueError(f"The explorer draws functions of two variables or more; {path} has one.")
    given = str(path)
    return Model(given if given.startswith("zoo/") else run.path.name, run)


def zoo_models() -> list[str]:
    """All models of the zoo that the explorer can show, SRAVEN first, the best of each task's methods first."""
    order = {"hyla": 0, "softmax": 1, "linear": 2}
    cards = [(zoo.card(name), name) for name in zoo.names()]
    cards = [(card, name) for card, name in cards if card["task"] in ("sraven", "logic") and not _crosses(name)]
    cards.sort(key=lambda each: (each[0]["task"] != "sraven", order.get(each[0]["method"], 9), each[1]))
    return [f"zoo/{name}" for _, name in cards]


def _crosses(name: str) -> bool:
    return read_run_config(zoo.folder(name)).model.cross_layers > 0
