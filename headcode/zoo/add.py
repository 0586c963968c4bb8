"""Take a finished run into the zoo: python -m headcode.zoo.add RUN NAME "what it is, in one sentence"

Keeps the configuration, the metrics and the weights of the last checkpoint, and writes the card: scores on every split
over 16,384 instances and, for SRAVEN, the oracle's ceiling on the same puzzles.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headcode.nn.storage import WEIGHTS_FILE
from headcode.presets import RunConfig
from headcode.tasks import SRaven, oracle
from headcode.train.checkpoint import (
    AVERAGE_FILE,
    CHECKPOINTS,
    RUN_CONFIG_FILE,
    ZOO,
    Checkpoint,
    choose_checkpoint,
    load_from,
    write_checkpoint,
)
from headcode.train.evaluate import evaluate_model
from headcode.train.files import read_object, replace_file, to_json
from headcode.train.folder import ENVIRONMENT_FILE, METRICS_FILE, read_metrics, read_run_config
from headcode.zoo import CARD_FILE

SIZE = 16_384
MAIN_METRIC = {"logic": "r2", "sraven": "accuracy"}


def add_model(run: Path, name: str, about: str, *, zoo: Path = ZOO, size: int = SIZE) -> Path:
    """Write the zoo's model NAME from a finished run, and return its folder."""
    config = read_run_config(run)
    checkpoint = choose_checkpoint(run, "last")
    if checkpoint.step != config.steps:
        raise ValueError(f"{run} has only come to step {checkpoint.step} of {config.steps}: finish it first.")
    target = zoo / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    shutil.copyfile(run / RUN_CONFIG_FILE, target / RUN_CONFIG_FILE)
    shutil.copyfile(run / METRICS_FILE, target / METRICS_FILE)
    weights = checkpoint.tensors(AVERAGE_FILE if AVERAGE_FILE in checkpoint.state["files"] else WEIGHTS_FILE)
    state = {"step": checkpoint.step, "best": None}
    write_checkpoint(target / CHECKPOINTS, config.model, {WEIGHTS_FILE: weights}, state)
    replace_file(target / CARD_FILE, to_json(_card(run, name, about, config, checkpoint, size)))
    return target


def _card(run: Path, name: str, about: str, config: RunConfig, checkpoint: Checkpoint, size: int) -> dict[str, Any]:
    model = load_from(checkpoint)
    splits = list(config.task.splits)
    scores = evaluate_model(
        model, config, splits, size=size, batch_size=config.eval_batch_size, device=torch.device("cpu")
    )
    card: dict[str, Any] = {
        "name": name,
        "about": about,
        "task": config.task.name,
        "method": config.model.method,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": config.steps,
        "instances": config.steps * config.batch_size,
        "seed": config.seed,
        "metric": MAIN_METRIC[config.task.name],
        "evaluated_on": size,
        "scores": scores,
        "training_loss": next(r["loss"] for r in reversed(read_metrics(run)) if r["kind"] == "train"),
        "environment": _versions(run),
    }
    if isinstance(config.task, SRaven):
        card["ceiling"] = {split: _ceiling(config.task, split, size) for split in splits}
    return card


def _ceiling(task: SRaven, split: str, size: int) -> float:
    """The best accuracy that any solver can reach on these puzzles, the oracle's."""
    puzzles = task.raw(split, np.arange(size))["puzzles"]
    return float(oracle.solve_split(task, split, puzzles).ceiling)


def _versions(run: Path) -> dict[str, Any]:
    start = read_object(run / ENVIRONMENT_FILE)["starts"][-1]
    return {key: start[key] for key in ("headcode", "torch", "python") if key in start}


if __name__ == "__main__":
    print(add_model(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
