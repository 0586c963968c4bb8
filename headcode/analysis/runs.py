"""A trained run, opened for reading: its model at a checkpoint, its task, and what was asked of it checked."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headcode.nn import Transformer, make_model
from headcode.run import RunConfig
from headcode.tasks import Batch, Task
from headcode.train.checkpoint import choose_checkpoint, find_run, list_checkpoints, load_from
from headcode.train.folder import read_run_config
from headcode.train.randomness import seed_of
from headcode.train.runtime import check_memory

UNTRAINED = "untrained"


@dataclasses.dataclass(frozen=True)
class OpenRun:
    """A model with the task that it was trained on."""

    path: Path
    config: RunConfig
    model: Transformer
    step: int

    @property
    def task(self) -> Task:
        return self.config.task

    def facts(self) -> dict[str, Any]:
        """What identifies the model in a file of results."""
        return {
            "run": self.path.name,
            "task": self.task.name,
            "method": self.config.model.method,
            "seed": self.config.seed,
            "step": self.step,
            "run_config": self.config.to_dict(),
        }


def open_run(path: str | Path, checkpoint: str = "last", *, inputs: str | None = None) -> OpenRun:
    """The run's model at a checkpoint: `last`, `best`, `step-N`, or `untrained`, the weights before the first step.

    `inputs` (fuzzy logic) replaces the task's way of drawing points: uniform, fixed_context or fixed_query.
    """
    path = find_run(path)
    config = read_run_config(path)
    if inputs is not None:
        if not hasattr(config.task, "inputs"):
            raise ValueError(f"inputs={inputs!r} is for fuzzy logic; {path} is a run on {config.task.name}.")
        config = config.replace(task=config.task.replace(inputs=inputs))
    if checkpoint == UNTRAINED:
        return OpenRun(path, config, untrained_model(config), 0)
    chosen = choose_checkpoint(path, checkpoint)
    return OpenRun(path, config, load_from(chosen), chosen.step)


def untrained_model(config: RunConfig) -> Transformer:
    """The weights that the run started from: a function of its configuration and seed."""
    dtype = torch.float64 if config.precision == "float64" else torch.float32
    check_memory(config.model.num_parameters, dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(config.seed, "weights"))
        model = make_model(config.model)
    return model.to(dtype).eval()


def checkpoints_of(path: str | Path) -> list[str]:
    """`untrained` and the names of a run's checkpoints, oldest first."""
    path = find_run(path)
    read_run_config(path)
    names = [folder.name for folder in reversed(list_checkpoints(path))]
    if not names:
        raise ValueError(f"{path} has no checkpoint yet; train it first with headcode resume {path}.")
    return [UNTRAINED, *names]


def check_split(task: Task, split: str) -> None:
    if split not in task.splits:
        raise ValueError(f"This run's task has no split {split!r}; it has: {', '.join(task.splits)}.")


def check_layers(layers: Sequence[int] | None, count: int) -> list[int]:
    """Layer numbers counted from 0, ascending; None means all."""
    if layers is None:
        return list(range(count))
    outside = [layer for layer in layers if not -count <= layer < count]
    if outside or not layers:
        raise ValueError(f"This model has layers 0 to {count - 1}; got {list(layers)}.")
    return sorted({layer % count for layer in layers})


def batches(task: Task, split: str, size: int, start: int = 0, batch_size: int = 256) -> Iterator[Batch]:
    """Instances start … start+size-1 of a split, a few at a time."""
    check_split(task, split)
    if size < 1 or start < 0 or batch_size < 1:
        raise ValueError(
            f"size and batch_size must be 1 or more and start 0 or more, got {size}, {batch_size}, {start}."
        )
    for first in range(start, start + size, batch_size):
        yield task.instances(split, np.arange(first, min(first + batch_size, start + size)))


def predict(run: OpenRun, batch: Batch, *, everywhere: bool = False) -> Tensor:
    """The model's outputs for the tokens that are read: (B, queries, output_dim).

    `everywhere` makes the last layer compute all tokens, for those who look inside.
    """
    dtype = next(run.model.parameters()).dtype
    x = batch.x.to(dtype) if batch.x.is_floating_point() else batch.x
    with torch.no_grad():
        return run.model(x)[:, run.task.queries] if everywhere else run.model(x, queries=run.task.queries)
