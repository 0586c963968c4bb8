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
    hints=True, (outputs, hints)."""
    model: Transformer
    """The bare model, to look inside (`capture_codes`). Call `predict`, not the model, so that devices stay in step."""
    batch: Batch
    """x and y on the run's device; `info` stays on the CPU."""
    task: Task
    step: int
    """Optimiser steps taken before this one."""
    seed: int
    """A hash of (run seed, step): make generators from it, and resumed runs stay exact."""
    hint: float = 0.0
    """Weight of the task's hints, as the run says."""


Loss = Callable[[LossContext], Tensor]


def task_loss(context: LossContext) -> Tensor:
    """Squared error on hidden values, or cross-entropy on hidden tokens: the mean over all that is read. Hints, if the
    run gives any, count beside it."""
    if not context.hint:
        return prediction_loss(context.task, context.predict(), context.batch.y)
    outputs, hints = context.predict(hints=True)
    loss = prediction_loss(context.task, outputs, context.batch.y)
    return loss + context.hint * hint_loss(context.task, hints, context.batch)


def hint_loss(task: Task, outputs: list[Tensor], batch: Batch) -> Tensor:
    """Cross-entropy of the answers that a model's further heads give to the task's questions; for each kind of question
    the mean over all answers, times its weight."""
    total = outputs[0].new_zeros(())
    used = [0] * len(outputs)
    for asked, answers in zip(task.questions, task.hints(batch), strict=True):
        head, width = asked.depth - 1, asked.count * asked.size
        logits = outputs[head][..., used[head] : used[head] + width].unflatten(-1, (asked.count, asked.size))
        used[head] += width
        tokens = (answers != NOT_ASKED).any(-1)
        logits, answers = logits[tokens.to(logits.device)], answers[tokens].to(logits.device)
        total = total + asked.weight * F.cross_entropy(logits.flatten(0, 1), answers.flatten())
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
