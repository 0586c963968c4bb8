"""Training: exact to resume, on one device or many.

from headcode.presets import override, preset
from headcode.train import Trainer

config = override(preset("logic-small"), method="softmax", seed=1)
result = Trainer(config, "runs/softmax-1").run()
"""

from headcode.train.checkpoint import load
from headcode.train.folder import read_metrics, read_run_config
from headcode.train.loop import RunResult, Trainer, TrainingFailed, TrainingInterrupted
from headcode.train.loss import LossContext, hint_loss, prediction_loss, task_loss
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
    "hint_loss",
    "learning_rate",
    "load",
    "prediction_loss",
    "read_metrics",
    "read_run_config",
    "task_loss",
]
