"""`headcode bench widths` and `headcode bench scale`, on small numbers."""

import csv

import pytest

from headcode.cli import main


def test_widths_gives_a_ratio_for_every_width_and_length(tmp_path, capsys):
    sizes = ["--widths", "2", "5", "--lengths", "7", "11", "--heads", "3", "--tokens", "22", "--repeats", "5"]
    main(["bench", "widths", *sizes, "--out", str(tmp_path)])
    rows = list(csv.DictReader((tmp_path / "widths.csv").open(encoding="utf-8")))
    shapes = [f"B{batch} H3 T{length} D{width}" for batch, length in ((3, 7), (2, 11)) for width in (2, 5)]
    assert [(row["shape"], row["causal"]) for row in rows] == [(s, c) for s in shapes for c in ("False", "True")]
    for row in rows:
        ratio = float(row["milliseconds"]) / float(row["sdpa_milliseconds"])
        assert float(row["of_sdpa"]) == pytest.approx(ratio)
    printed = capsys.readouterr().out
    assert "| full, causal |" in printed and "| B3 T7 " in printed


def test_scale_grows_by_sum_and_not_by_mean(tmp_path, capsys):
    small = ["--lengths", "8", "512", "--steps", "1", "--seeds", "2", "--dim", "16", "--layers", "2", "--context", "16"]
    main(["bench", "scale", *small, "--batch-size", "2", "--out", str(tmp_path)])
    rows = list(csv.DictReader((tmp_path / "scale.csv").open(encoding="utf-8")))
    assert [(row["method"], row["pooling"]) for row in rows] == [
        ("softmax", "sum"),
        ("hyla", "sum"),
        ("hyla", "mean"),
        ("hyla", "sqrt"),
    ]
    growth = [float(row["512 tokens"]) / float(row["8 tokens"]) for row in rows]
    assert growth[1] == pytest.approx(8, rel=0.1) and growth[3] == pytest.approx(1, rel=0.1) and growth[2] < 0.2
    assert all("±" in row["held out, at the end"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["widths", "--widths", "0"], "--widths, --lengths, --heads and --tokens must be at least 1"),
        (["widths", "--method", "magic"], "--method must be of softmax"),
        (["scale", "--dim", "12"], "--dim must be a multiple of 8, got 12"),
        (["scale", "--seeds", "0"], "--seeds, --layers"),
    ],
)
def test_refuses_in_one_sentence(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments])
    assert stopped.value.code == 2 and words in capsys.readouterr().err
