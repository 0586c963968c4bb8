"""What a run says while it trains: a bar on a terminal, a plain line per minute elsewhere, and optional trackers."""

import sys
import time
from pathlib import Path
from typing import Any, Protocol, TextIO

from headcode.presets import RunConfig

PLAIN_INTERVAL = 60.0


class Reporter(Protocol):
    """Anything that wants to follow a run: give it to the Trainer."""

    def start(self, step: int, steps: int) -> None:
        """Training begins (or goes on) at `step`."""

    def advance(self, step: int) -> None:
        """A step was taken; called often, so it must be cheap and never look at a device."""

    def record(self, record: dict[str, Any]) -> None:
        """A line was added to metrics.jsonl."""

    def close(self) -> None:
        """Training ends, well or not."""


def terminal_reporter(stream: TextIO | None = None) -> Reporter:
    """The bar or the plain lines, whichever suits the stream (standard error unless given)."""
    stream = sys.stderr if stream is None else stream
    return BarReporter(stream) if stream.isatty() else PlainReporter(stream)


class _Latest:
    """The last loss and evaluation, in words."""

    def __init__(self) -> None:
        self.loss = ""
        self.evaluation: dict[str, str] = {}

    def take(self, record: dict[str, Any]) -> None:
        if record["kind"] == "train":
            self.loss = f"loss {record['loss']:.4g}"
        elif record["kind"] == "eval":
            name, value = primary_metric(record)
            shown = "?" if value is None else f"{value:.3f}"
            self.evaluation[record["split"]] = f"{record['split']} {name} {shown}"

    def __str__(self) -> str:
        return " · ".join(part for part in (self.loss, *self.evaluation.values()) if part)


def primary_metric(record: dict[str, Any]) -> tuple[str, float | None]:
    """The first metric of an evaluation record that is not its loss: the task's own choice."""
    skipped = ("kind", "step", "split", "loss")
    name = next((key for key in record if key not in skipped), "loss")
    return name, record[name]


class PlainReporter:
    """One line at the start, one per minute, one at the end."""

    def __init__(self, stream: TextIO, interval: float = PLAIN_INTERVAL) -> None:
        self._stream, self._interval = stream, interval
        self._latest = _Latest()

    def start(self, step: int, steps: int) -> None:
        self._first, self._step, self._steps = step, step, steps
        self._begin = self._last = time.monotonic()
        self._say(f"training from step {step} to {steps}")

    def advance(self, step: int) -> None:
        self._step = step
        if time.monotonic() - self._last >= self._interval:
            self._last = time.monotonic()
            self._say(self._line())

    def record(self, record: dict[str, Any]) -> None:
        self._latest.take(record)

    def close(self) -> None:
        self._say(self._line())

    def _line(self) -> str:
        rate = (self._step - self._first) / max(time.monotonic() - self._begin, 1e-9)
        left = f"{duration((self._steps - self._step) / rate)} left" if rate > 0 else ""
        parts = (f"step {self._step}/{self._steps}", f"{rate:.3g} steps/s", left, str(self._latest))
        return " · ".join(part for part in parts if part)

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class BarReporter:
    """A rich bar: step, steps per second, time left, loss and the last evaluation."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[latest]}"),
            console=Console(file=stream),
            refresh_per_second=4,
        )
        self._latest = _Latest()

    def start(self, step: int, steps: int) -> None:
        self._first, self._begin, self._shown = step, time.monotonic(), 0.0
        self._task = self._bar.add_task("train", total=steps, completed=step, rate="", latest="")
        self._bar.start()

    def advance(self, step: int) -> None:
        now = time.monotonic()
        if now - self._shown >= 0.2:
            self._shown = now
            rate = (step - self._first) / max(now - self._begin, 1e-9)
            self._bar.update(self._task, completed=step, rate=f"{rate:.3g} steps/s", latest=str(self._latest))

    def record(self, record: dict[str, Any]) -> None:
        self._latest.take(record)
        self._bar.update(self._task, completed=record["step"], latest=str(self._latest))

    def close(self) -> None:
        self._bar.stop()


class TensorBoardReporter:
    """Metrics as TensorBoard scalars in `RUN/tensorboard`."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            raise _missing("TensorBoard", "tensorboard") from None
        self._make = lambda step: SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def start(self, step: int, steps: int) -> None:
        self._writer = self._make(step)

    def advance(self, step: int) -> None: ...

    def record(self, record: dict[str, Any]) -> None:
        for name, value in _scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class WandbReporter:
    """Metrics to Weights & Biases; WANDB_MODE=offline keeps everything in the run folder."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        try:
            import wandb  # type: ignore[import-not-found, unused-ignore]
        except ModuleNotFoundError:
            raise _missing("Weights & Biases", "wandb") from None
        self._wandb, self._folder, self._config = wandb, folder, config

    def start(self, step: int, steps: int) -> None:
        self._run = self._wandb.init(
            project="headcode",
            name=self._folder.name,
            dir=str(self._folder),
            config=self._config.to_dict(),
            resume="allow" if step else None,
        )

    def advance(self, step: int) -> None: ...

    def record(self, record: dict[str, Any]) -> None:
        self._run.log(_scalars(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


def _scalars(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a metrics record, named as `train/loss` or `compositional/r2`."""
    place = record.get("split", record["kind"])
    skipped = ("kind", "step", "split")
    return {f"{place}/{name}": value for name, value in record.items() if name not in skipped and value is not None}


def _missing(name: str, extra: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"{name} is not installed; install it with: pip install 'headcode[{extra}]'.")


def duration(seconds: float) -> str:
    """Words for a time.

    >>> duration(59.6), duration(3725)
    ('1 min 00 s', '1 h 02 min')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
