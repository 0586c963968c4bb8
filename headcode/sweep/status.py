"""How far a run is, read from its folder: the same for a run of this process, of another one, or of another machine."""

import dataclasses
from pathlib import Path
from typing import Any

from headcode.run import RunConfig, fields_of, get_field
from headcode.train.checkpoint import CHECKPOINTS, STATE_FILE
from headcode.train.folder import METRICS_FILE, TIMING_FILE, read_metrics, read_timings
from headcode.train.progress import primary_metric

Row = dict[str, Any]


@dataclasses.dataclass
class Progress:
    """The last known step of a run, its speed and its scores."""

    step: int = 0
    rate: float | None = None
    """Steps per second, as last measured."""
    loss: float | None = None
    metric: str = ""
    scores: dict[str, float | None] = dataclasses.field(default_factory=dict)
    """The task's main metric at the last evaluation, by split."""

    def seconds_left(self, steps: int) -> float | None:
        return (steps - self.step) / self.rate if self.rate and self.rate > 1e-6 else None


class ProgressReader:
    """Reads a run's progress again only when its files have changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: tuple[int, int] | None = None
        self._progress = Progress()

    def read(self) -> Progress:
        sizes = (_size(self._folder / METRICS_FILE), _size(self._folder / TIMING_FILE))
        if sizes != self._seen:
            self._seen, self._progress = sizes, read_progress(self._folder)
        return self._progress


def read_progress(folder: Path) -> Progress:
    """What the records of a run say; nothing yet where there are none."""
    progress = Progress()
    for record in _records(folder):
        progress.step = record["step"]
        if record["kind"] == "train":
            progress.loss = record["loss"]
        elif record["kind"] == "eval":
            progress.metric, progress.scores[record["split"]] = primary_metric(record)
    if timings := read_timings(folder):
        progress.rate = timings[-1].get("steps_per_second")
    return progress


def is_finished(folder: Path, config: RunConfig) -> bool:
    """Whether the last step's checkpoint and records are in place.

    A checkpoint appears whole, after its records; records that were lost since come back when the run is resumed.
    """
    if not (folder / CHECKPOINTS / f"step-{config.steps}" / STATE_FILE).is_file():
        return False
    records = _records(folder)
    return bool(records) and records[-1]["step"] == config.steps


def result_row(name: str, identity: str, folder: Path, config: RunConfig) -> Row:
    """One row of the results of a finished run.

    name, hash, folder; task and every field by its flat name; the last training loss as `train/loss`, the metrics of
    the last evaluation as `compositional/r2` and so on; seconds over all starts.
    """
    row: Row = {"name": name, "hash": identity, "folder": str(folder), "task": config.task.name}
    row |= {field: get_field(config, field) for field in fields_of(config)}
    records = _records(folder)
    training = [record for record in records if record["kind"] == "train"]
    row["train/loss"] = training[-1]["loss"] if training else None
    for record in records:
        if record["kind"] == "eval" and record["step"] == config.steps:
            skipped = ("kind", "step", "split")
            row |= {f"{record['split']}/{metric}": value for metric, value in record.items() if metric not in skipped}
    row["seconds"] = _seconds(folder)
    return row


def _seconds(folder: Path) -> float:
    """Time in training, evaluation and saving, over all starts of the run."""
    total, last_step, last_seconds = 0.0, -1, 0.0
    for timing in read_timings(folder):
        if timing["step"] <= last_step or timing["seconds"] < last_seconds:  # another start
            total += last_seconds
        last_step, last_seconds = timing["step"], timing["seconds"]
    return round(total + last_seconds, 3)


def _records(folder: Path) -> list[dict[str, Any]]:
    try:
        return read_metrics(folder)
    except (OSError, ValueError):
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
