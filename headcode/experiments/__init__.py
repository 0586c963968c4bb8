"""The paper's figures and tables, and what its reviewers asked for: one file each, run by `headcode reproduce NAME`."""

import importlib

from headcode.experiments.base import SCALES, Experiment, Scale, Study, Table, Verdict
from headcode.experiments.mean import Mean
from headcode.experiments.run import Outcome, estimate, planned_runs, reproduce

# name -> (module, class); a module is imported only when its experiment is asked for.
_MODULES = {
    "logic-generalisation": ("logic_generalisation", "LogicGeneralisation"),
    "logic-ablation": ("logic_ablation", "LogicAblation"),
    "logic-grid": ("logic_grid", "LogicGrid"),
    "capacity": ("capacity", "Capacity"),
    "heads": ("heads", "Heads"),
    "in-context": ("in_context", "InContext"),
    "logic-codes": ("logic_codes", "LogicCodes"),
    "sraven-scaling": ("sraven_scaling", "SRavenScaling"),
    "sraven-ablation": ("sraven_ablation", "SRavenAblation"),
    "sraven-codes": ("sraven_codes", "SRavenCodes"),
    "sraven-recipe": ("sraven_recipe", "SRavenRecipe"),
    "cross-attention": ("cross_attention", "CrossAttention"),
    "language": ("language", "Language"),
}
EXPERIMENTS = tuple(_MODULES)


def experiment(name: str) -> Experiment:
    """The experiment of that name.

    >>> experiment("heads").title
    'Number of heads at fixed width'
    """
    if name not in _MODULES:
        raise ValueError(f"There is no experiment {name!r}; the experiments are: {', '.join(EXPERIMENTS)}.")
    module, cls = _MODULES[name]
    found = getattr(importlib.import_module(f"headcode.experiments.{module}"), cls)()
    assert isinstance(found, Experiment)
    return found


__all__ = [
    "EXPERIMENTS",
    "SCALES",
    "Experiment",
    "Mean",
    "Outcome",
    "Scale",
    "Study",
    "Table",
    "Verdict",
    "estimate",
    "experiment",
    "planned_runs",
    "reproduce",
]
