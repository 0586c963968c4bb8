"""Progress of a training run: a bar on a terminal, a plain line per minute elsewhere, and optional trackers."""

import contextlib
import re
import secrets
import sys
import time
from pathlib import Path
from typing import Any, Protocol, TextIO

from headcode.files import read_text, replace_file
from headcode.run import RunConfig

PLAIN_INTERVAL = 60.0
WANDB_FILE = "wandb-id"


class Reporter(Protocol):
    """An object that a Trainer informs of its progress."""

    def start(self, step: int, steps: int) -> None:
        """Training begins (or goes on) at `step`."""

    def advance(self, step: int) -> None:
        """A step was taken; called often, so it must be cheap and never wait for a device."""

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
        self.metric = ""
        self.evaluation: dict[str, str] = {}

    def take(self, record: dict[str, Any]) -> None:
        if record["kind"] == "train":
            self.loss = f"loss {record['loss']:.4g}"
        elif record["kind"] == "eval":
            self.metric, value = primary_metric(record)
            self.evaluation[record["split"]] = "?" if value is None else f"{value:.3f}"

    def __str__(self) -> str:
        evaluation = ", ".join(f"{split} {shown}" for split, shown in self.evaluation.items())
        return " · ".join(part for part in (self.loss, f"{self.metric} {evaluation}".strip()) if part)


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
        from rich.table import Column

        # On a narrow terminal the last column is cut, never the numbers before it.
        self._bar = Progress(
            TextColumn("{task.fields[place]}", table_column=Column(no_wrap=True, min_width=13)),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[rate]}", table_column=Column(no_wrap=True, min_width=8)),
            TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
            TextColumn("{task.fields[latest]}", table_column=Column(no_wrap=True, ratio=1)),
            console=Console(file=stream),
            refresh_per_second=4,
            expand=True,
        )
        self._latest = _Latest()

    def start(self, step: int, steps: int) -> None:
        self._first, self._step, self._steps, self._begin, self._shown = step, step, steps, time.monotonic(), 0.0
        self._task = self._bar.add_task("train", total=steps, completed=step, place="", rate="", latest="")
        self._bar.start()

    def advance(self, step: int) -> None:
        self._step = step
        if time.monotonic() - self._shown >= 0.2:
            self._show()

    def record(self, record: dict[str, Any]) -> None:
        self._latest.take(record)

    def close(self) -> None:
        self._show()
        self._bar.stop()

    def _show(self) -> None:
        self._shown = time.monotonic()
        rate = f"{(self._step - self._first) / max(self._shown - self._begin, 1e-9):.3g}/s"
        place = f"step {self._step}/{self._steps}"
        self._bar.update(self._task, completed=self._step, place=place, rate=rate, latest=str(self._latest))


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
            id=self._identity(step),
            name=self._folder.name,
            dir=str(self._folder),
            config=self._config.to_dict(),
            resume="allow" if step else None,
        )

    def _identity(self, step: int) -> str:
        """The name by which Weights & Biases knows the run: a resumed one goes on under it."""
        path = self._folder / WANDB_FILE
        with contextlib.suppress(OSError, ValueError):
            if step and re.fullmatch("[0-9a-f]{16}", kept := read_text(path)):
                return kept
        identity = secrets.token_hex(8)
        replace_file(path, identity.encode())
        return identity

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

    >>> duration(59.6), duration(3725), duration(200_000), duration(1e8)
    ('1 min 00 s', '1 h 02 min', '2.3 days', '3.2 years')
    """
    for unit, size in (("years", 365 * 86400), ("days", 86400)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
