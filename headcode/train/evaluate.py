"""Metrics of a model on a task's evaluation streams: always the same instances of a split."""

import contextlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

from headcode.nn import Transformer
from headcode.run import RunConfig
from headcode.tasks import Batch, Task, add_sums
from headcode.train.distributed import Group
from headcode.train.loss import prediction_loss


def evaluation_splits(task: Task) -> list[str]:
    """The splits that a model is evaluated on: all but `train`, in the task's order."""
    return [split for split in task.splits if split != "train"]


def evaluate(
    predict: Callable[[Tensor], Tensor], task: Task, split: str, size: int, batch_size: int, group: Group
) -> dict[str, float | None]:
    """The task's metrics and loss over the first `size` instances of a split, or over all if it has fewer.

    The processes divide the batches among them. `predict` maps a batch's x to outputs (B, read queries, output_dim). A
    metric that is not finite is None.
    """
    available = task.split_size(split)
    size = size if available is None else min(size, available)
    starts = range(0, size, batch_size)
    sums: dict[str, float] = {}
    # Every process takes part in the same number of forward passes: a sharded model needs all of them at once.
    for first in range(0, len(starts), group.world_size):
        mine = first + group.rank
        batch = _batch(task, split, starts[min(mine, len(starts) - 1)], size, batch_size)
        with torch.no_grad():
            prediction = predict(batch.x)
            if not task.scores_in_place:
                prediction = prediction.double().cpu()
            scores = task.score(prediction, batch)
        if not task.scores_in_place:
            scores["loss"] = float(prediction_loss(task, prediction, batch.y)) * len(batch.y)
        weight = 1 if mine < len(starts) else 0  # a process without a batch of its own repeats the last one
        add_sums(sums, {name: weight * value for name, value in scores.items()})
    sums = group.all_reduce_sum(sums)
    metrics = {"loss": sums.pop("loss") / sums["count"], **task.metrics(sums)}
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def evaluate_model(
    model: Transformer, config: RunConfig, splits: list[str], *, size: int, batch_size: int, device: torch.device
) -> dict[str, dict[str, float | None]]:
    """The metrics of a trained model by split; with the run's own sizes they equal those that training recorded."""
    model = model.to(device).eval()
    dtype = next(model.parameters()).dtype
    bf16 = config.precision == "bf16"

    def predict(x: Tensor) -> Tensor:
        x = x.to(device, dtype if x.is_floating_point() else x.dtype)
        with torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext():
            return model(x, queries=config.task.model_queries)

    return {split: evaluate(predict, config.task, split, size, batch_size, Group()) for split in splits}


def _batch(task: Task, split: str, start: int, size: int, batch_size: int) -> Batch:
    if start + batch_size <= size:
        return task.sample(split, start // batch_size, batch_size)
    return task.instances(split, range(start, size))
