from types import SimpleNamespace

import pytest

from g2rpo.rewards import remote
from tests.rewards.learned import LEARNED, save_learned


@pytest.fixture(scope="session")
def learned(tmp_path_factory):
    """The options of every learned reward with tiny weights, by its name in a config."""
    return save_learned(tmp_path_factory.mktemp("learned"))


@pytest.fixture(scope="session")
def rewards(learned):
    """Every learned reward on its tiny weights, by its name in a config."""
    return {name: kind(**learned[name]) for name, kind in LEARNED.items()}


@pytest.fixture
def naps(monkeypatch):
    """A client's waits before retries, which are only noted."""
    waits = []
    event = SimpleNamespace(wait=waits.append, set=lambda: None)
    monkeypatch.setattr(remote, "Event", lambda: event)
    return waits
