"""Adam's epsilon, which tests here set for their ranks, is what it was after each of them."""

import pytest

from g2rpo.train import learner


@pytest.fixture(autouse=True)
def epsilon(monkeypatch):
    monkeypatch.setattr(learner, "EPSILON", learner.EPSILON)
