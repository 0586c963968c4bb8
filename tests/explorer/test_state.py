"""Addresses: what is written is read back, and what is not possible becomes a notice and the default."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headcode.explorer.state import Limits, State, parse

LIMITS = {
    "zoo/puzzles": Limits(
        kind="puzzle",
        length=27,
        layers=3,
        splits=("train", "iid", "compositional"),
        rule_ids=tuple(range(8)),
        num_features=3,
        num_values=8,
        num_visible=24,
        query=24,
        donor_rules=tuple(range(7)),
    ),
    "other-puzzles": Limits(kind="puzzle", length=27, layers=2, splits=("train", "iid", "compositional"), query=24),
    "functions": Limits(
        kind="function", length=32, layers=2, splits=("train", "novel"), num_terms=2, num_variables=4, query=31
    ),
    "lens/bert": Limits(kind="lens", layers=6),
}
PEERS = {"zoo/puzzles": ["other-puzzles"], "other-puzzles": ["zoo/puzzles"], "functions": [], "lens/bert": []}


def read(search):
    return parse(search, LIMITS, PEERS, "A plain sentence.")


def test_an_empty_address_is_the_first_model_with_its_defaults():
    state, notices = read("")
    assert notices == []
    assert (state.model, state.split, state.layer, state.query, state.key) == (
        "zoo/puzzles",
        "compositional",
        2,
        24,
        24,
    )
    assert not state.shown and not state.drawn


def test_the_explorer_opens_with_two_models_side_by_side_where_it_has_two():
    assert read("")[0].other == read("?n=4")[0].other == "other-puzzles"
    assert read("?model=zoo/puzzles")[0].other == read("?model=functions")[0].other == ""


def test_a_sentence_opens_with_a_query_that_looks_at_another_token():
    assert read("?model=lens/bert")[0].change(text="") == State(model="lens/bert", layer=5, query=2, key=1)


def test_the_first_answering_token_starts_with_its_own_key():
    limits = {"m": Limits(kind="puzzle", length=18, layers=1, splits=("iid",), query=16, key=14)}

    def key(search):
        state, notices = parse(search, limits, {"m": []}, "")
        assert notices == []
        return state.query, state.key

    assert [key(search) for search in ("", "?query=16", "?query=5", "?query=5&key=3", "?key=16")] == [
        (16, 14),
        (16, 14),
        (5, 5),
        (5, 3),
        (16, 16),
    ]


puzzle_states = st.builds(
    State,
    model=st.just("zoo/puzzles"),
    other=st.sampled_from(["", "other-puzzles"]),
    split=st.sampled_from(["train", "iid", "compositional"]),
    n=st.integers(0, 2**31 - 1),
    rules=st.one_of(st.just(()), st.tuples(*[st.integers(0, 7)] * 3)),
    seed=st.integers(0, 2**31 - 1),
    shuffle=st.booleans(),
    edits=st.dictionaries(st.integers(0, 23), st.integers(0, 7)).map(lambda d: tuple(sorted(d.items()))),
    layer=st.integers(0, 2),
    query=st.integers(0, 26),
    key=st.integers(0, 26),
    click=st.sampled_from(["query", "key", "edit"]),
    shown=st.booleans(),
    guess=st.one_of(st.just(()), st.tuples(*[st.integers(-1, 7)] * 3)),
    donor=st.sampled_from(["", "n-5", "rule-3"]),
    swap=st.sampled_from(["key", "all"]),
    deep=st.booleans(),
    around=st.sampled_from(["key", "all"]),
)
logic_states = st.builds(
    State,
    model=st.just("functions"),
    split=st.sampled_from(["train", "novel"]),
    n=st.integers(0, 10**6),
    terms=st.one_of(st.just(()), st.permutations(range(16)).map(lambda p: tuple(p[:2]))),
    point=st.one_of(st.just(()), st.tuples(*[st.integers(0, 1000).map(lambda i: i / 1000)] * 4)),
    axes=st.sampled_from([(), (0, 3), (2, 1)]),
    layer=st.integers(0, 1),
    query=st.integers(0, 31),
    key=st.integers(0, 31),
    donor=st.sampled_from(["", "terms-3.9", "n-0"]),
)
lens_states = st.builds(
    State,
    model=st.just("lens/bert"),
    layer=st.integers(0, 5),
    query=st.integers(0, 511),
    key=st.integers(0, 511),
    text=st.text("aé&=?<>%+#'\" ", min_size=1, max_size=60).map(lambda t: " ".join(t.split())).filter(bool),
)


@given(st.one_of(puzzle_states, logic_states, lens_states))
def test_every_state_comes_back_from_its_address(state):
    assert read(state.search()) == (state, [])


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ("?model=nobody", "model=nobody is not possible here; it can be zoo/puzzles"),
        ("?model=../../etc/passwd", "model=../../etc/passwd is not possible"),
        ("?model=/etc", "it can be zoo/puzzles"),
        ("?other=functions", "other=functions is not possible here; it can be other-puzzles"),
        ("?split=test", "it can be train, iid, compositional"),
        ("?layer=3", "a whole number from 0 to 2"),
        ("?layer=-1", "a whole number from 0 to 2"),
        ("?layer=²", "a whole number from 0 to 2"),
        ("?query=1e3", "a whole number from 0 to 26"),
        ("?n=99999999999999999999", "a whole number from 0 to 2147483647"),
        ("?rules=1.2", "3 numbers from 0 to 7"),
        ("?rules=1.2.8", "3 numbers from 0 to 7"),
        ("?edits=24-1", "tokens below 24"),
        ("?edits=3-8", "tokens below 24"),
        ("?guess=1.2.9", "3 numbers below 8"),
        ("?donor=rule-9", "n-INSTANCE or rule-NUMBER"),
        ("?donor=rule-7", "n-INSTANCE or rule-NUMBER"),
        ("?donor=terms-1.2", "n-INSTANCE or rule-NUMBER"),
        ("?shown=yes", "it can be 0, 1"),
        ("?click=<script>", "it can be query, key, edit"),
        ("?model=functions&click=edit", "it can be query, key"),
        ("?model=functions&terms=3.3", "2 different numbers"),
        ("?model=functions&point=nan_0_0_0", "4 numbers from 0 to 1"),
        ("?model=functions&point=1.5_0_0_0", "4 numbers from 0 to 1"),
        ("?model=functions&axes=1.1", "2 different numbers"),
        ("?flavour=sweet&__proto__=1", "mean nothing here: flavour, __proto__"),
        ("?" + "x" * 5000, "too long"),
        ("?" + "&".join(f"a{i}=1" for i in range(99)), "not understood"),
        ("?text=%ff", "not understood"),
        (17, "not understood"),
        (["?"], "not understood"),
    ],
)
def test_what_is_not_possible_is_said_and_replaced(search, words):
    state, notices = read(search)
    assert len(notices) == 1 and words in notices[0], notices
    assert len(notices[0]) < 250
    plain, _ = read("?model=functions" if "functions&" in str(search) else "")
    assert state == plain


@given(st.text(max_size=200))
def test_any_text_at_all_gives_a_state(search):
    state, _ = read(search)
    assert state.model in LIMITS
    assert read(state.search()) == (state, [])


def test_a_long_sentence_is_cut():
    state, notices = read("?model=lens/bert&text=" + "word+" * 100)
    assert len(state.text) == 240 and "cut" in notices[0]
