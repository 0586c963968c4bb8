"""`headcode bench lm` measures what it says, on sizes that take a moment."""

import json
import re

import pytest

from headcode.cli import main

SIZES = "--dim 16 --num-layers 1 --num-heads 2 --mlp-dim 8 --vocab-size 40 --context 8 --batch-size 2 --prompt 3"


def test_rows(capsys, tmp_path):
    flags = ["--new-tokens", "4", "--rounds", "1", "--seconds", "0.01", "--methods", "softmax", "linear"]
    main(
        ["bench", "lm", *SIZES.split(), *flags, "--threads", "1", "--json", "--out", str(tmp_path / "new" / "table.md")]
    )
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["model"] for row in rows] == ["Llama (Hugging Face)", "softmax", "linear"]
    assert all(row[name] > 0 for row in rows for name in ("train", "decode", "decode_hf", "parameters"))
    for row in rows[1:]:
        assert row["train_ratio"] == row["train"] / rows[0]["train"]
        assert row["decode_ratio"] == row["decode"] / rows[0]["decode"]
        assert abs(row["parameters"] / rows[0]["parameters"] - 1) < 0.2  # biases and layer norms against RMS norms
    lines = (tmp_path / "new" / "table.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    assert len(cells) == 5 and all(len(row) == 7 for row in cells)
    for row, written in zip(rows, cells[2:], strict=True):
        assert written[:4] == [
            row["model"],
            f"{row['parameters']:,}",
            f"{row['train']:,.0f}",
            f"{row['train_ratio']:.2f}×",
        ]
        assert written[4:] == [f"{row['decode']:,.0f}", f"{row['decode_ratio']:.2f}×", f"{row['decode_hf']:,.0f}"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--threads", "0"], "--threads must be 1 or more"),
        (["--seconds", "nan"], "--seconds above 0"),
        (["--methods", "softmax", "llama"], "--methods must be of softmax, linear, .* got 'llama'"),
    ],
)
def test_mistakes_are_found_before_anything_is_measured(capsys, monkeypatch, flags, words):
    monkeypatch.setattr("headcode.bench.lm.Lm.measure", lambda self: pytest.fail("measured"))
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "lm", *flags])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and len(error.splitlines()) == 1
    assert re.search(words, error)
