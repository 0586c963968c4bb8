import pytest

from tests.support.training import small_config


@pytest.fixture
def config():
    return small_config()
