"""The task of relations: its algebra, its splits, and a second way to its answers."""

import itertools
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headcode.tasks import Relations
from headcode.tasks.relations import FIRST_RELATION, NODE, NONE, SHORTCUTS, START, compose, solve

TASK = Relations()


def matrix(relation, generations):
    """The relation as a symmetry of a regular polygon: a turn for each mother, then a mirror for a father."""
    angle = 2 * np.pi * (relation % generations) / generations
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return turn @ np.diag([1, -1 if relation >= generations else 1])


@pytest.mark.parametrize("generations", [2, 3, 4, 7])
def test_composition_is_that_of_the_symmetries_of_a_polygon(generations):
    for one, other in itertools.product(range(2 * generations), repeat=2):
        product = matrix(one, generations) @ matrix(other, generations)
        found = int(compose(np.array(one), np.array(other), generations))
        np.testing.assert_allclose(matrix(found, generations), product, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    generations=st.integers(2, 5),
    max_steps=st.integers(2, 5),
    more=st.integers(1, 3),
    bystanders=st.integers(0, 4),
    held_out=st.sampled_from([0.0, 0.2, 0.4]),
    seed=st.integers(0, 2**64 - 1),
    split=st.sampled_from(["train", "iid", "compositional", "longer"]),
)
def test_answers_splits_and_trees(generations, max_steps, more, bystanders, held_out, seed, split):
    task = Relations(
        generations=generations,
        max_steps=max_steps,
        longer_steps=max_steps + more,
        bystanders=bystanders,
        held_out=held_out,
        seed=seed,
    )
    if split not in task.splits:
        assert held_out == 0
        return
    batch = task.sample(split, 2, 53)
    x = batch.x.numpy()
    train = {tuple(pair) for pair in task.compositions[task.split_compositions["train"]].tolist()}
    few, many = task.steps_of(split)
    for graph, answer, composition, steps, last in zip(
        x,
        batch.y[:, 0].tolist(),
        *(batch.info[name].tolist() for name in ("composition", "steps", "last")),
        strict=True,
    ):
        path = path_of(graph)
        assert len(path) == steps and few <= steps <= many and path[-1] == last
        product = np.eye(2)
        for relation in path:
            product = product @ matrix(relation, generations)
        np.testing.assert_allclose(product, matrix(answer, generations), atol=1e-9)
        pairs = list(itertools.pairwise(path))
        own = tuple(task.compositions[composition].tolist())
        assert own in pairs
        assert sum(pair not in train for pair in pairs) == (split == "compositional")
        assert (own in train) == (split != "compositional")
        there = graph.diagonal() != NONE
        assert there.sum() == steps + 1 + bystanders and (graph.diagonal() == START).sum() == 1
        # A tree: one edge fewer than nodes, and all of them connected.
        links = (graph > START) | (graph > START).T
        assert (graph > START).sum() == there.sum() - 1
        reach = np.linalg.matrix_power(np.eye(len(graph)) + links, len(graph)) > 0
        assert reach[np.ix_(there, there)].all() and not links[~there].any()
    assert (solve(task, x) == batch.y[:, 0].numpy()).all()
    assert task.ceiling(split, 31) == 1.0


def path_of(graph):
    """The relations on the way back from the last node, where only one edge ever leads on to the start."""

    def back(node, seen):
        if graph[node, node] == START:
            return []
        for tail in np.flatnonzero(graph[node] > START):
            if tail != node and (found := back(tail, seen | {node})) is not None:
                return [*found, int(graph[node, tail]) - FIRST_RELATION]
        return None

    return back(len(graph) - 1, set())


def test_splits_share_no_composition_and_every_relation_occurs_first_and_second_in_training():
    for seed in range(20):
        ids = Relations(seed=seed).split_compositions
        assert set(ids["train"]) == set(ids["iid"]) == set(ids["longer"])
        assert not set(ids["train"]) & set(ids["compositional"]) and len(ids["compositional"]) == 12
        pairs = TASK.compositions[ids["train"]]
        assert set(pairs[:, 0]) == set(pairs[:, 1]) == set(range(1, 8))
    assert not np.array_equal(Relations(seed=1).split_compositions["train"], ids["train"])


@pytest.mark.parametrize("split", TASK.splits)
def test_an_instance_does_not_depend_on_its_batch(split):
    batch, alone = TASK.sample(split, 1, 7), TASK.instances(split, [12, 9])
    for one, other in ((batch.x[5], alone.x[0]), (batch.x[2], alone.x[1]), (batch.y[5], alone.y[0])):
        assert torch.equal(one, other)
    assert not torch.equal(TASK.sample("train", 1, 7).x, TASK.sample("iid", 1, 7).x)


def test_answers_are_even_and_shortcuts_are_worth_what_they_should_be():
    batch = TASK.sample("iid", 0, 20_000)
    x, y = batch.x.numpy(), batch.y[:, 0].numpy()
    assert (abs(np.bincount(y, minlength=8) / len(y) - 1 / 8) < 0.03).all()
    two = batch.info["steps"].numpy() == 2
    worth = {name: answer(TASK, x) == y for name, answer in SHORTCUTS.items()}
    assert worth["last two steps"][two].all() and not worth["last step alone"][two].any()
    assert 0.05 < worth["last step alone"].mean() < 0.15
    assert 0.3 < worth["last two steps"].mean() < 0.45
    assert 0.5 < worth["steps in any order"].mean() < 0.75


def test_a_hand_written_graph():
    task = Relations(max_steps=2, longer_steps=3, bystanders=1)
    x = np.zeros((2, 5, 5), dtype=np.int64)
    x[0, [0, 2, 3, 4], [0, 2, 3, 4]] = NODE, START, NODE, NODE
    x[0, 3, 2], x[0, 4, 3], x[0, 3, 0] = np.array([1, 4, 2]) + FIRST_RELATION  # mother, father; aside a mother's mother
    x[1] = x[0]
    x[1, 4, 3] = NONE
    assert solve(task, x).tolist() == [5, -1] and task.relation_name(5) == "mother's father"


def test_words():
    batch = TASK.instances("compositional", [3])
    text = TASK.as_text(batch, answer=True)
    end, start, answer = re.search(r"What is (\w) to (\w)\? (.+)$", text).groups()
    assert end == "J" and answer == TASK.relation_name(int(batch.y)) and f"is {start}'s" in text
    assert TASK.as_text(batch).endswith("?") and "held out of training" in TASK.remarks(batch, "compositional")[0]
    assert TASK.remarks(batch, "compositional", answer=True)[1].endswith(answer)
    words = TASK.token_words(batch.x[0].numpy())
    assert words[:3] == ["A", "B", "C"] and words[-1] == "J" and words[3] == "·"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"generations": 1}, "generations must lie in 2..16, got 1"),
        ({"max_steps": 1}, "got max_steps=1 and longer_steps=6"),
        ({"longer_steps": 4}, "got max_steps=4 and longer_steps=4"),
        ({"bystanders": 10}, "bystanders must lie in 0..9"),
        ({"held_out": 1.5}, "held_out is a share"),
        ({"held_out": 0.95}, "no split was found in which every relation occurs in training"),
    ],
)
def test_wrong_settings_are_one_sentence(settings, words):
    with pytest.raises(ValueError, match=words):
        _ = Relations(**settings).split_compositions
