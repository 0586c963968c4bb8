"""What a run says: bars, lines and trackers."""

import io
import sys
import types

import pytest

from headcode.train.progress import BarReporter, PlainReporter, TensorBoardReporter, WandbReporter, terminal_reporter
from tests.support.training import small_config, train


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_tell_step_speed_time_loss_and_evaluation():
    stream = io.StringIO()
    train(small_config(), reporters=[PlainReporter(stream)])
    first, last = stream.getvalue().splitlines()
    assert first == "training from step 0 to 30"
    for words in ("step 30/30", "steps/s", "0 s left", "loss 0.", "r2 iid ", ", compositional ", ", novel "):
        assert words in last


def test_one_line_per_interval(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("headcode.train.progress.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    reporter = PlainReporter(stream)
    reporter.start(0, 1000)
    for step in range(1, 301):
        now[0] += 1.0
        reporter.advance(step)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1 + 5  # a line for each minute of five
    assert lines[1] == "step 60/1000 · 1 steps/s · 15 min 40 s left"


def test_the_bar_is_for_terminals():
    assert isinstance(terminal_reporter(io.StringIO()), PlainReporter)
    terminal = Terminal()
    reporter = terminal_reporter(terminal)
    assert isinstance(reporter, BarReporter)
    train(small_config(), reporters=[reporter])
    shown = terminal.getvalue()
    assert "step 30/30" in shown and "/s" in shown and "loss 0." in shown and "r2 iid" in shown


def test_a_missing_tracker_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'headcode\[tensorboard\]'"):
        TensorBoardReporter(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'headcode\[wandb\]'"):
        WandbReporter(tmp_path, small_config())


def test_tensorboard_gets_every_number(tmp_path, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            calls.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def close(self):
            calls.append("closed")

    fake = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    result = train(small_config(), tmp_path / "run", reporters=[TensorBoardReporter(tmp_path / "run")])
    assert calls[0] == (str(tmp_path / "run" / "tensorboard"), 1) and calls[-1] == "closed"
    loss = next(r["loss"] for r in result.metrics if r["kind"] == "train")
    r2 = next(r["r2"] for r in result.metrics if r.get("split") == "compositional")
    assert ("train/loss", loss, 7) in calls and ("compositional/r2", r2, 10) in calls


def test_wandb_gets_every_number_and_is_left_its_own_mode(tmp_path, monkeypatch):
    calls = []

    class Run:
        def log(self, values, step):
            calls.append((values, step))

        def finish(self):
            calls.append("finished")

    def init(**settings):
        calls.append(settings)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    config = small_config()
    result = train(config, tmp_path / "run", reporters=[WandbReporter(tmp_path / "run", config)])
    settings = calls[0]
    assert settings["config"] == config.to_dict() and settings["dir"] == str(tmp_path / "run")
    assert "mode" not in settings  # WANDB_MODE=offline decides, not we
    first = next(r for r in result.metrics if r["kind"] == "train")
    assert calls[1] == ({f"train/{n}": first[n] for n in ("loss", "learning_rate", "gradient_norm")}, 7)
    assert calls[-1] == "finished"


def test_a_resumed_run_is_the_same_run_to_wandb(tmp_path, monkeypatch):
    settings = []
    fake = types.SimpleNamespace(init=lambda **given: settings.append(given))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for step in (0, 20, 0):
        WandbReporter(tmp_path, small_config()).start(step, 30)
    first, resumed, again = settings
    assert resumed["id"] == first["id"] and resumed["resume"] == "allow"
    assert again["id"] != first["id"] and again["resume"] is None
    (tmp_path / "wandb-id").write_text("../elsewhere", encoding="utf-8")
    WandbReporter(tmp_path, small_config()).start(20, 30)
    assert len(settings[-1]["id"]) == 16 and "/" not in settings[-1]["id"]
