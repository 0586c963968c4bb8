"""What is minimised. A loss is a function of one `LossContext`; `task_loss` is the paper's, and yours may stand for it.

A loss on codes, added to the task's own: codes of the same composition are pulled together.

    def loss_with_codes(context):
        with capture_codes(context.model, layers=[0], detach=False) as codes:
            loss = task_loss(context)
        mean_code = codes[0].mean((2, 3))                                         # (B, H)
        same = context.batch.info["composition"][:, None] == context.batch.info["composition"]
        distance = torch.cdist(mean_code, mean_code).square()
        return loss + 0.1 * distance[same].mean()

    Trainer(config, loss=loss_with_codes).run()
"""

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from headcode.nn import Transformer
from headcode.tasks import Batch, Task


class LossContext(NamedTuple):
    """What a loss gets: one part of one step's batch."""

    predict: Callable[[], Tensor]
    """Runs the model on the batch: outputs (B, read queries, output_dim), dropout and precision as the run says."""
    model: Transformer
    """The bare model, to look inside (`capture_codes`). Call `predict`, not the model, so that devices stay in step."""
    batch: Batch
    """x and y on the run's device; `info` stays on the CPU."""
    task: Task
    step: int
    """Optimiser steps taken before this one."""
    seed: int
    """A hash of (run seed, step): make generators from it, and resumed runs stay exact."""


Loss = Callable[[LossContext], Tensor]


def task_loss(context: LossContext) -> Tensor:
    """Squared error on hidden values, or cross-entropy on hidden tokens: the mean over all that is read."""
    return prediction_loss(context.task, context.predict(), context.batch.y)


def prediction_loss(task: Task, prediction: Tensor, y: Tensor) -> Tensor:
    """The task's loss of outputs (B, read queries, output_dim) against y."""
    if task.objective == "regression":
        return F.mse_loss(prediction.reshape(y.shape), y.to(prediction.dtype))
    if task.objective == "classification":
        return F.cross_entropy(prediction.flatten(0, 1), y.flatten().long())
    raise ValueError(
        f"The task {task.name!r} has the objective {task.objective!r}, and no loss is known for it; "
        f"the objectives are regression and classification, or give the Trainer a loss of your own."
    )
