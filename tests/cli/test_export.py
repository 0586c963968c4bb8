"""`headcode export`: files, cards, and one line for every mistake."""

import json

import pytest

from headcode.tasks import FuzzyLogic, SRaven


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.npz"])
def test_the_ending_says_the_format(run, tmp_path, name):
    path = tmp_path / name
    code, text, _ = run("export", "sraven", "--split", "iid", "--count", "13", "--seed", "3", "--out", str(path))
    assert code == 0
    card = json.loads((tmp_path / f"{name}.card.json").read_text())
    assert card["format"] == path.suffix[1:]
    assert card["sha256"] == SRaven(seed=3).fingerprint("iid", 13)
    assert card["sha256"] in text


def test_prompts_and_default_names(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, _ = run("export", "logic", "--format", "text", "--split", "novel", "--count", "2", "--num-points", "4")
    assert code == 0
    rows = [json.loads(line) for line in (tmp_path / "logic-novel.prompts.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert rows[0]["prompt"].endswith("=")
    card = json.loads((tmp_path / "logic-novel.prompts.jsonl.card.json").read_text())
    assert FuzzyLogic.from_dict(card["config"]) == FuzzyLogic(num_points=4)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--out", "a.csv"), "'a.csv' ends in none of"),
        (("--split", "novel", "--out", "a.npz"), "has no split 'novel'"),
        (("--count", "0", "--out", "a.npz"), "1 or more"),
        (("logic", "--oracle", "--out", "a.npz"), "SRAVEN"),
        (("--format", "csv"), "csv"),
    ],
)
def test_mistakes_end_with_one_line_and_exit_code_2(run, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    code, _, error = run("export", *arguments)
    assert code == 2
    assert error.startswith("headcode: ")
    assert error.count("\n") == 1
    assert sentence in error
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_line(run, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, error = run("export", "--count", "2", "--out", str(tmp_path / "file" / "a.npz"))
    assert code == 2
    assert error.count("\n") == 1
