"""Progress of decode: a bar on a terminal, a plain line a minute elsewhere, told in the order of the work."""

import io

import pytest

from headcode.analysis import ablate, decode, open_run
from headcode.cli import _progress
from headcode.presets import override, preset
from headcode.train import Trainer

SIZES = {"dim": 12, "num_heads": 3, "qk_dim": 6, "v_dim": 6, "mlp_dim": 8, "num_layers": 2, "backend": "reference"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    short = {"steps": 2, "batch_size": 8, "eval_size": 16, "eval_every": 0, "checkpoint_every": 0}
    path = tmp_path_factory.mktemp("runs") / "first"
    Trainer(override(preset("sraven-small"), **SIZES, **short), path).run()
    return path


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_elsewhere_a_line_a_minute(monkeypatch):
    clock = iter([0.0, 10.0, 61.0, 61.0, 70.0, 130.0, 130.0])
    monkeypatch.setattr(_progress.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    with _progress.shown("decode", stream) as tell:
        tell("codes of iid", 0, 5)
        tell("codes of compositional", 1, 5)
        tell("layer 0", 2, 5)
        tell("layer 1", 3, None)
    assert stream.getvalue() == "decode: codes of compositional (1 of 5 parts done)\ndecode: layer 1\n"


def test_on_a_terminal_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with _progress.shown("decode", stream) as tell:
        tell("decoders of layer 1", 3, 4)
    assert "decode: decoders of layer 1" in stream.getvalue() and "75%" in stream.getvalue()


def test_decoding_and_ablation_tell_what_they_do(run):
    told = []
    controls = ("shuffled", "untrained")
    decode(run, fit_size=40, test_size=40, controls=controls, progress=lambda *facts: told.append(facts))
    assert [done for _, done, _ in told] == list(range(8)) and {total for *_, total in told} == {8}
    assert [what for what, *_ in told[:4]] == [
        "codes of compositional", "codes of iid", "decoders of layer 0", "decoders of layer 1",
    ]  # fmt: skip
    told.clear()
    ablate(open_run(run), size=8, layers=[1], progress=lambda *facts: told.append(facts))
    assert told == [("the whole model", 0, 4), *[(f"layer 1 without head {h}", h + 1, 4) for h in range(3)]]
