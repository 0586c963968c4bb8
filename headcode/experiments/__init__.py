"""The paper's figures and tables, and what its reviewers asked for: one file each, run by `headcode reproduce NAME`."""

import importlib

from headcode.experiments.base import SCALES, Experiment, Scale, Study, Table, Verdict
from headcode.experiments.mean import Mean
from headcode.experiments.run import Outcome, estimate, planned_runs, reproduce
from headcode.suggest import no_such

# Its class in the module of the same name, which is imported only when the experiment is asked for.
_CLASSES = {
    "logic-generalisation": "LogicGeneralisation",
    "logic-ablation": "LogicAblation",
    "logic-grid": "LogicGrid",
    "capacity": "Capacity",
    "heads": "Heads",
    "in-context": "InContext",
    "logic-codes": "LogicCodes",
    "sraven-scaling": "SRavenScaling",
    "sraven-ablation": "SRavenAblation",
    "sraven-codes": "SRavenCodes",
    "sraven-heads": "SRavenHeads",
    "sraven-features": "SRavenFeatures",
    "sraven-held-out": "SRavenHeldOut",
    "sraven-recipe": "SRavenRecipe",
    "cross-attention": "CrossAttention",
    "language": "Language",
    "graph-composition": "GraphComposition",
    "ambiguity": "Ambiguity",
    "scan": "ScanSplits",
}
EXPERIMENTS = tuple(_CLASSES)


def experiment(name: str) -> Experiment:
    """The experiment of that name.

    >>> experiment("heads").title
    'Number of heads at fixed width'
    """
    if name not in _CLASSES:
        raise ValueError(no_such("There is no experiment", name, EXPERIMENTS, "the experiments are"))
    module = importlib.import_module(f"headcode.experiments.{name.replace('-', '_')}")
    found = getattr(module, _CLASSES[name])()
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
