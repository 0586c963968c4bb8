"""headcode score as somebody uses it who has only the docs: files beside each other, and every mistake one sentence."""

import csv
import json
import os

import numpy as np
import pytest

from headcode.cli import main
from headcode.tasks import SRaven
from headcode.tasks.answers import panel, read_card
from headcode.tasks.export import card_path, export
from headcode.tasks.scores import score

COUNT = 211


def write(folder, num_features, split="compositional", answer=None, name="answers.jsonl"):
    """Exported prompts and answers to them: the true ones unless `answer` says otherwise."""
    folder.mkdir(exist_ok=True)
    prompts = folder / f"prompts-{num_features}-{split}.jsonl"
    card = export(SRaven(num_features=num_features), split, COUNT, prompts, "text")
    rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    lines = [{"headcode_answers": 1, "sha256": card["sha256"]}]
    lines += [{"instance": row["instance"], "answer": (answer or (lambda r: r["answer"]))(row)} for row in rows]
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / name


def said(capsys, *arguments):
    main(["score", *map(str, arguments)])
    return capsys.readouterr().out


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["score", *map(str, arguments)])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1, error
    return error


def test_the_card_beside_the_answers_is_found(tmp_path, capsys):
    answers = write(tmp_path, 2)
    write(tmp_path, 2, "iid", name="others.jsonl")
    (tmp_path / "broken.card.json").write_text("{")
    out = said(capsys, answers)
    assert "211 puzzles of 2 features, split compositional" in out and "all features right" in out
    found = json.loads(said(capsys, answers, "--json"))
    assert found == json.loads(said(capsys, answers, "--puzzles", tmp_path / "prompts-2-compositional.jsonl", "--json"))
    assert (found["headcode_score"], found["split"], found["unreadable"]) == (1, "compositional", 0)


def test_several_files_are_compared_by_the_number_of_features(tmp_path, capsys):
    files = [write(tmp_path, count, name=f"answers-{count}.jsonl") for count in (3, 4, 2)]
    table = said(capsys, *files).splitlines()[-4:]
    assert [line.split()[0] for line in table] == ["features", "2", "3", "4"]
    found = json.loads(said(capsys, *files, "--json"))["files"]
    assert [found[str(path)]["features"] for path in files] == [3, 4, 2]


def test_unreadable_answers_are_told(tmp_path, capsys):
    answers = write(tmp_path, 2, answer=lambda row: "I give up" if row["instance"] < 5 else row["answer"])
    assert "Not readable as a panel, and counted as wrong: 5." in said(capsys, answers)
    found = json.loads(said(capsys, answers, "--json"))
    assert found["unreadable"] == 5 and found["accuracy"]["share"] == pytest.approx(1 - 5 / COUNT)
    assert found["features_right"]["0"]["share"] == pytest.approx(5 / COUNT)


def test_shares_beside_the_exact_solver(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    export(SRaven(), "compositional", 2048, prompts, "text")
    exported = read_card(card_path(prompts))
    batch = exported.task.instances("compositional", np.arange(2048))
    found = score(exported, batch.y.numpy()[None].copy())
    groups = [found["accuracy"], found["one_answer"], found["several_answers"], *found["rules"].values()]
    assert all(group["share"] == 1.0 for group in groups) and found["one_answer"]["solver"] == 1.0
    assert found["several_answers"]["solver"] < found["accuracy"]["solver"] < found["feature_accuracy"]["solver"] < 1
    shares = found["share_of_ceiling"]
    assert shares["share"] == 1 / found["ceiling"] and shares["low"] == found["accuracy"]["low"] / found["ceiling"]
    assert found["posterior"]["low"] < found["ceiling"] < found["posterior"]["high"] + 0.05
    assert 0.9 < found["uninformed_solver"]["share"] < 0.95
    assert sum(share["count"] for share in found["rules"].values()) == 4 * 2048


PANELS = [
    ("3 0", [3, 0]),
    ("[3, 0]", [3, 0]),
    ("**3 0**.", [3, 0]),
    ("Rows 1 and 2 say +1.\n\nAnswer: 3 0\nI am sure of it.", [3, 0]),
    ("Answer: 1 1? No.\nANSWER:\n3, 0", [3, 0]),
    ("d a", [3, 0]),
    ("Answer: D A", [3, 0]),
    ("The answer is 3 0", None),
    ("Answer: 3 0 0", None),
    ("Answer:", None),
    ("30", None),
    ("a x", None),
    ("9" * 5000 + " 0", None),
]


@pytest.mark.parametrize(("answer", "expected"), PANELS)
def test_texts_are_read_by_one_rule(answer, expected):
    assert panel(answer, SRaven(num_features=2), list("abcdefgh")) == expected


def test_csv_from_another_program(tmp_path, capsys):
    """Cells over several lines, with commas and quotes, in any order of columns, with a byte-order mark and CRLF."""
    answers = write(tmp_path, 2)
    header, *rows = map(json.loads, answers.read_text().splitlines())
    with open(tmp_path / "a.csv", "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, lineterminator="\r\n")
        writer.writerow(["answer", "note", "instance", "sha256"])
        for row in rows:
            writer.writerow([f"So,\n\nI think.\nAnswer: {row['answer']}", 'a "b"\n', row["instance"], header["sha256"]])
    told = [said(capsys, path, "--json") for path in (answers, tmp_path / "a.csv")]
    assert told[0] == told[1]


def test_csv_with_commas_outside_quotes_is_refused(tmp_path, capsys):
    answers = write(tmp_path, 2)
    digest = json.loads(answers.read_text().splitlines()[0])["sha256"]
    (tmp_path / "a.csv").write_text(f"sha256,instance,answer\n{digest},0,3,0\n")
    assert "line 2 has 4 cells, and the first line names 3 columns" in refused(capsys, tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text(f'sha256,instance,answer\n{digest},0,"3 0\n')
    assert "is no line of CSV" in refused(capsys, tmp_path / "b.csv")


def test_mistakes_are_one_sentence(tmp_path, capsys):
    answers = write(tmp_path, 2)
    write(tmp_path / "iid", 2, "iid")
    other = tmp_path / "iid" / "prompts-2-iid.jsonl"
    wrong_split = refused(capsys, answers, "--puzzles", other)
    assert "answers other puzzles" in wrong_split and "split iid, 211 from instance 0 on" in wrong_split
    alone = tmp_path / "alone"
    alone.mkdir()
    answers.rename(alone / "answers.jsonl")
    assert "no card beside it has that hash: say --puzzles FILE" in refused(capsys, alone / "answers.jsonl")
    assert "There is no card" in refused(capsys, alone / "answers.jsonl", "--puzzles", alone / "answers.jsonl")
    assert "--puzzles goes with one file" in refused(capsys, alone / "a", alone / "b", "--puzzles", other)
    assert "no such file" in refused(capsys, alone / "nothing.jsonl").lower()
    (alone / "a.jsonl").write_text('{"headcode_answers": 1, "sha256": "ab"}\n')
    assert "has no answers" in refused(capsys, alone / "a.jsonl")
    (alone / "a.jsonl").write_text('{"headcode_answers": 1}\n{"instance": 0}\n')
    assert "does not say which puzzles it answers" in refused(capsys, alone / "a.jsonl")
    os.mkfifo(alone / "pipe")
    assert "is not a regular file" in refused(capsys, alone / "pipe")
    assert refused(capsys)


@pytest.mark.parametrize("beginning", [b"", b'{"headcode_answers": 1, "sha256": "ab"}\n'])
def test_ten_gigabytes_end_at_once(tmp_path, capsys, beginning):
    with open(tmp_path / "huge.jsonl", "wb") as file:
        file.write(beginning)
        file.truncate(10 * 2**30)  # a hole: no disk is filled
    assert "has 10,737,418,240 bytes" in refused(capsys, tmp_path / "huge.jsonl")
    with open(tmp_path / "large.jsonl", "wb") as file:
        file.write(beginning)
        file.truncate(3 * 2**30)
    assert "more than 1,000,000 characters" in refused(capsys, tmp_path / "large.jsonl")
