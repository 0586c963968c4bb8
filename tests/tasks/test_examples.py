"""The examples in the docstrings are true."""

import doctest
import importlib

import pytest

MODULES = ["base", "streams", "fuzzy_logic", "sraven", "oracle", "render", "text"]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(f"headcode.tasks.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
