"""Take a finished run into the zoo: python -m headcode.zoo.add RUN NAME "what it is, in one sentence"

Keeps the configuration, the metrics and the weights of the last checkpoint, and writes the card: scores on every split
over 16,384 instances and, where an exact solver exists, its ceiling on the same instances. Of the machine nothing is
kept but the versions: no command line, no paths, no platform.
"""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from headcode.files import replace_file, to_json
from headcode.nn.storage import WEIGHTS_FILE
from headcode.run import RunConfig
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
from headcode.train.folder import ENVIRONMENT_FILE, METRICS_FILE, read_environments, read_metrics, read_run_config
from headcode.zoo import CARD_FILE

SIZE = 16_384


def add_model(run: Path, name: str, about: str, *, zoo: Path = ZOO, size: int = SIZE) -> Path:
    """Write the zoo's model NAME from a finished run, and return its folder."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise ValueError(f"A model's name is small letters, digits and dashes, for example sraven-hyla; got {name!r}.")
    config = read_run_config(run)
    if config.task.reads_text:
        raise ValueError(f"The zoo has models of tasks that need no text, and {run} is a run on {config.task.name}.")
    checkpoint = choose_checkpoint(run, "last")
    if checkpoint.step != config.steps:
        raise ValueError(f"{run} has only come to step {checkpoint.step} of {config.steps}: finish it first.")
    card = _card(run, name, about, config, checkpoint, size)
    # Beside it first: a model of that name that is there stays as it is until the new one is whole.
    target, new, old = zoo / name, zoo / f".{name}", zoo / f".{name}.old"
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir(parents=True)
    shutil.copyfile(run / RUN_CONFIG_FILE, new / RUN_CONFIG_FILE)
    shutil.copyfile(run / METRICS_FILE, new / METRICS_FILE)
    weights = checkpoint.tensors(AVERAGE_FILE if AVERAGE_FILE in checkpoint.state["files"] else WEIGHTS_FILE)
    state = {"step": checkpoint.step, "config": config.to_dict(), "best": None}
    write_checkpoint(new / CHECKPOINTS, config.model, {WEIGHTS_FILE: weights}, state)
    replace_file(new / CARD_FILE, to_json(card))
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)
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
        "hint": config.auxiliary_weight,
        "metric": config.task.main_metric,
        "evaluated_on": size,
        "scores": scores,
        "training_loss": next((r["loss"] for r in reversed(read_metrics(run)) if r["kind"] == "train"), None),
        "environment": _versions(run),
    }
    ceilings = {split: config.task.ceiling(split, size) for split in splits}
    if known := {split: value for split, value in ceilings.items() if value is not None}:
        card["ceiling"] = known
    return card


def _versions(run: Path) -> dict[str, Any]:
    starts = read_environments(run)
    if not starts:
        raise ValueError(f"{run / ENVIRONMENT_FILE} tells of no start of the run, so its versions are not known.")
    return {key: starts[-1][key] for key in ("headcode", "torch", "python") if key in starts[-1]}


def main(arguments: list[str]) -> None:
    """One model, or one sentence and exit code 2."""
    try:
        if len(arguments) != 3:
            raise ValueError(f"python -m headcode.zoo.add takes RUN NAME ABOUT, got {len(arguments)} words.")
        run, name, about = arguments
        print(add_model(Path(run), name, about))
    except (ValueError, OSError) as error:
        print(f"headcode: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main(sys.argv[1:])
