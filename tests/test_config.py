"""Strict configs: JSON round trip, unknown keys, wrong types."""

import dataclasses
import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headcode import ModelConfig
from headcode.config import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner(Config):
    rate: float = 0.5
    kind: Literal["a", "b"] = "a"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer(Config):
    size: int
    inner: Inner = Inner()
    shares: tuple[float, ...] = ()
    name: str | None = None


@given(
    size=st.integers(),
    rate=st.floats(allow_nan=False, allow_infinity=False),
    shares=st.lists(st.floats(0, 1)),
    name=st.none() | st.text(),
)
def test_json_round_trip(size, rate, shares, name):
    config = Outer(size=size, inner=Inner(rate=rate), shares=tuple(shares), name=name)
    assert Outer.from_json(config.to_json()) == config
    assert Outer.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "Outer needs size"),
        ({"size": 1, "colour": 2}, "Outer has no field 'colour'; it has: size, inner, shares, name"),
        ({"size": 1, "inner": {"rat": 2}}, "Inner has no field 'rat'; did you mean 'rate'? It has: rate, kind"),
        ({"size": 1.5}, "size must be a whole number, got 1.5."),
        ({"size": True}, "size must be a whole number, got True."),
        ({"size": 1, "inner": {"rate": math.nan}}, "rate must be a finite number, got nan"),
        ({"size": 1, "inner": {"rate": "x"}}, "rate must be a number, got 'x'."),
        ({"size": 1, "inner": {"kind": "c"}}, "kind must be one of 'a', 'b', got 'c'"),
        ({"size": 1, "shares": 3}, "shares must be several values, each a number, got 3."),
        ({"size": 1, "shares": [0.5, None]}, "shares[1] must be a number, got None."),
        ({"size": 1, "name": 3}, "name must be text, got 3."),
        ({"size": 1, "inner": {"rate": 10**400}}, "rate must be a finite number, got an integer of 401 digits"),
        ([1], "Outer is made from a mapping"),
    ],
)
def test_wrong_values_are_named(values, words):
    with pytest.raises(ValueError) as caught:
        Outer.from_dict(values)
    assert words in str(caught.value)


def test_frozen_replace_and_broken_json():
    config = Outer(size=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.size = 2
    assert config.replace(size=2) == Outer(size=2)
    with pytest.raises(ValueError, match="has no field 'colour'"):
        config.replace(colour=1)
    with pytest.raises(ValueError, match="not valid JSON"):
        Outer.from_json("{")
    with pytest.raises(ValueError, match="'size' stands twice"):
        Outer.from_json('{"size": 1, "size": 2}')
    with pytest.raises(ValueError, match="nested too deeply"):
        Outer.from_json("[" * 100_000)
    assert isinstance(Outer(size=1, inner=Inner(rate=1)).inner.rate, float)


def test_model_config_round_trip():
    config = ModelConfig(input_dim=5, output_dim=1, max_length=16)
    assert ModelConfig.from_json(config.to_json()) == config and hash(config) == hash(config.replace())
