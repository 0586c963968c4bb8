"""Random streams: Philox itself, exact bounded integers, and addresses instead of state."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from headcode.tasks import _stream_kernels as kernels
from headcode.tasks.streams import STREAMS, Stream, bounded, unit_floats

STREAM = Stream(seed=11, task=255, version=3, name="train")


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        # Known answers of the Random123 distribution for philox4x32-10.
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, words):
    assert [int(word) for word in kernels.philox(*map(np.uint64, counter + key))] == words


def test_the_address_is_laid_out_as_documented():
    number, block = 5 * 2**32 + 7, 2
    stream = Stream(seed=3 * 2**32 + 4, task=9, version=1, name="iid")
    expected = kernels.philox(*map(np.uint64, (block, 7, 5, 9 | 1 << 8 | STREAMS["iid"] << 16, 4, 3)))
    assert stream.words([number], 12)[0, 8:].tolist() == [int(word) for word in expected]


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(1, 2**32 - 1)), min_size=1, max_size=7))
@settings(max_examples=60, deadline=None)
def test_bounded_integers_are_the_exact_floor(pairs):
    words = np.array([[part for word, _ in pairs for part in (word & 0xFFFFFFFF, word >> 32)]], dtype=np.uint32)
    found = bounded(words, [bound for _, bound in pairs])[0].tolist()
    assert found == [word * bound >> 64 for word, bound in pairs]


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=11), st.integers(1, 23))
@settings(max_examples=40, deadline=None)
def test_words_depend_on_the_number_alone(numbers, count):
    together = STREAM.words(numbers, count)
    assert together.shape == (len(numbers), count)
    for n, number in enumerate(numbers):
        assert (STREAM.words([number], count + 5)[0, :count] == together[n]).all()


def test_streams_differ_by_every_part_of_the_address():
    variants = [STREAM, *(Stream(11, 255, 3, name) for name in STREAMS if name != "train")]
    variants += [Stream(12, 255, 3, "train"), Stream(11 + 2**40, 255, 3, "train")]
    variants += [Stream(11, 254, 3, "train"), Stream(11, 255, 4, "train")]
    words = np.stack([stream.words(np.arange(500), 8) for stream in variants]).reshape(-1, 8)
    assert len(np.unique(words, axis=0)) == len(words)


def test_counters_are_never_shared_so_blocks_never_repeat():
    words = STREAM.words(np.arange(20_000), 40).reshape(-1, 4)
    assert len(np.unique(words, axis=0)) == len(words)


@pytest.mark.parametrize("bound", [2, 3, 7, 8, 248])
def test_integers_are_uniform(bound):
    integers = STREAM.integers(np.arange(100_000), [bound, bound])
    for draw in range(2):
        assert stats.chisquare(np.bincount(integers[:, draw], minlength=bound)).pvalue > 1e-4
    pairs = np.bincount(integers[:, 0] * bound + integers[:, 1], minlength=bound**2)
    assert stats.chisquare(pairs).pvalue > 1e-4


def test_orders_are_uniform():
    counts: dict[tuple[int, ...], int] = {}
    for number in range(6000):
        order = tuple(STREAM.order(number, 3).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4


def test_unit_floats_are_uniform_and_exactly_negatable():
    values = unit_floats(STREAM.words(np.arange(20_000), 5))
    assert values.dtype == np.float32
    assert values.min() >= 0
    assert values.max() < 1
    assert stats.kstest(values.ravel().astype(float), "uniform").pvalue > 1e-4
    assert (1 - (1 - values) == values).all()
    assert ((1 - values).astype(np.float64) == 1 - values.astype(np.float64)).all()


@pytest.mark.parametrize("bounds", [[0], [2**32], [-3, 4]])
def test_impossible_bounds_are_refused(bounds):
    with pytest.raises(ValueError, match="2\\*\\*32-1"):
        STREAM.integers([0], bounds)
