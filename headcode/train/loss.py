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

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from headcode.nn import Transformer
from headcode.tasks import Batch, Task
from headcode.tasks.base import NOT_ASKED


class LossContext(NamedTuple):
    """What a loss gets: one part of one step's batch."""

    predict: Callable[..., Any]
    """Runs the model on the batch: outputs (B, read queries, output_dim), dropout and precision as the run says; with
    auxiliary=True, (outputs, outputs of the auxiliary heads)."""
    model: Transformer
    """The bare model, to look inside (`capture_codes`). Call `predict`, not the model, so that devices stay in step."""
    batch: Batch
    """x and y on the run's device; `info` stays on the CPU."""
    task: Task
    step: int
    """Optimiser steps taken before this one."""
    seed: int
    """A hash of (run seed, step): make generators from it, and resumed runs stay exact."""
    auxiliary_weight: float = 0.0
    """Weight of the task's auxiliary targets, as the run says."""

    @property
    def hint(self) -> float:
        """The former name of `auxiliary_weight`."""
        warnings.warn("LossContext.hint is called auxiliary_weight now.", DeprecationWarning, stacklevel=2)
        return self.auxiliary_weight


Loss = Callable[[LossContext], Tensor]


def task_loss(context: LossContext) -> Tensor:
    """Squared error on hidden values, or cross-entropy on hidden tokens: the mean over all that is read; plus that of
    the auxiliary targets, if the run has any."""
    if not context.auxiliary_weight:
        return prediction_loss(context.task, context.predict(), context.batch.y)
    outputs, auxiliary = context.predict(auxiliary=True)
    loss = prediction_loss(context.task, outputs, context.batch.y)
    return loss + context.auxiliary_weight * auxiliary_loss(context.task, auxiliary, context.batch)


def auxiliary_loss(task: Task, outputs: list[Tensor], batch: Batch) -> Tensor:
    """Cross-entropy of the auxiliary heads' outputs; for each kind of target the mean over all of them, times its
    weight."""
    total = outputs[0].new_zeros(())
    used = [0] * len(outputs)
    for kind, targets in zip(task.auxiliary, task.auxiliary_targets(batch), strict=True):
        head, width = kind.depth - 1, kind.count * kind.size
        logits = outputs[head][..., used[head] : used[head] + width].unflatten(-1, (kind.count, kind.size))
        used[head] += width
        tokens = (targets != NOT_ASKED).any(-1)
        logits, targets = logits[tokens.to(logits.device)], targets[tokens].to(logits.device)
        total = total + kind.weight * F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return total


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
