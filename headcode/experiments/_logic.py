"""Fuzzy logic at each scale, as the experiments share it: the same configurations are the same runs."""

from collections.abc import Sequence
from typing import Any

from headcode.experiments import base
from headcode.experiments.base import Row, Scale, Study
from headcode.ops import METHODS
from headcode.presets import preset
from headcode.run import RunConfig, override

PAPER_RATES = (1e-3, 3e-3)
PAPER_DECAYS = (0.1, 0.03)
MAIN_METHODS = ("softmax", "linear", "hyla")
ABLATED_METHODS = tuple(name for name, method in METHODS.items() if method.authors_name)
"""The eight methods of the authors' repository, all of one size."""


def logic_base(scale: Scale) -> RunConfig:
    """smoke: seconds, and no result; laptop: the paper's model for 8,000 steps; paper: 50,000 steps."""
    if scale == "paper":
        return preset("logic-paper")
    # Of the paper's two learning rates the one that fits the training compositions better (docs/results/learning.md).
    config = override(preset("logic"), learning_rate=3e-3)
    if scale == "laptop":
        return config
    every = {"log_every": 5, "eval_every": 10, "checkpoint_every": 0}
    return override(config, num_points=8, dim=32, mlp_dim=32, steps=20, batch_size=16, eval_size=128, **every)


def at_one_rate(scale: Scale, **laptop: Any) -> RunConfig:
    """`logic_base` with the learning rate 3e-3 at every scale; `laptop` are changes at laptop scale alone."""
    return override(logic_base(scale), learning_rate=3e-3, **(laptop if scale == "laptop" else {}))


def seeds_of(scale: Scale) -> range:
    return range(2 if scale == "smoke" else 3)


def paper_search(scale: Scale) -> dict[str, Sequence[float]]:
    """The paper's grid of learning rates and decays; one pair at the smaller scales."""
    return {"learning_rate": PAPER_RATES, "weight_decay": PAPER_DECAYS} if scale == "paper" else {}


SELECTION = (
    "At paper scale the learning rate (1e-3, 3e-3) and decay (0.1, 0.03) with the best mean R² on seen compositions "
    "(iid), per method and setting; at laptop scale the rate 3e-3 and decay 0.1 for all. The last checkpoint counts. "
    "No held-out score chooses anything."
)


def select(study: Study, groups: Sequence[str]) -> list[Row]:
    """The runs at the learning rate and decay with the best mean iid R², for every group of equal `groups` fields."""
    return base.select(study, groups, ("learning_rate", "weight_decay"), "iid/r2")
