"""Token shards of tests go to a folder of their own, never to the user's cache."""

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def texts(tmp_path_factory):
    before = os.environ.get("HEADCODE_TEXTS")
    os.environ["HEADCODE_TEXTS"] = str(tmp_path_factory.mktemp("texts"))
    yield os.environ["HEADCODE_TEXTS"]
    if before is None:
        del os.environ["HEADCODE_TEXTS"]
    else:
        os.environ["HEADCODE_TEXTS"] = before
