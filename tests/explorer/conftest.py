"""The explorer on models of the zoo, which come with the package."""

import pytest

from tests.support.models import one_thread

pytest.importorskip("dash", reason="the explorer's tests need headcode[explorer]")

RUNS = ["zoo/sraven-2-hyla", "zoo/logic-hyla", "zoo/logic-softmax"]


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="session")
def made():
    from headcode.explorer.app import create_app

    return create_app(RUNS)


@pytest.fixture(scope="session")
def explorer(made):
    return made[1]


@pytest.fixture(scope="session")
def app(made):
    return made[0]


@pytest.fixture(scope="session")
def puzzler(explorer):
    return explorer.catalogue.models[RUNS[0]]


@pytest.fixture(scope="session")
def logician(explorer):
    return explorer.catalogue.models[RUNS[1]]
