"""SRAVEN: settings, samples and puzzles that are refused, each in one sentence."""

import numpy as np
import pytest

from headcode.tasks import SRaven


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"num_values": 3, "grid": 4},
            "distribute \\(7\\) needs as many values as columns, got num_values=3 and grid=4",
        ),
        ({"num_features": 0}, "num_features must lie in 1..12, got 0"),
        ({"num_values": 1}, "num_values must lie in 2..128"),
        ({"grid": 1}, "grid must lie in 2..12"),
        ({"held_out": -0.25}, "held_out is a share and must lie in 0..1"),
        ({"held_out": 1.01}, "held_out is a share"),
        ({"aligned": 2}, "aligned is a share"),
        ({"aligned": ((0, 0.5), (10, 1.5))}, "aligned is a share"),
        ({"aligned": ((5, 0.5), (5, 0.1))}, "rising instance numbers"),
        ({"aligned": ((5, 0.5, 1),)}, "knots"),
        ({"aligned": ()}, "knots"),
        ({"blank": ((0, 4),)}, "blank must lie in 0..3, got 4"),
        ({"blank": -1}, "blank must lie in 0..3, got -1"),
        ({"blank": ((3, 1), (2, 0))}, "rising instance numbers"),
        ({"held_out": 1.0}, "leaves no composition to train on"),
        ({"num_features": 1}, "every rule occurs both in training and held out"),
        ({"held_out": 0.997}, "no split was found in which every rule occurs both"),
        ({"held_out": 0.001}, "holds out none"),
        ({"rules": ()}, "at least one"),
        ({"rules": (0, 8)}, "distinct ids"),
        ({"rules": (1, 1)}, "distinct ids"),
        ({"seed": 2**64}, "seed must lie in"),
        ({"permute": 1}, "must be True or False"),
    ],
)
def test_bad_configurations_are_refused_in_one_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        SRaven(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("novel", 0, 4), "This SRaven has no split 'novel'; its splits are 'train', 'iid', 'compositional'"),
        (("train", -1, 4), "index counts batches from 0"),
        (("train", 0, -4), "batch_size must be"),
    ],
)
def test_bad_samples_are_refused_in_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        SRaven().sample(*arguments)


def test_bad_puzzles_are_not_encoded():
    with pytest.raises(ValueError, match="shape"):
        SRaven().encode(np.zeros((2, 3, 3, 3), dtype=int))
    with pytest.raises(ValueError, match="0..7"):
        SRaven().encode(np.full((2, 3, 3, 4), 8))
    hidden = np.zeros((2, 3, 3, 4), dtype=int)
    hidden[:, -1, -1] = -1
    assert SRaven().encode(hidden).sum() == 2 * 32
