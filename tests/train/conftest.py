import pytest
from training_helpers import small_config


@pytest.fixture
def config():
    return small_config()
