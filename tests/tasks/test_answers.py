"""Answers to exported puzzles: scored as a second count would, and refused in one sentence where they cannot be."""

import csv
import json

import numpy as np
import pytest

from headcode.cli import main
from headcode.tasks import SRaven, oracle
from headcode.tasks.answers import read_answers, read_card
from headcode.tasks.export import card_path, export
from headcode.tasks.scores import score
from headcode.tasks.variants import as_variant, variant_names, variant_orders

TASK = SRaven(num_features=3, seed=5)
SPLIT, START, COUNT, VARIANTS = "compositional", 11, 101, 3
INSTANCES = np.arange(START, START + COUNT)


@pytest.fixture(scope="module")
def puzzles(tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "puzzles.jsonl"
    export(TASK, SPLIT, COUNT, path, "text", START, num_variants=VARIANTS)
    return path


@pytest.fixture(scope="module")
def exported(puzzles):
    return read_card(card_path(puzzles))


def prompts(puzzles):
    return [json.loads(line) for line in puzzles.read_text(encoding="utf-8").splitlines()]


def write(path, exported, rows):
    lines = [{"headcode_answers": 1, "sha256": exported.sha256}, *rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answered(puzzles, answer):
    """A row for each prompt, with what `answer` makes of it."""
    return [{"instance": p["instance"], "variant": p["variant"], "answer": answer(p)} for p in prompts(puzzles)]


def test_right_answers_are_right_under_every_name(puzzles, exported, tmp_path):
    rows = answered(puzzles, lambda prompt: prompt["answer"])
    found = score(exported, read_answers(write(tmp_path / "a.jsonl", exported, rows), exported))
    for share in (found["accuracy"], found["pass_any"], found["pass_all"], found["feature_accuracy"]):
        assert share["share"] == 1 and share["high"] == 1 and 0.9 < share["low"] < 1
    assert found["accuracy"]["count"] == COUNT and found["feature_accuracy"]["count"] == 3 * COUNT
    assert sum(share["count"] for share in found["rules"].values()) == 3 * COUNT
    assert sum(share["count"] for share in found["distinct_rules"].values()) == COUNT
    assert found["one_answer"]["count"] + found["several_answers"]["count"] == COUNT


def test_the_oracles_answers_reach_the_ceiling(tmp_path):
    task, path = SRaven(seed=3), tmp_path / "many.jsonl"
    export(task, "iid", 4096, path, "text")
    exported = read_card(card_path(path))
    rows = [{"instance": p["instance"], "answer": p["answers"][0]} for p in prompts(path)]
    found = score(exported, read_answers(write(tmp_path / "a.jsonl", exported, rows), exported))
    assert found["accuracy"]["low"] < found["ceiling"] < found["accuracy"]["high"]
    assert found["posterior"]["share"] == pytest.approx(found["ceiling"], abs=1e-12)
    assert found["supported"]["share"] == 1 and found["one_answer"]["share"] == 1
    assert "pass_any" not in found


def test_random_answers_have_one_feature_in_eight(tmp_path):
    task, path = SRaven(seed=3), tmp_path / "many.jsonl"
    export(task, "iid", 4096, path, "jsonl")
    exported, guesses = read_card(card_path(path)), np.random.default_rng(0).integers(0, 8, (4096, 4))
    rows = [{"instance": number, "answer": guess} for number, guess in enumerate(guesses.tolist())]
    found = score(exported, read_answers(write(tmp_path / "a.jsonl", exported, rows), exported))
    assert found["feature_accuracy"]["low"] < 1 / 8 < found["feature_accuracy"]["high"]
    for share in found["rules"].values():
        assert abs(share["share"] - 1 / 8) < 4 * (1 / 8 * 7 / 8 / share["count"]) ** 0.5
    batch = task.instances("iid", np.arange(4096))
    assert found["accuracy"]["share"] == (guesses == batch.y.numpy()).all(1).mean()
    solutions = oracle.solve_split(task, "iid", batch.info["puzzles"])
    assert found["posterior"]["share"] == pytest.approx(solutions.probability_of(guesses).mean())


def test_any_and_all_of_the_variants(puzzles, exported, tmp_path):
    rows = answered(puzzles, lambda p: p["answer"] if p["instance"] % 2 == 0 or p["variant"] == 1 else "")
    found = score(exported, read_answers(write(tmp_path / "a.jsonl", exported, rows), exported))
    even = (INSTANCES % 2 == 0).mean()
    assert (found["accuracy"]["share"], found["pass_all"]["share"], found["pass_any"]["share"]) == (even, even, 1)


def test_a_variant_is_the_same_puzzle_under_other_names(puzzles):
    batch = TASK.instances(SPLIT, INSTANCES)
    for variant in range(1, VARIANTS):
        shown = as_variant(TASK, batch, variant)
        before, after = (b.info["puzzles"].numpy() for b in (batch, shown))
        assert not np.array_equal(before, after) and np.array_equal(np.sort(before, 3), np.sort(after, 3))
        # What the permutations say of the features holds for the variant's puzzles too.
        for b, puzzle in ((batch, before), (shown, after)):
            features = np.argsort(b.info["permutations"].numpy(), 2)[:, None]
            b.info["features"] = np.take_along_axis(puzzle, np.broadcast_to(features, puzzle.shape), 3)
        assert np.array_equal(batch.info["features"], shown.info["features"])
        solutions = [oracle.solve_split(TASK, SPLIT, b.info["puzzles"]) for b in (batch, shown)]
        assert np.array_equal(solutions[0].num_answers, solutions[1].num_answers)
        np.testing.assert_allclose(solutions[0].best_probability, solutions[1].best_probability)
        # Alone or in company, in whatever order: an instance's variant is its own.
        alone = variant_orders(TASK, INSTANCES[[7, 3]], variant)
        assert np.array_equal(alone, variant_orders(TASK, INSTANCES, variant)[[7, 3]])
        names = variant_names(TASK, START, variant)
        assert len(set(names)) == 8 and names != variant_names(TASK, START + 1, variant)
    letters = next(p for p in prompts(puzzles) if p["variant"] == 1)
    assert all(f"{name} = {value}" in letters["prompt"] for value, name in enumerate(variant_names(TASK, START, 1)))
    assert letters["answer"] in letters["answers"] and letters["answer"].replace(" ", "").isalpha()


def test_unpermuted_puzzles_keep_their_columns_matched():
    task = SRaven(permute=False)
    orders = variant_orders(task, np.arange(5), 1)
    assert (orders == orders[:, :1]).all() and len(np.unique(orders[:, 0], axis=0)) > 1


def test_csv_says_the_same_as_json(puzzles, exported, tmp_path):
    rows = answered(puzzles, lambda prompt: prompt["answer"] if prompt["instance"] % 3 else "I do not know")
    lines = read_answers(write(tmp_path / "a.jsonl", exported, rows), exported)
    with open(tmp_path / "a.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["sha256", "instance", "variant", "answer", "remark"])
        writer.writeheader()
        writer.writerows({"sha256": exported.sha256, "remark": "a, b", **row} for row in rows)
    assert np.array_equal(read_answers(tmp_path / "a.csv", exported), lines)
    assert (lines[:, INSTANCES % 3 == 0] == -1).all() and (lines[:, INSTANCES % 3 != 0] >= 0).all()


def test_a_cell_of_csv_may_be_as_long_as_a_line_of_json(exported, puzzles, tmp_path):
    """Reasoning before the answer; but a quote that is never closed does not swallow the file."""
    usual, path = csv.field_size_limit(), tmp_path / "a.csv"
    rows = answered(puzzles, lambda prompt: "x" * 200_000 + f"\nAnswer: {prompt['answer']}")
    head = f"sha256,instance,variant,answer\n{exported.sha256},"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["sha256", "instance", "variant", "answer"])
        writer.writeheader()
        writer.writerows({"sha256": exported.sha256, **row} for row in rows)
    assert (read_answers(path, exported) >= 0).all()
    path.write_text(f'{head}11,0,"{"x" * 900_000}\n{"x" * 900_000}\n')
    with pytest.raises(ValueError, match=r"is no line of CSV: field larger than field limit \(1000000\)\.$"):
        read_answers(path, exported)
    assert csv.field_size_limit() == usual


NO_PANELS = [
    None,
    5,
    {},
    [],
    [1, 2],
    [1, 2, 8],
    [1, -2, 3],
    [1, "x", 3],
    [[1], 2, 3],
    [1.5, 2, 3],
    [True, 2, 3],
    "1 2",
    "a b c",
]


@pytest.mark.parametrize("answer", NO_PANELS)
def test_what_is_no_panel_counts_as_wrong(puzzles, exported, tmp_path, answer):
    rows = answered(puzzles, lambda prompt: answer if prompt["variant"] == 0 else prompt["answer"])
    found = read_answers(write(tmp_path / "a.jsonl", exported, rows), exported)
    assert (found[0] == -1).all() and (found[1:] >= 0).all()


def lines_of(exported, rows):
    return [json.dumps({"headcode_answers": 1, "sha256": exported.sha256}), *map(json.dumps, rows)]


BROKEN = {
    "missing": (lambda lines: lines[:-2], "no answer for 2 of 303 puzzles, the first is instance 110, variant 2"),
    "twice": (lambda lines: [*lines, lines[5]], "instance 15 with variant 0 is there twice"),
    "beyond": (lambda lines: [*lines, '{"instance": 112}'], "there is no instance 112"),
    "negative": (lambda lines: [*lines, '{"instance": -1}'], "whole numbers from 0 on, got -1 and 0"),
    "variant": (lambda lines: [*lines, '{"instance": 11, "variant": 3}'], "no instance 11 with variant 3"),
    "hash": (lambda lines: ['{"headcode_answers": 1, "sha256": "ab"}', *lines[1:]], "its sha256 is 'ab'"),
    "version": (lambda lines: ['{"headcode_answers": 2}', *lines[1:]], "is of version 2 of this format"),
    "no header": (lambda lines: lines[1:], "does not say which puzzles it answers"),
    "no json": (lambda lines: [*lines[:3], "dodo"], "line 4 is not valid JSON"),
    "no object": (lambda lines: [*lines[:3], "[1]"], "line 4: an answer is an object"),
    "nothing": (lambda lines: [], "does not say which puzzles it answers"),
    "prose": (lambda lines: ["All my answers are right."], "does not say which puzzles it answers"),
    "endless line": (lambda lines: [*lines, " " * 2_000_000], "more than 1,000,000 characters"),
    "csv hash": (lambda lines: ["sha256,instance,answer", "x,11,1 2 3"], "its sha256 is 'x'"),
    "csv words": (lambda lines: ["sha256,instance,answer", f"{lines[0][-66:-2]},eleven,1 2 3"], "got 'eleven' and 0"),
    "csv return": (lambda lines: ["sha256,instance,answer\ra,11,1 2 3"], "1 is no line of CSV"),
    "csv returns": (lambda lines: ["sha256,instance,answer", f"{lines[0][-66:-2]},11,1\r2 3"], "2 is no line of CSV"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_one_sentence(puzzles, exported, tmp_path, capsys, case):
    change, sentence = BROKEN[case]
    lines = change(lines_of(exported, answered(puzzles, lambda prompt: prompt["answer"])))
    path = tmp_path / "a.txt"
    path.write_bytes("\n".join([*lines, ""]).encode())
    with pytest.raises(SystemExit) as stopped:
        main(["score", str(path), "--puzzles", str(puzzles)])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and sentence in error and error.count("\n") == 1


@pytest.mark.parametrize("content", [b"\x00\xff\xfe" * 50, b"\x80abc\n"])
def test_bytes_that_are_no_text_are_refused(exported, tmp_path, content):
    path = tmp_path / "a"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"line 1 is not text in UTF-8|does not say"):
        read_answers(path, exported)


def test_ten_gigabytes_are_not_read(exported, tmp_path):
    path = tmp_path / "huge"
    with open(path, "wb") as file:
        file.truncate(10 * 2**30)  # a hole: no disk is filled
    with pytest.raises(ValueError, match="has 10,737,418,240 bytes, and a file of answers at most 4,000,000,000"):
        read_answers(path, exported)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"task": "logic"}, "is not the card of exported SRAVEN puzzles"),
        ({"config": 5}, "is not the card"),
        ({"count": 0}, "does not say which puzzles"),
        ({"variants": 0}, "does not say which puzzles"),
        ({"variants": 10**12}, "does not say which puzzles"),
        ({"count": 102}, "have another one"),
        ({"count": 10**12}, "at most 10,000,000 are scored at once"),
        ({"split": "iid"}, "have another one"),
        ({"sha256": "ab"}, "have another one"),
        ({"split": "dodo"}, "has no split 'dodo'"),
    ],
)
def test_a_changed_card_is_refused(puzzles, tmp_path, change, sentence):
    card = json.loads(card_path(puzzles).read_text()) | change
    (tmp_path / "x.card.json").write_text(json.dumps(card))
    with pytest.raises(ValueError, match=sentence):
        read_card(tmp_path / "x.card.json")


def test_the_command_prints_what_it_found(puzzles, exported, tmp_path, capsys):
    rows = answered(puzzles, lambda prompt: prompt["answer"])
    path = write(tmp_path / "a.jsonl", exported, rows)
    main(["score", str(path), "--puzzles", str(puzzles)])
    out = capsys.readouterr().out
    assert "all features right " in out and "right in all 3 variants" in out
    assert max(map(len, out.splitlines())) <= 90
    main(["score", str(path), "--puzzles", str(card_path(puzzles)), "--json"])
    assert json.loads(capsys.readouterr().out)["accuracy"]["share"] == 1
