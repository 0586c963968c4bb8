"""The demo, shortened: trains, decodes, solves and writes its page; and the layer that it takes apart."""

import csv
import re

import pytest

from headcode.cli import main
from headcode.cli._generated_network import draw_opened, in_words, open_layer


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


@pytest.mark.parametrize("method", ["softmax", "hyla"])
def test_generated_networks_are_the_layer(method, tmp_path):
    opened = open_layer(method, seed=0)
    assert opened.error < 1e-9
    words = in_words(opened, method)
    assert words.count("█") >= 6 and f"One {method} layer" in words
    assert draw_opened(opened, method, tmp_path).stat().st_size > 10_000


def test_mistakes_are_one_sentence(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--puzzles", "0"])
    assert stop.value.code == 2 and "--puzzles must be 1 or more, got 0" in capsys.readouterr().err
