"""Training: exact to resume, on one device or many.

from headcode.presets import override, preset
from headcode.train import Trainer

config = override(preset("logic-small"), method="softmax", seed=1)
result = Trainer(config, "runs/softmax-1").run()
"""

import warnings
from typing import Any

from headcode.train.checkpoint import load
from headcode.train.folder import read_metrics, read_run_config
from headcode.train.loop import RunResult, Trainer, TrainingFailed, TrainingInterrupted
from headcode.train.loss import LossContext, auxiliary_loss, prediction_loss, task_loss
from headcode.train.optim import learning_rate
from headcode.train.progress import Reporter
from headcode.train.runtime import Runtime

__all__ = [
    "LossContext",
    "Reporter",
    "RunResult",
    "Runtime",
    "Trainer",
    "TrainingFailed",
    "TrainingInterrupted",
    "auxiliary_loss",
    "learning_rate",
    "load",
    "prediction_loss",
    "read_metrics",
    "read_run_config",
    "task_loss",
]


def __getattr__(name: str) -> Any:
    if name == "hint_loss":
        warnings.warn("hint_loss is called auxiliary_loss now.", DeprecationWarning, stacklevel=2)
        return auxiliary_loss
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
