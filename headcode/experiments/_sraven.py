"""SRAVEN at each scale, as the experiments share it: the same configurations are the same runs.

The paper's own setting (4 features, AdamW, 10 million instances and more) is out of reach of two cores. At laptop scale
every method gets the same other setting, in which small models learn within minutes: puzzles of 2 features (permuted in
every column like the paper's), Muon, relative and learned positions together, a learning rate that is held and then
falls, no attention dropout, and a curriculum in which 80 % of the training puzzles are aligned at first and none after
half of the run. Evaluation puzzles are never aligned. No auxiliary targets: they would say what the codes are to
find.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headcode.experiments import base
from headcode.experiments.base import Row, Scale, Study, write_json
from headcode.presets import preset
from headcode.run import RunConfig, override
from headcode.sweep import grid
from headcode.tasks import SRaven, oracle
from headcode.tasks.baselines import copy_left, score_sraven
from headcode.train.folder import read_metrics, read_run_config

PAPER_RATES = (1e-3, 3e-4)
PAPER_DECAYS = (0.1, 0.3)
PAPER_WARMUPS = (1000, 3000)
"""Of Fig. 4; Table A1 has the first alone."""
PAPER_INSTANCES = (10_000_000, 20_000_000, 40_000_000)
ABLATION_INSTANCES = 20_000_000
"""Of the SRAVEN column of Table A1."""
WIDTHS = ("dim", "num_heads", "qk_dim", "v_dim", "mlp_dim")
SELECTION = (
    "At paper scale the learning rate (1e-3, 3e-4), decay (0.1, 0.3) and (Fig. 4) warm-up (1000, 3000) with the best "
    "mean accuracy on seen compositions (iid), per method and setting; at laptop scale one setting for all. The last "
    "checkpoint counts. No held-out score chooses anything."
)
SETTING_WORDS = (
    "Laptop scale is not the paper's setting: 2 features, Muon, relative and learned positions, aligned puzzles first, "
    "no attention dropout; the same for every method, but found and its length set by watching `hyla` alone."
)
CEILING_PUZZLES = {"smoke": 500, "laptop": 20_000, "paper": 100_000}


def sraven_base(scale: Scale) -> RunConfig:
    """smoke: seconds, and no result; laptop: 2 features in minutes; paper: the ×1 model on 10 million instances."""
    if scale == "paper":
        return with_instances(preset("sraven-paper"), min(PAPER_INSTANCES))
    plain = override(
        preset("sraven-fast"), auxiliary_weight=0.0, position_period=None, v_dim=preset("sraven").model.v_dim
    )
    config = shortened(plain, scale)
    return override(config, aligned=((0.0, 0.8), (0.5 * config.steps * config.batch_size, 0.0)))


def shortened(config: RunConfig, scale: Scale) -> RunConfig:
    """For the smaller scales: 2 features, and a few steps; at smoke scale a small model as well."""
    config = override(config, num_features=2, warmup_steps=100, checkpoint_every=0)
    if scale == "laptop":
        return override(config, steps=3000, batch_size=128, eval_every=500, eval_size=1024)
    small = {"dim": 32, "num_heads": 4, "qk_dim": 16, "v_dim": 16, "mlp_dim": 32}
    small["num_layers"] = 3 if config.auxiliary_weight else 2
    return override(config, **small, steps=16, batch_size=16, log_every=4, eval_every=8, eval_size=128)


def seeds_of(scale: Scale) -> range:
    """The paper has three seeds; two cores have one, but for `main_seeds` (`--seeds` takes fewer or more)."""
    return range(3 if scale == "paper" else 1)


def main_seeds(scale: Scale) -> range:
    """Seeds of the main methods in the base setting: two cores have three of them."""
    return range(1 if scale == "smoke" else 3)


def widened(config: RunConfig, factor: float) -> RunConfig:
    """Heads and all widths times a factor."""
    return override(config, **{name: round(factor * getattr(config.model, name)) for name in WIDTHS})


def with_instances(config: RunConfig, instances: int) -> RunConfig:
    """Trained on so many instances: the schedule ends there, as in the paper's runs of different length."""
    return override(config, steps=instances // config.batch_size)


def paper_search(scale: Scale, warmups: Sequence[int] = PAPER_WARMUPS[:1]) -> dict[str, Sequence[Any]]:
    """The paper's grid of learning rates and decays, with its warm-ups; one of each at the smaller scales."""
    if scale != "paper":
        return {}
    return {"learning_rate": PAPER_RATES, "weight_decay": PAPER_DECAYS, "warmup_steps": warmups}


def searched(
    config: RunConfig, scale: Scale, *, warmups: Sequence[int] = PAPER_WARMUPS[:1], **fields: Sequence[Any]
) -> list[tuple[str, RunConfig]]:
    """The grid of some fields, with seeds and (paper) the search."""
    return list(grid(config, **{"seed": seeds_of(scale), **fields, **paper_search(scale, warmups)}))


def select(study: Study, groups: Sequence[str]) -> list[Row]:
    """The runs at the learning rate, decay and warm-up with the best mean iid accuracy, in groups of equal fields."""
    return base.select(study, groups, ("learning_rate", "weight_decay", "warmup_steps"), "iid/accuracy")


def losses_along(folder: Path, batch_size: int) -> list[dict[str, float]]:
    """Instances seen, and the training loss, at every line of the log."""
    records = (record for record in read_metrics(folder) if record["kind"] == "train")
    return [{"instances": record["step"] * batch_size, "loss": record["loss"]} for record in records]


def accuracy_along(folder: Path, batch_size: int) -> list[dict[str, float]]:
    """For every evaluation of a run: instances seen, and both accuracies on both splits."""
    points: dict[int, dict[str, float]] = {}
    for record in read_metrics(folder):
        if record["kind"] == "eval":
            point = points.setdefault(record["step"], {"instances": record["step"] * batch_size})
            point[record["split"]] = record["accuracy"]
            point[f"{record['split']}, per feature"] = record["feature_accuracy"]
    return [points[step] for step in sorted(points)]


def ceilings(task: SRaven, count: int) -> dict[str, dict[str, float]]:
    """The best accuracy that any solver can reach, split by split, with its standard error, and of a shortcut."""
    found = {}
    for split in ("iid", "compositional"):
        puzzles = task.raw(split, np.arange(count))["puzzles"]
        solutions = oracle.solve_split(task, split, puzzles)
        found[split] = {
            "ceiling": solutions.ceiling,
            "standard error": float(solutions.best_probability.std(ddof=1) / np.sqrt(count)),
            "copying the panel to the left": score_sraven(task, puzzles, copy_left(task, puzzles))["accuracy"],
        }
    return found


def note_ceilings(study: Study, say: Callable[[str], None]) -> None:
    """Ceilings, means over the seeds' puzzles, into `study.extra`, and into a file beside the figure."""
    (study.extra["ceilings"],) = ceilings_by(study, "task", say).values()
    write_json(study.folder / "ceilings.json", study.extra["ceilings"])


def ceilings_by(study: Study, field: str, say: Callable[[str], None]) -> dict[Any, dict[str, dict[str, float]]]:
    """By the field's value: the ceilings of each split's puzzles, means over the seeds."""
    count = CEILING_PUZZLES[study.scale]
    say(f"the oracle's ceiling, of {count:,} puzzles of each split")
    known: dict[SRaven, dict[str, dict[str, float]]] = {}
    by_value: dict[Any, list[SRaven]] = {}
    for row in study.where(task=SRaven.name):
        task = read_run_config(Path(row["folder"])).task
        assert isinstance(task, SRaven)
        # Training's curriculum changes none of the puzzles that models are evaluated on.
        task = task.replace(aligned=0.0)
        tasks = by_value.setdefault(row[field], [])
        if task not in tasks:
            tasks.append(task)
        if task not in known:
            known[task] = ceilings(task, count)
    return {value: _mean_ceilings([known[task] for task in tasks]) for value, tasks in by_value.items()}


def _mean_ceilings(each: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        split: {name: sum(one[split][name] for one in each) / len(each) for name in numbers}
        for split, numbers in each[0].items()
    }
