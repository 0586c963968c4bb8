"""What a sweep shows: plain lines in a file, a table on a terminal."""

import io
import json

import pytest
from rich.console import Console

from headcode.sweep.display import PlainDisplay, RunState, TableDisplay, counts, fitted_table, make_display
from headcode.sweep.plan import plan
from headcode.sweep.status import ProgressReader, read_progress, result_row
from tests.support.sweeps import small_config


@pytest.fixture
def states(tmp_path):
    """One run in the middle, one finished, one that waits."""
    runs = plan({f"run {i}": small_config(seed=i, steps=100) for i in range(3)}, tmp_path)
    for run, step in zip(runs[:2], (40, 100), strict=True):
        run.folder.mkdir(parents=True)
        records = [
            {"kind": "train", "step": step - 10, "loss": 0.5, "learning_rate": 0.1, "gradient_norm": 1.0},
            {"kind": "eval", "step": step - 10, "split": "iid", "loss": 0.25, "r2": 0.75, "mse": 0.2},
            {"kind": "eval", "step": step - 10, "split": "novel", "loss": 0.25, "r2": None, "mse": 0.2},
            {"kind": "train", "step": step, "loss": 0.125, "learning_rate": 0.1, "gradient_norm": 1.0},
        ]
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        timings = [{"step": s, "seconds": t, "steps_per_second": 4.0} for s, t in ((10, 2.0), (20, 5.0), (10, 3.0))]
        (run.folder / "timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timings) + '{"step": 3')
    return [RunState(run, state) for run, state in zip(runs, ("running", "finished", "waiting"), strict=True)]


def test_progress_is_read_from_the_folder(states):
    progress = states[0].progress()
    assert (progress.step, progress.rate, progress.loss) == (40, 4.0, 0.125)
    assert progress.metric == "r2" and progress.scores == {"iid": 0.75, "novel": None}
    assert progress.seconds_left(100) == 15.0
    assert (read_progress(states[2].run.folder).step, states[2].progress().seconds_left(100)) == (0, None)
    # Two starts: five seconds, and three more after going back to step 10.
    assert result_row("a", "b", states[0].run.folder, states[0].run.config)["seconds"] == 8.0


def test_progress_is_read_again_when_it_changes(states):
    folder = states[0].run.folder
    reader = ProgressReader(folder)
    first = reader.read()
    assert reader.read() is first
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 50, "loss": 0.0625}\n{"kind": "tra')
    assert (reader.read().step, reader.read().loss) == (50, 0.0625)


def test_plain_lines(states):
    stream = io.StringIO()
    display = make_display(stream)
    assert isinstance(display, PlainDisplay)
    display.start(states)
    display.event(states[1], "finished")
    display.event(states[0], "failed: The loss is nan.")
    display.refresh()
    display.close()
    assert stream.getvalue().splitlines() == [
        "sweep of 3 runs",
        "run 1: finished · r2 iid 0.750, novel ?",
        "run 0: failed: The loss is nan.",
        "1 of 3 runs finished, 1 running · run 0 step 40/100, 15 s left",
    ]


def test_a_line_per_interval(states):
    stream = io.StringIO()
    display = PlainDisplay(stream, interval=0.0)
    display.start(states)
    display.refresh()
    assert stream.getvalue().count("1 of 3 runs finished") == 1


def drawn(states, height=25, width=100):
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(fitted_table(states, console))
    return console.file.getvalue().splitlines()


def test_the_table(states):
    header, running, finished, waiting, caption = (line.split() for line in drawn(states))
    assert header == ["run", "state", "step", "steps/s", "left", "last", "scores"]
    assert running == ["run", "0", "running", "40/100", "4", "15", "s", "r2", "iid", "0.750,", "novel", "?"]
    assert finished == ["run", "1", "finished", "100/100", "r2", "iid", "0.750,", "novel", "?"]
    assert waiting == ["run", "2", "waiting", "0/100"] and " ".join(caption) == counts(states)


def test_a_small_terminal_shows_what_is_at_work(states):
    lines = drawn([states[1], states[1], states[1], states[2], states[0]], height=9)
    assert "running" in lines[1] and "waiting" in lines[2] and "… and 3 more" in lines[3] and len(lines) == 5


def test_80_columns_hold_long_names_and_all_scores(states, tmp_path):
    """Nothing is cut: what does not fit beside the numbers goes on in the next line."""
    name = "method=hyla_deep_linear_unnormed,learning_rate=0.001,seed=2"
    (run,) = plan({name: states[0].run.config}, tmp_path)
    scores = {"iid": 0.856, "novel": -0.604, "compositional": 0.761}
    lines = [{"kind": "eval", "step": 40, "split": split, "loss": 0.25, "r2": r2} for split, r2 in scores.items()]
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    text = drawn([RunState(run, "running")], width=80)
    assert all(len(line) <= 80 for line in text) and "…" not in "".join(text)
    first = text[0].index("state")
    assert "".join(line[:first].strip() for line in text[1:-1]).replace(" ", "") == name
    assert text[1][first:].split()[:5] == ["running", "40/100", "4", "15", "s"]
    last = text[0].index("last scores")
    assert (
        " ".join(line[last:].strip() for line in text[1:-1]).strip()
        == "r2 iid 0.856, novel -0.604, compositional 0.761"
    )


def test_on_a_terminal(states):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    display = make_display(stream)
    assert isinstance(display, TableDisplay)
    display.start(states)
    display.event(states[0], "failed: no")
    display.event(states[0], "starts")
    states[0].state = "failed"
    display.event(states[0], "failed: The loss is [nan].")
    display.close()
    assert "run 0: failed: The loss is [nan]." in stream.getvalue() and "last scores" in stream.getvalue()
