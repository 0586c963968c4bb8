"""SRAVEN: rules cell by cell, splits, permutations, alignment, the authors' statistics, scores and bad input."""

import itertools
import json
import math
import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from headcode.bench.tasks import num_shared
from headcode.tasks import RULE_NAMES, SRaven
from headcode.tasks.render import draw_puzzle, puzzle_text
from headcode.train.loss import prediction_loss
from tests.support import GOLDENS


def features_of(puzzles, permutations):
    """(N, row, column, position) -> (N, row, column, feature)."""
    where = np.argsort(permutations, axis=-1)
    return np.take_along_axis(puzzles, np.broadcast_to(where[:, None], puzzles.shape), axis=-1)


def follows(cells, rule, num_values):
    """Whether one feature's cells (row, column) follow a rule, said in another way than the generator does."""
    rows = [[int(value) for value in row] for row in cells]
    if rule == 7:
        return len({tuple(sorted(row)) for row in rows}) == 1 and len(set(rows[0])) == len(rows[0])
    if rule in (5, 6):
        sign = 1 if rule == 5 else -1
        return all((row[0] + sign * sum(row[1:-1]) - row[-1]) % num_values == 0 for row in rows)
    step = (0, 1, 2, -1, -2)[rule]
    return all((b - a - step) % num_values == 0 for row in rows for a, b in itertools.pairwise(row))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"permute": False},
        {"num_features": 3, "num_values": 5, "grid": 5, "seed": 3},
        {"num_features": 2, "num_values": 13, "grid": 4, "seed": 1},
        {"num_features": 7, "num_values": 3, "held_out": 0.1},
        {"num_features": 5, "num_values": 2, "grid": 2, "held_out": 0.5},
        {"num_features": 2, "rules": (7, 0, 5), "held_out": 0.34},
        {"aligned": 0.5, "seed": 9},
    ],
)
def test_every_feature_follows_its_rule_in_every_row(options):
    task = SRaven(**options)
    for split in task.splits:
        batch = task.sample(split, 1, 211)
        info = {name: value.numpy() for name, value in batch.info.items()}
        cells = features_of(info["puzzles"], info["permutations"])
        assert cells.min() >= 0
        assert cells.max() < task.num_values
        for n in range(211):
            for feature in range(task.num_features):
                assert follows(cells[n, :, :, feature], info["rules"][n, feature], task.num_values)
        assert (np.sort(info["rules"], axis=1) == task.compositions[info["composition"]]).all()
        assert set(info["composition"]) <= set(task.split_compositions[split].tolist())
        assert (np.sort(info["permutations"], axis=-1) == np.arange(task.num_features)).all()
        if not task.permute:
            assert (info["permutations"] == np.arange(task.num_features)).all()


def test_x_y_and_token_labels_are_what_the_puzzle_shows():
    task = SRaven(num_features=3, num_values=5, grid=4, seed=2)
    x, y, info = task.sample("iid", 0, 17)
    assert (task.input_dim, task.output_dim, task.sequence_length, task.queries) == (5, 5, 48, slice(-3, None))
    assert x.shape == (17, 48, 5)
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    puzzles = info["puzzles"].long()
    tokens = puzzles.reshape(17, 48)
    assert torch.equal(x[:, :-3], torch.nn.functional.one_hot(tokens[:, :-3], 5).float())
    assert torch.equal(x[:, -3:], torch.zeros(17, 3, 5))
    assert torch.equal(y, puzzles[:, 3, 3])
    assert torch.equal(task.encode(puzzles), x)
    for n, row, column, position in itertools.product(range(17), range(4), range(4), range(3)):
        rule = info["rules"][n, info["permutations"][n, column, position]]
        assert info["token_rules"][n, (row * 4 + column) * 3 + position] == rule
    assert info["instance"].tolist() == list(range(17))


@pytest.mark.parametrize("seed", [0, 1, 7, 2**64 - 1])
def test_the_papers_splits(seed):
    task = SRaven(seed=seed)
    with np.load(GOLDENS / "tasks_a.npz") as data:
        counts = data["counts"].tolist()
    splits = task.split_compositions
    assert counts == [330, 248, 82]
    assert [len(task.compositions), len(splits["train"]), len(splits["compositional"])] == counts
    train, held_out = set(splits["train"].tolist()), set(splits["compositional"].tolist())
    assert not train & held_out
    assert train | held_out == set(range(330))
    assert (splits["iid"] == splits["train"]).all()
    for ids in (splits["train"], splits["compositional"]):
        assert set(task.compositions[ids].ravel().tolist()) == set(range(8))


def test_no_held_out_composition_occurs_in_train():
    task = SRaven()
    train = np.unique(task.raw("train", np.arange(200_000))["composition"])
    iid = np.unique(task.raw("iid", np.arange(200_000))["composition"])
    held_out = np.unique(task.raw("compositional", np.arange(200_000))["composition"])
    assert not np.intersect1d(train, held_out).size
    assert (train == iid).all()
    assert (len(train), len(held_out)) == (248, 82)


def test_200000_puzzles_of_each_split_share_none_in_the_papers_setting():
    shared = num_shared(SRaven(), 200_000)
    assert shared == {("train", "iid"): 0, ("train", "compositional"): 0, ("iid", "compositional"): 0}


def test_small_settings_do_share_puzzles_and_the_count_sees_it():
    # 2 features of 3 values have far fewer puzzles than draws; the streams are disjoint all the same.
    shared = num_shared(SRaven(num_features=2, num_values=3), 20_000)
    assert min(shared.values()) > 1000


def two_sample(left, right, size):
    table = np.stack([np.bincount(left, minlength=size), np.bincount(right, minlength=size)])
    table = table[:, table.sum(axis=0) > 0]
    return stats.chi2_contingency(table).pvalue if table.shape[1] > 1 else 1.0


@pytest.mark.parametrize("permuted", [True, False])
def test_each_rules_cells_are_distributed_as_the_authors(permuted):
    """Chi-square at a family-wise level of 0.001: each cell's marginal, and pairs along the row and down the column."""
    with np.load(GOLDENS / "tasks_a.npz") as data:
        if permuted:
            names = ("train", "ood")
            cells = np.concatenate(
                [features_of(data[f"sraven.{n}.instances"], data[f"sraven.{n}.perms"]) for n in names]
            )
            shown = np.concatenate([data[f"sraven.{n}.instances"] for n in names])
            rules = np.concatenate([data[f"sraven.{n}.rules"] for n in names])
        else:
            cells = shown = data["sraven.unpermuted.instances"]
            rules = data["sraven.unpermuted.rules"]
    ours = SRaven(permute=permuted, seed=1).raw("iid", np.arange(20_000))
    our_cells = features_of(ours["puzzles"], ours["permutations"])
    pvalues = []
    for rule in range(8):
        a = np.moveaxis(cells, -1, 1)[rules == rule].astype(np.int64)  # (features, row, column)
        b = np.moveaxis(our_cells, -1, 1)[ours["rules"] == rule].astype(np.int64)
        assert min(len(a), len(b)) > 500
        pvalues += [two_sample(a[:, r, c], b[:, r, c], 8) for r in range(3) for c in range(3)]
        pvalues += [two_sample(a[:, r, 0] * 8 + a[:, r, 1], b[:, r, 0] * 8 + b[:, r, 1], 64) for r in range(3)]
        pvalues += [two_sample(a[:, 0, c] * 8 + a[:, 1, c], b[:, 0, c] * 8 + b[:, 1, c], 64) for c in range(3)]
    if permuted:
        positions = itertools.product(range(3), range(3), range(4))
        pvalues += [two_sample(shown[:, r, c, j], ours["puzzles"][:, r, c, j], 8) for r, c, j in positions]
    assert min(pvalues) > 0.001 / len(pvalues)
    # The test has teeth: a rule's pairs compared with another rule's are far outside.
    wrong = np.moveaxis(our_cells, -1, 1)[ours["rules"] == 1].astype(np.int64)
    right = np.moveaxis(cells, -1, 1)[rules == 2].astype(np.int64)
    assert two_sample(right[:, 0, 0] * 8 + right[:, 0, 1], wrong[:, 0, 0] * 8 + wrong[:, 0, 1], 64) < 1e-9


def test_compositions_arrangements_and_permutations_are_uniform():
    task = SRaven(num_features=3, seed=4)
    for split, ids in task.split_compositions.items():
        raw = task.raw(split, np.arange(40_000))
        assert stats.chisquare(np.bincount(raw["composition"], minlength=120)[ids]).pvalue > 1e-4
        codes = raw["permutations"] @ [9, 3, 1]  # (N, column)
        assert stats.chisquare(np.unique(codes[:, 1], return_counts=True)[1]).pvalue > 1e-4
        pairs = np.unique(codes[:, 0] * 27 + codes[:, 2], return_counts=True)[1]
        assert len(pairs) == 36
        assert stats.chisquare(pairs).pvalue > 1e-4
    distinct = raw["rules"][np.array([len(set(multiset)) == 3 for multiset in raw["rules"].tolist()])]
    orders = np.unique(np.argsort(distinct, axis=1) @ [9, 3, 1], return_counts=True)[1]
    assert len(orders) == 6
    assert stats.chisquare(orders).pvalue > 1e-4


def test_unpermuted_rules_are_not_sorted_by_position():
    rules = SRaven(permute=False).raw("train", np.arange(5000))["rules"]
    assert (np.diff(rules, axis=1) >= 0).all(axis=1).mean() < 0.3
    for position in range(4):
        assert set(rules[:, position].tolist()) == set(range(8))


def test_distribute_orders_may_repeat_and_cover_all():
    task = SRaven(num_features=1, rules=(7,), held_out=0.0)
    puzzles = task.raw("iid", np.arange(20_000))["puzzles"][..., 0].astype(np.int64)
    same = (puzzles[:, 0] == puzzles[:, 1]).all(axis=1).mean()
    assert abs(same - 1 / 6) < 0.01
    codes = np.sort(puzzles[:, 0], axis=1) @ [64, 8, 1]
    counts = np.unique(codes, return_counts=True)[1]
    assert len(counts) == math.comb(8, 3)
    assert stats.chisquare(counts).pvalue > 1e-4


def test_aligned_share_is_met_in_train_only_and_leaves_the_rest_alone():
    plain, half = SRaven(seed=6), SRaven(seed=6, aligned=0.5)
    for split in plain.splits:
        a, b = plain.raw(split, np.arange(20_000)), half.raw(split, np.arange(20_000))
        aligned = (b["permutations"] == b["permutations"][:, :1]).all(axis=(1, 2))
        if split == "train":
            assert abs(b["aligned"].mean() - 0.5) < 0.015
            assert aligned[b["aligned"]].all()
            assert aligned[~b["aligned"]].mean() < 0.01  # three random permutations agree in 1 of 576
            assert (a["puzzles"][~b["aligned"]] == b["puzzles"][~b["aligned"]]).all()
            assert len(np.unique(b["permutations"][b["aligned"]][:, 0], axis=0)) == 24
        else:
            assert not b["aligned"].any()
            assert all((a[name] == b[name]).all() for name in a)
    assert SRaven(aligned=1.0).raw("train", np.arange(500))["aligned"].all()
    assert SRaven(permute=False).raw("iid", np.arange(5))["aligned"].all()


def test_a_curriculum_of_aligned_puzzles():
    task = SRaven(aligned=[[0, 1.0], [10_000, 0.5], [20_000, 0.0]])
    assert task.curriculum("aligned", np.array([0, 5000, 10_000, 12_500, 20_000, 10**9])).tolist() == [
        1,
        0.75,
        0.5,
        0.375,
        0,
        0,
    ]
    aligned = task.raw("train", np.arange(30_000))["aligned"]
    means = aligned.reshape(6, 5000).mean(axis=1)
    np.testing.assert_allclose(means, [0.875, 0.625, 0.375, 0.125, 0, 0], atol=0.03)
    late = SRaven(aligned=[(100, 0.25), (200, 0.75)])
    assert late.curriculum("aligned", np.array([0, 100, 150, 300])).tolist() == [0.25, 0.25, 0.5, 0.75]
    again = SRaven.from_dict(json.loads(json.dumps(task.to_dict())))
    assert again == task
    assert hash(again) == hash(task)
    assert (
        again.raw("train", np.arange(12_000, 12_100))["puzzles"]
        == task.raw("train", np.arange(12_000, 12_100))["puzzles"]
    ).all()


@pytest.mark.parametrize("options", [{}, {"blank": 1.5}, {"num_features": 3, "grid": 4}, {"permute": False}])
def test_auxiliary_targets_name_the_rule_of_every_token_and_its_places_in_all_columns(options):
    task = SRaven(seed=2, **options)
    batch = task.sample("train", 0, 50)
    rules, places, *sums = task.auxiliary_targets(batch)
    assert [answers.shape[2] for answers in (rules, places, *sums)] == [kind.count for kind in task.auxiliary]
    assert task.auxiliary_dims[0] == 8 + task.grid * task.num_features
    assert (len(sums), len(task.auxiliary_dims)) == ((1, 2) if task.grid == 3 else (0, 1))
    features = batch.info["permutations"]
    shown = 0
    for n in range(50):
        for token in range(task.sequence_length):
            panel, position = divmod(token, task.num_features)
            column = panel % task.grid
            if batch.info["puzzles"].flatten(1)[n, token] < 0:
                assert rules[n, token] == -100 and (places[n, token] == -100).all()
                continue
            shown += 1
            assert rules[n, token] == batch.info["token_rules"][n, token]
            for other, place in enumerate(places[n, token]):
                assert features[n, other, place] == features[n, column, position]
    assert shown == 50 * task.sequence_length or "blank" in options


@pytest.mark.parametrize("options", [{}, {"blank": 1.5, "num_values": 5}])
def test_hints_on_sums_are_the_arithmetic_of_each_whole_row(options):
    task = SRaven(seed=3, num_features=3, **options)
    batch = task.sample("train", 0, 20)
    sums = task.auxiliary_targets(batch)[2].unflatten(-1, (3, 3, 2)).unflatten(1, (3, 3, 3)).tolist()
    cells = batch.info["puzzles"].tolist()
    seen = set()
    for n, row, column, last, first, second in itertools.product(range(20), *[range(3)] * 5):
        a, b, c = cells[n][row][0][first], cells[n][row][1][second], cells[n][row][2][last]
        if column < 2 or row == 2 or min(a, b, c) < 0:
            expected = [-100, -100]
        else:
            expected = [int((a + b) % task.num_values == c), int((a - b) % task.num_values == c)]
        assert sums[n][row][column][last][first][second] == expected
        seen.add(tuple(expected))
    assert {(0, 0), (0, 1), (1, 0), (1, 1), (-100, -100)} == seen


def test_blank_features_have_no_value_and_are_not_asked_for():
    plain, task = SRaven(seed=6), SRaven(seed=6, blank=[(0, 3.0), (10_000, 3.0), (20_000, 0.6)])
    numbers = np.arange(30_000)
    a, b = plain.raw("train", numbers), task.raw("train", numbers)
    shown = b["puzzles"] >= 0
    assert (a["puzzles"][shown] == b["puzzles"][shown]).all()
    for name in ("rules", "permutations", "composition"):
        assert (a[name] == b[name]).all()
    count = shown.sum(axis=3)  # (N, row, column): the same features in every panel
    assert (count == count[:, :1, :1]).all()
    assert (count[:10_000] == 1).all()
    shares = np.bincount(count[20_000:, 0, 0], minlength=5) / 10_000  # one feature and Binomial(3, 0.8) others
    np.testing.assert_allclose(shares, [0, 0.2**3, 3 * 0.2**2 * 0.8, 3 * 0.2 * 0.8**2, 0.8**3], atol=0.015)
    feature = b["permutations"][:, None]  # a blank place shows a feature beyond the shown ones
    assert (shown == (feature < count[:, :1, :1, None])).all()

    assert puzzle_text(b["puzzles"][0]).count("·") == 8 * 3
    draw_puzzle(b["puzzles"][0])
    batch = task.sample("train", 0, 500)
    cells = batch.info["puzzles"].flatten(1)[:, :-4]
    assert torch.equal(batch.x[:, :-4].sum(-1), (cells >= 0).float())
    assert ((batch.y >= 0).sum(dim=1) == 1).all()
    assert (batch.y[batch.y < 0] == -100).all()
    assert task.score(batch.y.clamp(min=0), batch)["all_right"] == 500
    loss = prediction_loss(task, torch.zeros(500, 4, 8), batch.y)
    torch.testing.assert_close(loss, torch.tensor(8.0).log())

    for split in ("iid", "compositional"):
        assert (plain.raw(split, numbers[:500])["puzzles"] == task.raw(split, numbers[:500])["puzzles"]).all()
    assert SRaven.from_dict(json.loads(json.dumps(task.to_dict()))) == task
    assert task.fingerprint("iid", 5) != plain.fingerprint("iid", 5)


def test_scores_by_hand():
    task = SRaven()
    batch = task.sample("iid", 0, 5)
    guess = batch.y.clone()
    guess[1, 0] = (guess[1, 0] + 1) % 8
    guess[3] = (guess[3] + 1) % 8
    expected = {"accuracy": 3 / 5, "feature_accuracy": 15 / 20}
    assert task.metrics(task.score(guess, batch)) == expected
    logits = torch.nn.functional.one_hot(guess, 8).float() * 3
    assert task.metrics(task.score(logits, batch)) == expected
    with pytest.raises(ValueError, match="score takes logits"):
        task.score(torch.zeros(5, 3), batch)


def test_a_task_is_its_configuration():
    task = SRaven(rules=(0, 1, 5), num_features=5, seed=12)
    task.sample("train", 0, 2)
    copied = pickle.loads(pickle.dumps(task))
    assert copied == task
    assert len(pickle.dumps(task)) < 1000
    assert torch.equal(copied.sample("train", 3, 4).x, task.sample("train", 3, 4).x)
    assert SRaven(held_out=0.0).splits == ("train", "iid")
    assert len(RULE_NAMES) == 8
