import pytest

from tests.rewards.learned import save_learned


@pytest.fixture(scope="session")
def learned(tmp_path_factory):
    """The options of every learned reward with tiny weights, by its name in a config."""
    return save_learned(tmp_path_factory.mktemp("learned"))
