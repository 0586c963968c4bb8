"""Patching moves what the code carries and nothing else; ablation equals weights set to zero."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from headcode.analysis import ablate, ablate_directions, class_directions, heads_against_generalisation, open_run, patch
from headcode.analysis.patch import _patched_answers
from headcode.tasks import SRaven, Task
from headcode.tasks._sraven_pairs import feature_cells
from headcode.tasks.sraven_rules import DISTRIBUTE, apply_rule


def blind(run):
    """A run whose values are the same for every token: its outputs depend on the codes alone."""
    with torch.no_grad():
        for block in run.model.blocks:
            block.attention.value_proj.weight.zero_()
            torch.nn.init.normal_(block.attention.value_proj.bias)
    return run


@pytest.mark.parametrize("method", ["linear", "hyla"])
def test_an_answer_that_hangs_on_the_code_follows_it(make_run, method):
    run = blind(open_run(make_run("sraven", method=method, num_layers=1)))
    x = run.task.instances("iid", np.arange(14)).x
    pairs = {"recipient": x[:7], "donor": x[7:], "token": torch.tensor([0, 1, 0, 1, 0, 1, 1])}
    with torch.no_grad():
        donors = run.model(x[7:], queries=run.task.queries)[torch.arange(7), pairs["token"]]
        own = run.model(x[:7], queries=run.task.queries)[torch.arange(7), pairs["token"]]
    patched = _patched_answers(run, pairs, [0], "all", "patched", 0, 3)
    torch.testing.assert_close(patched, donors, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(patched, own, atol=1e-4)
    torch.testing.assert_close(_patched_answers(run, pairs, [0], "all", "none", 0, 3), own, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(_patched_answers(run, pairs, [0], "all", "shuffled", 0, 3), donors, atol=1e-4)


@pytest.mark.parametrize("keys", ["all", "self"])
def test_own_codes_change_nothing(make_run, keys):
    run = open_run(make_run("logic"))
    x = run.task.instances("iid", np.arange(5)).x
    pairs = {"recipient": x, "donor": x, "token": torch.zeros(5, dtype=torch.long)}
    patched = _patched_answers(run, pairs, [0, 1], keys, "patched", 0, 4)
    with torch.no_grad():
        torch.testing.assert_close(patched, run.model(x)[:, -1], rtol=1e-4, atol=1e-5)


def test_every_pair_has_its_own_shuffle(make_run, monkeypatch):
    """One order of the heads for many pairs would be one draw, however many pairs there are."""
    run = blind(open_run(make_run("sraven", method="linear", num_layers=1)))
    x = run.task.instances("iid", np.arange(2)).x
    pairs = {"recipient": x[:1].repeat(40, 1, 1), "donor": x[1:].repeat(40, 1, 1), "token": torch.ones(40).long()}
    shuffled = _patched_answers(run, pairs, [0], "all", "shuffled", 0, 40)
    patched = _patched_answers(run, pairs, [0], "all", "patched", 0, 40)
    assert len(shuffled.round(decimals=4).unique(dim=0)) == 2, (
        "three heads have two orders in which none keeps its place"
    )
    assert ((shuffled - patched).abs().amax(1) > 1e-4).all()


@pytest.mark.parametrize("permute", [True, False])
def test_rules_are_applied_as_the_task_does(permute):
    task = SRaven(num_features=3, permute=permute)
    batch = task.instances("train", np.arange(60))
    rules = batch.info["token_rules"][:, task.queries]
    checked = 0
    for puzzle in range(60):
        for token in range(3):
            if rules[puzzle, token] != DISTRIBUTE:
                cells = feature_cells(task, batch, puzzle, token)
                answer = apply_rule(cells[-1], int(rules[puzzle, token]), 8)
                assert answer == batch.y[puzzle, token]
                checked += 1
    assert checked > 100


def perfect(run, monkeypatch):
    """Every puzzle counts as solved, so that pairs are found with a model that has learnt nothing."""
    judge = Task.judge

    def all_right(task, prediction, batch):
        return {**judge(task, prediction, batch), "correct": np.ones(len(batch.x), bool)}

    monkeypatch.setattr(Task, "judge", all_right)
    return run


def test_pairs_differ_as_they_should(make_run, monkeypatch):
    run = perfect(open_run(make_run("sraven", permute=True)), monkeypatch)
    found = dict(run.task.patch_pairs("iid", 300, 0, lambda x: run.model(x, queries=run.task.queries).detach()))
    for kind in ("same_rule", "other_rule"):
        pairs = found[kind]
        assert len(pairs["token"]) > 20 and pairs["recipient"].shape == pairs["donor"].shape
        assert (pairs["copy"] != pairs["own"]).all() and (pairs["copy"] != pairs["donors"]).all()
        assert ((pairs["own"] == pairs["donors"]).all()) == (kind == "same_rule")
    # The stand-in model answers every donor with 0: only donors whose answer is 0 remain.
    zeros = run.task.patch_pairs("iid", 300, 0, lambda x: torch.eye(8)[torch.zeros(len(x), 2, dtype=torch.long)])
    pairs = dict(zeros)["rule_changed"]
    assert len(pairs["token"]) > 5 and (pairs["donors"] == 0).all() and (pairs["own"] != 0).all()
    changed = (pairs["recipient"] != pairs["donor"]).any(-1)  # (N, token)
    assert set(changed.nonzero()[:, 1].tolist()) <= {4, 5, 10, 11}, "only last cells of the first two rows differ"


@pytest.mark.parametrize("task", ["sraven", "logic"])
def test_patch_end_to_end(make_run, monkeypatch, task):
    path = make_run(task)
    perfect(open_run(path), monkeypatch)
    rows = patch(path, size=200, split="iid")
    assert {row["control"] for row in rows} == {"none", "shuffled", "patched"}
    assert {row["layer"] for row in rows} == {"none", 0, 1, "all"}
    for row in rows:
        assert 0 <= row["follows_low"] <= row["follows"] <= row["follows_high"] <= 1 and row["pairs"] > 0
    assert rows == patch(path, size=200, split="iid")
    if task == "logic":
        assert rows != patch(path, size=200, split="iid", inputs="fixed_query")
    with pytest.raises(ValueError, match="all or self"):
        patch(path, keys="some")


def test_an_ablated_head_is_a_head_with_no_output(make_run):
    run = open_run(make_run("sraven", method="softmax"))
    rows = ablate(run, size=50, mode="zero", layers=[1])
    assert len(rows) == 1 + 3
    silenced = open_run(make_run("sraven", method="softmax"))
    with torch.no_grad():
        silenced.model.blocks[1].attention.output_proj.weight[:, 2:4] = 0
    whole = ablate(silenced, size=50, layers=[1])[0]
    assert rows[2]["head"] == 1
    assert {k: rows[2][k] for k in ("accuracy", "feature_accuracy")} == {
        k: whole[k] for k in ("accuracy", "feature_accuracy")
    }
    with pytest.raises(ValueError, match="zero or mean"):
        ablate(run, mode="half")


def test_directions(make_run):
    run = open_run(make_run("sraven"))
    from headcode.analysis import Examples

    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, (90, 2))
    features = np.array([[0, 0, 0], [2, 0, 0], [1, 0, 0.1]])[labels]
    data = Examples(features, labels, np.arange(3), False, labels[:, 0], labels[:, 0] > 0)
    directions = class_directions(data)
    assert directions.shape == (3, 2)
    np.testing.assert_allclose(np.abs(directions[:, 0]), [1, 0, 0], atol=1e-6)
    rows = ablate_directions(run, directions[:, :1], layer=1, size=20, controls=2)
    assert [row["directions"] for row in rows] == ["none", "classes", "random", "random"]
    nothing = ablate_directions(run, np.zeros((3, 1)), layer=1, size=20, controls=0)
    assert nothing[0]["feature_accuracy"] == nothing[1]["feature_accuracy"]
    with pytest.raises(ValueError, match=r"\(3 heads, rank\)"):
        ablate_directions(run, np.zeros((4, 1)), layer=1)


def test_heads_against_generalisation(make_run, tmp_path):
    rows = heads_against_generalisation([make_run("logic"), make_run("logic", num_heads=2)])
    assert [row["num_heads"] for row in rows] == [2, 3]
    metrics = [json.loads(line) for line in (make_run("logic") / "metrics.jsonl").read_text().splitlines()]
    expected = next(r["r2"] for r in metrics if r["kind"] == "eval" and r["split"] == "compositional")
    assert rows[1]["compositional"] == expected
    with pytest.raises(ValueError, match="differ in dim"):
        heads_against_generalisation([make_run("logic"), make_run("logic", dim=14)])
    with pytest.raises(ValueError, match="differ in mlp_dim"):
        heads_against_generalisation([make_run("logic"), make_run("logic", mlp_dim=10)])
    with pytest.raises(ValueError, match="differ in held_out"):
        heads_against_generalisation([make_run("logic"), make_run("logic", held_out=0.4)])
    with pytest.raises(ValueError, match="at least one run"):
        heads_against_generalisation([])


def test_open_run_is_frozen(make_run):
    with pytest.raises(dataclasses.FrozenInstanceError):
        open_run(make_run("logic")).step = 1
