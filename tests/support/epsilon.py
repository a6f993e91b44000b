"""Adam's epsilon, which tests of ranks set for their processes, is what it was after each of them."""

import pytest

from g2rpo.train import learner


@pytest.fixture(autouse=True)
def epsilon(monkeypatch):
    monkeypatch.setattr(learner, "EPSILON", learner.EPSILON)
