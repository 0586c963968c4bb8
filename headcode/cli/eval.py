"""Evaluate a trained run on its task's streams; with the run's own sizes, the numbers that training recorded.

Example: headcode eval runs/first --split compositional --json
"""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import tyro

from headcode.cli._training import Switch, metrics_line, print_json, say_warning

DEFAULT_SIZE = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """Arguments of `headcode eval`."""

    run_folder: tyro.conf.Positional[Path]
    """The run folder."""
    split: str | None = None
    """One split: iid, compositional, novel or train; all evaluation splits unless given."""
    checkpoint: str = "last"
    """last, best (lowest loss on iid) or a name such as step-500."""
    size: int | None = None
    """Instances of each stream; the run's eval_size unless given."""
    batch_size: int | None = None
    """Instances at a time; the run's eval_batch_size unless given."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    json: Switch = False
    """Print one JSON object."""

    def run(self) -> None:
        from headcode.train.checkpoint import choose_checkpoint, find_run, load_from
        from headcode.train.evaluate import evaluate_model, evaluation_splits
        from headcode.train.folder import read_run_config
        from headcode.train.runtime import find_device

        warnings.showwarning = say_warning
        config = read_run_config(self.run_folder)
        if self.split is not None and self.split not in config.task.splits:
            raise ValueError(f"This run has no split {self.split!r}; it has: {', '.join(config.task.splits)}.")
        size = (config.eval_size or DEFAULT_SIZE) if self.size is None else self.size
        batch_size = config.eval_batch_size if self.batch_size is None else self.batch_size
        if size < 1 or batch_size < 1:
            raise ValueError(f"--size and --batch-size must be 1 or more, got {size} and {batch_size}.")
        device = find_device(self.device)
        checkpoint = choose_checkpoint(find_run(self.run_folder), self.checkpoint)
        splits = evaluation_splits(config.task) if self.split is None else [self.split]
        if not splits:
            raise ValueError(
                f"{self.run_folder} holds nothing out to evaluate on; train with --validation above 0, "
                f"or name a split: --split {config.task.splits[0]}."
            )
        model = load_from(checkpoint)
        found = evaluate_model(model, config, splits, size=size, batch_size=batch_size, device=device)
        facts: dict[str, Any] = {
            "run": str(self.run_folder),
            "task": config.task.name,
            "method": config.model.method,
            "seed": config.seed,
            "step": checkpoint.step,
            "size": size,
        }
        if not self.json:
            print(f"{self.run_folder}: {facts['method']} on {facts['task']}, step {checkpoint.step}, {size} instances")
            for split, metrics in found.items():
                print(f"  {split:<14}{metrics_line(metrics)}")
        elif self.split is not None:
            print_json({**facts, "split": self.split, **found[self.split]})
        else:
            print_json({**facts, "splits": found})
