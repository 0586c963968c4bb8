"""`headcode bench lm` measures what it says, on sizes that take a moment."""

import json

from headcode.cli import main

SIZES = "--dim 16 --num-layers 1 --num-heads 2 --mlp-dim 8 --vocab-size 40 --context 8 --batch-size 2 --prompt 3"


def test_rows(capsys, tmp_path):
    flags = ["--new-tokens", "4", "--rounds", "1", "--seconds", "0.01", "--methods", "softmax", "linear"]
    main(["bench", "lm", *SIZES.split(), *flags, "--threads", "1", "--json", "--out", str(tmp_path / "table.md")])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["model"] for row in rows] == ["Llama (Hugging Face)", "softmax", "linear"]
    assert all(row[name] > 0 for row in rows for name in ("train", "decode", "decode_hf", "parameters"))
    for row in rows[1:]:
        assert row["train_ratio"] == row["train"] / rows[0]["train"]
        assert row["decode_ratio"] == row["decode"] / rows[0]["decode"]
        assert abs(row["parameters"] / rows[0]["parameters"] - 1) < 0.2  # biases and layer norms against RMS norms
    assert (tmp_path / "table.md").read_text().count("\n| ") == 5
