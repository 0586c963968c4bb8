"""SCAN as a task: what instances hold, how splits are drawn, and the metrics."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headcode.tasks import Scan
from headcode.tasks.base import NOT_ASKED
from headcode.tasks.scan import END, START, TOKENS, encode, spelled
from headcode.tasks.scan_grammar import SPLITS, all_commands, divide, parse

MANNERS = {"plain": 0, "side": 1, "opposite": 2, "around": 3}


def logits_of(answers):
    return torch.nn.functional.one_hot(answers, len(TOKENS)).float()


@pytest.mark.parametrize("split", ["train", "iid", "compositional"])
@pytest.mark.parametrize("scan_split", SPLITS)
def test_instances_are_commands_with_their_actions(split, scan_split):
    batch = Scan(scan_split=scan_split).sample(split, 3, 17)
    assert batch.x.shape == (17, 58) and batch.y.shape == (17, 49)
    for row in range(17):
        command = all_commands()[int(batch.info["composition"][row])]
        assert spelled(batch.x[row, :9].tolist()) == str(command)
        actions = encode(command.actions)
        assert batch.x[row, 9:].tolist() == [START, *actions, *[0] * (48 - len(actions))]
        assert batch.y[row].tolist() == [*actions, END, *[NOT_ASKED] * (48 - len(actions))]
        assert parse(spelled(batch.x[row, :9].tolist())) == command


def test_manners_are_those_of_the_phrases_in_the_order_of_their_actions():
    task = Scan()
    numbers = torch.arange(task.split_size("compositional"))
    batch = task.instances("compositional", numbers)
    commands = [all_commands()[n] for n in batch.info["composition"].tolist()]
    row = next(i for i, c in enumerate(commands) if c.connector == "after" and c.first.manner == "around")
    first, second = commands[row].second, commands[row].first
    expected = [MANNERS[first.manner]] * len(first.actions) + [3] * len(second.actions)
    assert batch.info["manner"][row].tolist() == expected + [4] * (49 - len(expected))
    assert batch.info["connector"][row] == 2


@pytest.mark.parametrize("scan_split", SPLITS)
def test_splits_are_the_published_ones_in_headcodes_words(scan_split):
    task = Scan(scan_split=scan_split)
    training, test = divide(scan_split, task._stream("parts").order(0, 20_910))
    assert sorted(task.training_lines) == sorted(training)
    sizes = {split: task.split_size(split) for split in task.splits}
    assert sizes == {"train": None, "iid": len(set(training.tolist())), "compositional": len(test)}
    for split, numbers in (("iid", training), ("compositional", test)):
        drawn = task.instances(split, range(sizes[split])).info["composition"]
        assert sorted(drawn.tolist()) == sorted(set(numbers.tolist()))
        assert drawn[:100].tolist() != sorted(drawn[:100].tolist())


def test_training_draws_the_taught_primitive_as_often_as_the_published_file_has_it():
    batch = Scan(scan_split="jump").sample("train", 0, 20_000)
    jump = all_commands().index(parse("jump"))
    assert (batch.info["composition"] == jump).float().mean() == pytest.approx(0.1, abs=0.01)
    others = [str(all_commands()[n]) for n in set(batch.info["composition"].tolist()) - {jump}]
    assert len(others) > 9_000 and not any("jump" in text for text in others)


@settings(max_examples=30, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 2**62), min_size=1, max_size=7),
    split=st.sampled_from(["train", "iid", "compositional"]),
    seed=st.integers(0, 3),
)
def test_an_instance_does_not_depend_on_the_batch_that_it_is_drawn_in(numbers, split, seed):
    task = Scan(scan_split="length", seed=seed)
    together = task.instances(split, numbers)
    for row, number in enumerate(numbers):
        alone = task.instances(split, [number])
        assert torch.equal(alone.x[0], together.x[row]) and torch.equal(alone.y[0], together.y[row])


def test_the_seed_draws_the_simple_split_and_no_other():
    def held_out(**options):
        return Scan(**options).split_compositions["compositional"].tolist()

    assert held_out(seed=1) == held_out(seed=1) != held_out(seed=2)
    assert len(set(held_out(seed=1)) & set(held_out(seed=2))) == pytest.approx(4182 / 5, rel=0.15)
    assert held_out(scan_split="jump", seed=1) == held_out(scan_split="jump", seed=2)


def test_metrics_count_commands_without_a_mistake():
    task = Scan()
    batch = task.sample("iid", 0, 7)
    answers = batch.y.clamp(min=0)
    answers[2, 0] = START
    answers[5] = torch.where(batch.y[5] == END, START, answers[5])
    answers[6, batch.y[6] == NOT_ASKED] = START  # behind the end nothing is asked
    sums = task.score(logits_of(answers), batch)
    asked = int((batch.y != NOT_ASKED).sum())
    assert sums == {"count": 7.0, "exact": 5.0, "right": asked - 2.0, "tokens": float(asked)}
    assert task.metrics(sums) == {"exact_match": 5 / 7, "token_accuracy": (asked - 2) / asked}
    judged = task.judge(logits_of(answers), batch)
    assert judged["correct"].tolist() == [True, True, False, True, True, False, True]
    with pytest.raises(ValueError, match="score takes logits"):
        task.score(logits_of(answers)[:, :3], batch)


def test_decoders_are_asked_for_the_manner():
    task = Scan()
    batch = task.sample("iid", 0, 5)
    codes = {name: value.numpy() for name, value in batch.info.items()} | {"queries": [9, 11]}
    labels = task.decodable(codes)
    assert labels.values.tolist() == batch.info["manner"][:, [0, 2]].tolist() and not labels.several
    assert [task.label_name(label) for label in labels.classes] == [*MANNERS, "after the end"]
    assert task.map_labels(codes, 11)["manner"].tolist() == batch.info["manner"][:, 2].tolist()
    assert list(task.map_labels(codes, 3)) == ["connector"]
    with pytest.raises(ValueError, match="from 9 on"):
        task.decodable({**codes, "queries": [3]})


def test_an_instance_in_words():
    task = Scan(scan_split="turn_left")
    batch = task.sample("compositional", 0, 1)
    words, actions = task.as_text(batch, answer=True).splitlines()
    assert "turn left" in words and actions.split() == parse(words).actions
    assert task.as_text(batch) == words
    assert "held out in the split turn_left" in task.remarks(batch, "compositional")[0]
    with pytest.raises(ValueError, match="scan_split must be one of 'simple', 'jump'"):
        Scan(scan_split="run")
