"""Exports read back equal to the instances, with a card that anybody can check; prompts give nothing away."""

import json
import os
import re
import sys

import numpy as np
import pytest

from headcode.tasks import FuzzyLogic, SRaven, oracle, text
from headcode.tasks import export as files
from headcode.tasks.export import card_path, export
from tests.support import ROOT

SRAVEN = SRaven(num_features=3, seed=4)
LOGIC = FuzzyLogic(num_points=5, seed=4)


def read(path, format):
    if format == "jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return {name: np.array([row[name] for row in rows]) for name in rows[0] if name != "answers"}
    if format == "npz":
        with np.load(path) as data:
            return {name: data[name] for name in data.files if name != "card"}
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    return {name: np.array(table[name].to_pylist()) for name in table.column_names if name != "answers"}


@pytest.mark.parametrize("format", ["parquet", "jsonl", "npz"])
@pytest.mark.parametrize("task", [SRAVEN, LOGIC], ids=["sraven", "logic"])
def test_files_hold_the_instances(tmp_path, monkeypatch, task, format):
    monkeypatch.setattr(files, "CHUNK", 7)  # several chunks, the last one short
    path = tmp_path / "folder" / f"data.{format}"
    card = export(task, "compositional", 23, path, format, start=5)
    found = read(path, format)
    batch = task.instances("compositional", range(5, 28))
    assert found["instance"].tolist() == list(range(5, 28))
    assert (found["composition"] == batch.info["composition"].numpy()).all()
    if isinstance(task, SRaven):
        assert (found["puzzle"] == batch.info["puzzles"].numpy()).all()
        assert (found["answer"] == batch.y.numpy()).all()
        assert (found["rules"] == batch.info["rules"].numpy()).all()
        assert (found["permutations"] == batch.info["permutations"].numpy()).all()
    else:
        assert (found["terms"] == batch.info["terms"].numpy()).all()
        assert (found["inputs"].astype(np.float32) == batch.x[..., :-1].numpy()).all()
        assert (found["targets"].astype(np.float32) == batch.info["targets"].numpy()).all()
    assert card["sha256"] == task.fingerprint("compositional", 23, 5)
    assert set(card["columns"]) == set(found)
    assert not [entry for entry in path.parent.iterdir() if entry.name.startswith(".")]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="links and pipes as on Unix")
@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("format", ["parquet", "jsonl", "npz", "text"])
def test_planted_drafts_are_not_written(tmp_path, format, kind):
    """Neither the names of drafts that another user can know, nor those that he must guess."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for number, name in enumerate(
        (".out.part", ".out.card.json", f".out.{os.getpid()}", f".out.card.json.{os.getpid()}")
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        if kind == "link":
            (folder / name).symlink_to(victim)
        else:
            os.mkfifo(folder / name)
        if number < 2:
            card = export(SRAVEN, "iid", 5, folder / "out", format)
            assert json.loads(card_path(folder / "out").read_text()) == card
            assert not (folder / "out").is_symlink() and (folder / "out").stat().st_size > 100
        else:
            with pytest.raises(OSError, match="is not a regular file but a link, a pipe or the like"):
                export(SRAVEN, "iid", 5, folder / "out", format)
            assert list(folder.iterdir()) == []
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("format", ["parquet", "jsonl", "npz", "text"])
def test_the_card_rebuilds_the_file(tmp_path, format):
    path = tmp_path / "data"
    export(SRAVEN, "iid", 5, path, format)
    card = json.loads(card_path(path).read_text())
    assert card["seed"] == 4
    assert card["generator_version"] == SRaven.version
    again = SRaven.from_dict(card["config"])
    assert again == SRAVEN
    assert again.fingerprint(card["split"], card["count"], card["start"]) == card["sha256"]
    inside = None
    if format == "npz":
        with np.load(path) as data:
            inside = json.loads(str(data["card"]))
    elif format == "parquet":
        import pyarrow.parquet

        inside = json.loads(pyarrow.parquet.read_metadata(path).metadata[b"headcode.card"])
    if inside is not None:
        assert inside["sha256"] == card["sha256"]
        assert inside["config"] == card["config"]
    first = path.read_bytes()
    export(SRAVEN, "iid", 5, path, format)
    assert path.read_bytes() == first


@pytest.mark.parametrize("format", ["jsonl", "npz", "parquet"])
def test_the_oracle_may_come_along(tmp_path, format):
    path = tmp_path / "data"
    export(SRAVEN, "iid", 300, path, format, with_oracle=True)
    found = read(path, format)
    prior = SRAVEN.compositions[SRAVEN.split_compositions["iid"]]
    solutions = oracle.solve(SRAVEN.raw("iid", np.arange(300))["puzzles"], compositions=prior)
    assert (found["num_answers"] == solutions.num_answers).all()
    assert (found["best_probability"] == solutions.best_probability).all()
    right = (solutions.best == found["answer"]).all(axis=1)
    assert (found["answer_probability"][right] == found["best_probability"][right]).all()
    assert (found["answer_probability"][~right] <= found["best_probability"][~right]).all()
    assert (~right).any()


def parse_prompt(prompt):
    rows = re.findall(r"^Row \d+: (.*)$", prompt, flags=re.M)
    return [[panel for panel in re.findall(r"\[([^]]*)\]", row)] for row in rows]


def test_prompts_hold_the_visible_panels_and_not_the_answer(tmp_path):
    path = tmp_path / "prompts.jsonl"
    export(SRAVEN, "iid", 50, path, "text")
    batch = SRAVEN.instances("iid", range(50))
    for n, line in enumerate(path.read_text().splitlines()):
        row = json.loads(line)
        panels = parse_prompt(row["prompt"])
        assert panels[-1][-1] == "?"
        shown = np.array([[list(map(int, panel.split())) for panel in r[:2]] for r in panels])
        assert (shown == batch.info["puzzles"][n, :, :2].numpy()).all()
        assert row["answer"] == " ".join(map(str, batch.y[n].tolist()))
        assert row["answer"] in row["answers"]
        assert len(row["answers"]) == row["num_answers"]


def test_prompts_speak_of_the_rules_in_use_and_of_permutations():
    task = SRaven(num_features=2, rules=(1, 6), permute=False, held_out=0.0)
    prompt, _ = text.prompts(task, task.sample("iid", 0, 1))[0]
    assert "- progression: from panel to panel the number changes by one step, the same in all rows: +1.\n" in prompt
    assert "- difference: the last number of a row is the first minus the second.\n" in prompt
    assert "constant" not in prompt
    assert "sum:" not in prompt
    assert "Each feature has the same position in all panels." in prompt
    large = SRaven(num_features=2, grid=4, num_values=5)
    prompt, _ = text.prompts(large, large.sample("iid", 0, 1))[0]
    assert "the first minus all the others.\n" in prompt and "the same 4 different numbers" in prompt
    assert "The features do not keep their positions: each column shows them in an order of its own" in prompt


def test_the_page_of_the_benchmark_shows_prompt_and_hashes_as_they_are():
    """A change of the words is a new PROMPT_VERSION, and the page shows it."""
    page = (ROOT / "docs/benchmark.md").read_text(encoding="utf-8")
    task = SRaven()
    prompt, _ = text.prompts(task, task.instances("compositional", [0]))[0]
    assert f"```text\n{prompt}\n```" in page and f"version {text.PROMPT_VERSION} of the words" in page
    for split in ("iid", "compositional"):
        assert f"| `{split}` | 1000 | `{task.fingerprint(split, 1000)}` |" in page


def test_logic_prompts_hold_the_context():
    batch = LOGIC.sample("novel", 0, 2)
    for n, (prompt, answer) in enumerate(text.prompts(LOGIC, batch)):
        lines = [line for line in prompt.splitlines() if line.startswith("f(")]
        assert len(lines) == 5
        numbers = [float(word) for word in re.findall(r"\d\.\d+", lines[0])]
        np.testing.assert_allclose(numbers, batch.x[n, 0].numpy(), atol=5.1e-4)
        assert lines[-1].endswith("=")
        assert float(answer) == pytest.approx(float(batch.y[n]), abs=5.1e-4)


def test_a_missing_pyarrow_is_one_sentence_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "headcode\[parquet\]"'):
        export(LOGIC, "iid", 3, tmp_path / "a.parquet", "parquet")
    assert not list(tmp_path.iterdir())


def test_a_broken_export_keeps_the_old_file(tmp_path):
    path = tmp_path / "a.jsonl"
    export(LOGIC, "iid", 3, path, "jsonl")
    before = path.read_bytes()

    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(LOGIC, "iid", 4, path, "jsonl", progress=stop)
    assert path.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.card.json"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"format": "csv"}, "format must be one of parquet, jsonl, npz, text"),
        ({"split": "test"}, "no split 'test'"),
        ({"count": 0}, "1 or more"),
        ({"start": -1}, "starts at 0"),
        ({"with_oracle": True}, "SRAVEN"),
    ],
)
def test_bad_exports_are_refused_in_one_sentence(tmp_path, arguments, sentence):
    options = {"task": LOGIC, "split": "iid", "count": 3, "path": tmp_path / "a", "format": "jsonl"} | arguments
    with pytest.raises(ValueError, match=sentence):
        export(**options)
    assert not list(tmp_path.iterdir())
