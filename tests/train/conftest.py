import shutil

import pytest

from tests.support.training import small_config, train


@pytest.fixture
def config():
    return small_config()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, to be read only; modules may have another one."""
    run = tmp_path_factory.mktemp("finished") / "run"
    train(small_config(), run)
    return run


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the finished run, to do anything with."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"
