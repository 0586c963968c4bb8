"""Decoders find what is there and not what is not; scores are the textbook's; the controls are where they must be."""

import dataclasses

import numpy as np
import pytest
from sklearn.metrics import f1_score

from headcode.analysis import Decoder, Examples, capture, decode, examples, open_run, score, write_decoding
from headcode.analysis.decode import read_result


def synthetic(noise, seed=0, instances=300, classes=5, queries=2, channels=7):
    rng = np.random.default_rng(seed)
    prototypes = np.random.default_rng(1).normal(size=(queries, classes, channels))
    labels = rng.integers(0, classes, (instances, queries))
    features = prototypes[np.arange(queries), labels] + noise * rng.normal(size=(instances, queries, channels))
    composition = labels[:, 0] * classes + labels[:, 1]
    return Examples(features, labels, np.arange(classes), False, composition, rng.random(instances) < 0.5)


def test_decoder_finds_classes_and_not_noise():
    train, test = synthetic(0.1), synthetic(0.1, seed=2)
    assert (Decoder(train).predict(test) == test.labels).mean() > 0.99
    noise = dataclasses.replace(train, features=np.random.default_rng(3).normal(size=train.features.shape))
    blank = dataclasses.replace(test, features=np.random.default_rng(4).normal(size=test.features.shape))
    assert score(blank, Decoder(noise).predict(blank)).macro_f1 < 0.3


def test_constant_features_give_the_commonest_class():
    data = synthetic(0.1)
    data = dataclasses.replace(data, features=np.zeros((300, 2, 1)))
    guess = Decoder(data).predict(data)
    for query in range(2):
        assert set(guess[:, query]) == {np.bincount(data.labels[:, query]).argmax()}


def test_a_rare_class_does_not_silence_the_others():
    data = synthetic(0.1)
    data.labels[:2], data.labels[2:] = 4, data.labels[2:] % 4
    prototypes = np.random.default_rng(1).normal(size=(2, 5, 7))
    data = dataclasses.replace(data, features=prototypes[np.arange(2), data.labels])
    assert (Decoder(data).predict(data) == data.labels)[2:].all()


def test_present_classes_are_ranked():
    rng = np.random.default_rng(0)
    labels = np.zeros((400, 6), bool)
    for row in labels:
        row[rng.choice(6, 2, replace=False)] = True
    features = (labels + 0.1 * rng.normal(size=labels.shape))[:, None]
    data = Examples(features, labels, np.arange(6), True, np.arange(400) % 15, labels[:, 0])
    guess = Decoder(data).predict(data)
    assert (guess.sum(1) == 2).all() and (guess == labels).all()
    assert score(data, guess).accuracy == 1.0 and score(data, ~guess).accuracy == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_those_of_scikit_learn(seed):
    data = synthetic(1.0)
    rng = np.random.default_rng(seed)
    guess = np.where(rng.random(data.labels.shape) < 0.6, data.labels, rng.integers(0, 5, data.labels.shape))
    found = score(data, guess, seed=seed)
    assert found.macro_f1 == pytest.approx(f1_score(data.labels.ravel(), guess.ravel(), average="macro"))
    assert found.accuracy == pytest.approx((guess == data.labels).mean())
    assert found.macro_f1_low < found.macro_f1 < found.macro_f1_high
    assert found.instances == 300


def test_interval_is_of_compositions():
    """All instances of a composition stand or fall together: ten instances of one are no more than one."""
    labels = np.array([[0], [1], [0], [1]])
    few = Examples(np.zeros((4, 1, 1)), labels, np.arange(2), False, np.arange(4), labels[:, 0] > 0)
    many = few.subset(np.repeat(np.arange(4), 10))
    guess = np.array([[0], [1], [1], [1]])
    one, ten = score(few, guess), score(many, np.repeat(guess, 10, 0))
    assert (one.accuracy_low, one.accuracy_high) == (ten.accuracy_low, ten.accuracy_high)


def test_classes_that_do_not_occur_are_not_counted():
    labels = np.array([[0], [1]])
    data = Examples(np.zeros((2, 1, 1)), labels, np.arange(5), False, np.arange(2), labels[:, 0] > 0)
    assert score(data, labels).macro_f1 == 1.0


@pytest.mark.parametrize("task", ["sraven", "logic"])
def test_a_run_with_its_controls(make_run, tmp_path, task):
    path = make_run(task)
    result = decode(path, fit_size=60, test_size=60, layers=[1])
    rows = {(row["source"], row["subset"]): row for row in result["rows"]}
    assert {source for source, _ in rows} == {"codes", "shuffled", "untrained", "position", "residual"}
    assert rows["codes", "all"]["instances"] == 60
    parts = [rows[key]["instances"] for key in (("codes", "solved"), ("codes", "failed")) if key in rows]
    assert sum(parts) == 60
    for row in rows.values():
        assert 0 <= row["macro_f1_low"] <= row["macro_f1"] + 1e-9 and row["macro_f1"] <= row["macro_f1_high"] + 1e-9
    again = decode(path, fit_size=60, test_size=60, layers=[1], controls=())
    assert again["rows"] == [row for row in result["rows"] if row["source"] == "codes"]
    written = read_result(write_decoding(result, tmp_path)[0])
    assert written["rows"] == result["rows"] and written["card"]["fit_split"] == "iid"
    assert (tmp_path / "decode.csv").read_text().count("\n") == len(rows) + 1


def test_labels_of_the_tasks(make_run, tmp_path):
    run = open_run(make_run("logic"), inputs="fixed_context")
    data = examples(run.task, capture(run, "compositional", tmp_path / "c.npz", size=20), 1)
    batch = run.task.instances("compositional", np.arange(20))
    assert data.features.shape == (20, 1, 3) and data.multi
    assert [sorted(data.classes[row]) for row in data.labels] == batch.info["term_ids"].tolist()
    run = open_run(make_run("sraven"))
    data = examples(run.task, capture(run, "compositional", tmp_path / "c.npz", size=20, keys="all"), 0)
    rules, permutations = (
        run.task.instances("compositional", np.arange(20)).info[n] for n in ("rules", "permutations")
    )
    assert data.features.shape == (20, 2, 54)
    np.testing.assert_array_equal(data.labels, rules.gather(1, permutations[:, -1]))


def test_mistakes_are_sentences(make_run, tmp_path):
    with pytest.raises(ValueError, match="no 'luck'"):
        decode(make_run("sraven"), controls=("luck",))
    with pytest.raises(ValueError, match="no split 'novel'"):
        decode(make_run("sraven"), test_splits=("novel",))
    with pytest.raises(ValueError, match="cannot be tested on it"):
        decode(make_run("sraven"), test_splits=("iid",))
    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(ValueError, match="card and rows"):
        read_result(tmp_path / "x.json")
