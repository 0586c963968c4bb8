"""What a sweep shows while it works: a live table on a terminal, plain lines elsewhere."""

import contextlib
import dataclasses
import sys
import time
from typing import Any, Protocol, TextIO

from headcode.sweep.plan import Run
from headcode.sweep.status import Progress, ProgressReader
from headcode.train.progress import PLAIN_INTERVAL, duration

ACTIVE = ("running", "elsewhere")
TABLE_INTERVAL = 0.5


@dataclasses.dataclass
class RunState:
    """A run and how it stands: waiting, queued, running, elsewhere (another process), finished, failed or stopped."""

    run: Run
    state: str = "waiting"

    def __post_init__(self) -> None:
        self._reader = ProgressReader(self.run.folder)

    def progress(self) -> Progress:
        return self._reader.read()


class Display(Protocol):
    """An object that a sweep informs of its progress."""

    def start(self, states: list[RunState]) -> None:
        """The sweep begins with these runs; their states change under way."""

    def event(self, state: RunState, words: str) -> None:
        """Something happened to a run."""

    def say(self, words: str) -> None:
        """Something happened to the sweep."""

    def refresh(self) -> None:
        """Called often."""

    def close(self) -> None:
        """The sweep ends, well or not."""


def make_display(stream: TextIO | None = None) -> Display:
    """The table or the plain lines, whichever suits the stream (standard error unless given)."""
    stream = sys.stderr if stream is None else stream
    return TableDisplay(stream) if stream.isatty() else PlainDisplay(stream)


class SilentDisplay:
    """Shows nothing."""

    def start(self, states: list[RunState]) -> None: ...

    def event(self, state: RunState, words: str) -> None: ...

    def say(self, words: str) -> None: ...

    def refresh(self) -> None: ...

    def close(self) -> None: ...


class SteadyDisplay:
    """Wraps a display whose stream may fail (a closed pipe, a full disk), so that the sweep goes on all the same."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def start(self, states: list[RunState]) -> None:
        with contextlib.suppress(OSError):
            self._display.start(states)

    def event(self, state: RunState, words: str) -> None:
        with contextlib.suppress(OSError):
            self._display.event(state, words)

    def say(self, words: str) -> None:
        with contextlib.suppress(OSError):
            self._display.say(words)

    def refresh(self) -> None:
        with contextlib.suppress(OSError):
            self._display.refresh()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._display.close()


class PlainDisplay:
    """One line per event, and one per minute on how far everything is."""

    def __init__(self, stream: TextIO, interval: float = PLAIN_INTERVAL) -> None:
        self._stream, self._interval = stream, interval

    def start(self, states: list[RunState]) -> None:
        self._states, self._last = states, time.monotonic()
        self.say(f"sweep of {len(states)} runs")

    def event(self, state: RunState, words: str) -> None:
        more = f" · {scores}" if state.state == "finished" and (scores := scores_of(state.progress())) else ""
        self.say(f"{state.run.name}: {words}{more}")

    def say(self, words: str) -> None:
        print(words, file=self._stream, flush=True)

    def refresh(self) -> None:
        if time.monotonic() - self._last >= self._interval:
            self._last = time.monotonic()
            self.say(self._line())

    def close(self) -> None:
        self.say(self._line())

    def _line(self) -> str:
        active = []
        for state in self._states:
            if state.state in ACTIVE:
                progress, steps = state.progress(), state.run.config.steps
                left = progress.seconds_left(steps)
                active.append(
                    f"{state.run.name} step {progress.step}/{steps}" + (f", {duration(left)} left" if left else "")
                )
        return " · ".join([counts(self._states), *active])


class TableDisplay:
    """A live table: state, step, steps per second, time left and the last scores of each run."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream)
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
        self._shown = 0.0

    def start(self, states: list[RunState]) -> None:
        self._states = states
        self._live.start()
        self._draw()

    def event(self, state: RunState, words: str) -> None:
        if state.state == "failed" or "again" in words:
            self.say(f"{state.run.name}: {words}")
        self._draw()

    def say(self, words: str) -> None:
        self._console.print(words, markup=False, highlight=False)

    def refresh(self) -> None:
        if time.monotonic() - self._shown >= TABLE_INTERVAL:
            self._draw()

    def close(self) -> None:
        self._draw()
        self._live.stop()

    def _draw(self) -> None:
        self._shown = time.monotonic()
        self._live.update(fitted_table(self._states, self._console), refresh=True)


_COLOURS = {"running": "cyan", "finished": "green", "failed": "red", "elsewhere": "yellow", "stopped": "yellow"}
_ORDER = ("running", "elsewhere", "failed", "stopped", "queued", "waiting", "finished")


def fitted_table(states: list[RunState], console: Any) -> Any:
    """The table with as many runs as the terminal has lines for; long names and scores take several."""
    height = max(console.height - 4, 5)
    number = min(len(states), height)
    while True:
        table = table_of(states, number)
        too_many = len(console.render_lines(table)) - height
        if too_many <= 0 or number == 1:
            return table
        number = max(number - max(too_many // 3, 1), 1)


def table_of(states: list[RunState], number: int) -> Any:
    """Some of the runs as a rich table: if not all, those at work and those that failed come first."""
    from rich.table import Table
    from rich.text import Text

    shown = states if len(states) <= number else sorted(states, key=lambda s: _ORDER.index(s.state))[:number]
    rows = []
    for state in shown:
        progress, steps = state.progress(), state.run.config.steps
        active = state.state in ACTIVE
        left = progress.seconds_left(steps) if active else None
        rate = f"{progress.rate:.3g}" if progress.rate and active else ""
        figures = (f"{progress.step}/{steps}", rate, "" if left is None else duration(left))
        rows.append((state, figures, scores_of(progress)))
    table = Table(caption=counts(states), caption_justify="left", box=None, pad_edge=False)
    # Names and scores are folded where they are long; numbers stay whole.
    table.add_column("run", ratio=1)
    table.add_column("state", min_width=9)
    for index, name in enumerate(("step", "steps/s", "left")):
        table.add_column(name, justify="right", min_width=max(map(len, (name, *(row[1][index] for row in rows)))))
    table.add_column("last scores", ratio=1)
    for state, figures, scores in rows:
        folded = Text(state.run.name.replace(",", ", "), overflow="fold")
        table.add_row(folded, Text(state.state, style=_COLOURS.get(state.state, "dim")), *figures, Text(scores))
    if len(shown) < len(states):
        table.add_row(Text(f"… and {len(states) - len(shown)} more", style="dim"))
    return table


def counts(states: list[RunState]) -> str:
    """`3 of 12 runs finished, 2 running, 1 failed`."""
    words = [f"{sum(s.state == 'finished' for s in states)} of {len(states)} runs finished"]
    for kind in ("running", "queued", "elsewhere", "stopped", "failed"):
        if number := sum(state.state == kind for state in states):
            words.append(f"{number} {kind}")
    return ", ".join(words)


def scores_of(progress: Progress) -> str:
    """The main metric of each split at the last evaluation, or the loss before the first one."""
    if not progress.scores:
        return "" if progress.loss is None else f"loss {progress.loss:.4g}"
    numbers = (f"{split} {'?' if value is None else format(value, '.3f')}" for split, value in progress.scores.items())
    return f"{progress.metric} {', '.join(numbers)}"
