"""The demo, shortened: trains, decodes, solves and writes its page; and the layer that it takes apart."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest

from headcode.cli import main
from headcode.cli._demo_puzzles import RULE, choose_model, solve_puzzles
from headcode.cli._generated_network import draw_opened, in_words, open_layer
from headcode.cli.demo import Command
from headcode.presets import override, preset
from headcode.sweep.plan import plan
from headcode.train import Runtime, Trainer
from headcode.zoo.add import add_model


def test_the_demo_from_training_to_page(tmp_path, capsys):
    main(["demo", "--steps", "4", "--puzzles", "40", "--out", str(tmp_path)])
    out = capsys.readouterr().out
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    with (tmp_path / "results.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"softmax", "linear", "hyla"}
    for method, row in rows.items():
        score = f"{float(row['compositional/r2']):.3f}"
        assert re.search(rf"^{method} .*{score}", out, re.MULTILINE) and score in page
    assert re.search(r"40 puzzles .* gets \d+\.\d% of them right", out) and "the model's answer:" in out
    assert page.count("<img ") == 4 and "http" not in re.sub(r'base64,[^"]*|http-equiv', "", page)
    assert out.index("Next:") > out.index("report.html")
    again = tmp_path / "runs"
    before = {path: path.stat().st_mtime_ns for path in again.rglob("model.safetensors")}
    main(["demo", "--steps", "4", "--puzzles", "40", "--out", str(tmp_path)])
    assert {path: path.stat().st_mtime_ns for path in again.rglob("model.safetensors")} == before


def test_a_fresh_demo_deletes_its_own_runs_alone(tmp_path, monkeypatch):
    mine = tmp_path / "runs" / "first" / "config.json"
    mine.parent.mkdir(parents=True)
    mine.write_text("{}")
    demo = Command(out=tmp_path, steps=4, fresh=True)
    own = [run.folder for run in plan(demo._configs(), tmp_path)]
    for folder in own:
        folder.mkdir()
    monkeypatch.setattr(
        "headcode.cli._generated_network.open_layer", lambda *arguments: 1 / 0
    )  # what comes after the deletion
    with pytest.raises(ZeroDivisionError):
        demo.run()
    assert len(own) == 3 and not any(folder.exists() for folder in own)
    assert mine.is_file()


@pytest.mark.parametrize("method", ["softmax", "hyla"])
def test_generated_networks_are_the_layer(method, tmp_path):
    opened = open_layer(method, seed=0)
    assert opened.error < 1e-9
    words = in_words(opened, method)
    assert words.count("█") >= 6 and f"One {method} layer" in words
    assert draw_opened(opened, method, tmp_path).stat().st_size > 10_000


SMALL = {"dim": 8, "num_layers": 1, "num_heads": 2, "qk_dim": 4, "v_dim": 4, "mlp_dim": 8, "auxiliary_weight": 0.0}
SHORT = {"steps": 2, "batch_size": 4, "eval_size": 16, "eval_every": 0, "checkpoint_every": 0, "log_every": 1}


@pytest.fixture
def own_zoo(tmp_path, monkeypatch):
    """A zoo with models for puzzles of two kinds, all barely trained, and one for fuzzy logic."""
    folder = tmp_path / "models"
    for module in ("headcode.zoo", "headcode.train.checkpoint"):
        monkeypatch.setattr(f"{module}.ZOO", folder)
    easy = override(preset("sraven-fast"), **SMALL, **SHORT, num_features=2, permute=False)
    hard = override(preset("sraven-fast"), **SMALL, **SHORT)
    models = {
        "a-plain": easy,
        "b-first": hard,
        "c-second": override(hard, seed=1),
        "d-three": override(hard, num_features=3),
    }
    models["e-logic"] = override(preset("logic-small"), num_points=5, **SHORT)
    for name, config in models.items():
        Trainer(config, tmp_path / name, runtime=Runtime(threads=1)).run()
        add_model(tmp_path / name, name, "A test.", zoo=folder, size=32)
    return folder


def test_the_hardest_puzzles_then_the_best_on_seen_compositions(own_zoo):
    for better, worse in (("b-first", "c-second"), ("c-second", "b-first")):
        for name, iid, compositional in ((better, 0.5, 0.1), (worse, 0.4, 0.9)):
            card = json.loads((own_zoo / name / "card.json").read_text())
            card["scores"]["iid"]["accuracy"], card["scores"]["compositional"]["accuracy"] = iid, compositional
            (own_zoo / name / "card.json").write_text(json.dumps(card))
        assert choose_model() == better
    for name in ("b-first", "c-second", "d-three"):
        shutil.rmtree(own_zoo / name)
    assert choose_model() == "a-plain"
    shutil.rmtree(own_zoo / "a-plain")
    with pytest.raises(ValueError, match="The zoo has no SRAVEN model"):
        choose_model()


def test_a_puzzle_of_four_features_is_shown_whole(own_zoo, tmp_path):
    solved = solve_puzzles("b-first", 30, tmp_path / "figures")
    lines = solved.words.splitlines()
    assert lines[0] == f"The model: zoo/b-first, {RULE}."
    frame = [line for line in lines if line.startswith("│")]
    assert len(frame) == 3 and frame[2].endswith("│ ? ? ? ? │")
    assert all(len(re.findall(r"[0-7?]", line)) == 12 for line in frame)
    answer = next(line for line in lines if line.startswith("the model's answer:"))
    assert re.fullmatch(r"the model's answer: [0-7]( [0-7]){3}   \(probabilities [\d. ]+\)", answer)
    truth = next(line for line in lines if line.startswith("the answer:"))
    assert len(truth.partition("rules: ")[2].split(", ")) == 4
    assert "all 4 features" in solved.summary and "guessing gets 0.02%" in solved.summary
    drawing = Path(solved.picture).read_text(encoding="utf-8")
    assert all(f"<!-- {word} -->" in drawing for word in ("shape", "colour", "number", "pointer"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["--puzzles", "0"], "--puzzles must be 1 or more, got 0"), (["--out", "file"], "--out file is a file; choose")],
)
def test_mistakes_are_one_sentence(arguments, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(SystemExit) as stop:
        main(["demo", *arguments])
    assert stop.value.code == 2 and sentence in capsys.readouterr().err
