"""The best of n pictures: expectations from one set of pictures against enumeration of every choice
of n."""

import itertools

import pytest
import torch

from g2rpo.lab.untrained import expected_of_best
from g2rpo.train.evaluation.sampler import utility
from tests.support.tolerances import rounding

BY = torch.tensor([[3.0, 1.0, 2.0, 5.0, 4.0], [1.0, 1.0, 0.0, 1.0, 0.0]]).double()
OF = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0, 0.5]]).double()


def enumerated(by, of, n):
    """Every n of the pictures; one of the highest by lot."""
    values = []
    for chosen in itertools.combinations(range(len(by)), n):
        top = max(by[i] for i in chosen)
        values.append(torch.stack([of[i] for i in chosen if by[i] == top]).mean())
    return torch.stack(values).mean()


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_expected_best_is_the_mean_over_every_choice(n):
    expected = [enumerated(by, of, n) for by, of in zip(BY, OF, strict=True)]
    torch.testing.assert_close(expected_of_best(BY, OF, n), torch.stack(expected))


def test_a_picture_without_a_score_of_the_judge_is_left_out():
    of = OF.clone()
    of[0, 3] = torch.nan  # the best picture
    found = expected_of_best(BY, of, 5)
    assert torch.isnan(found[0]) and found[1] == pytest.approx(1 / 3)
    assert torch.isfinite(expected_of_best(BY, of, 2)).all()


def test_pictures_are_chosen_by_the_trained_rewards_alone():
    """Each in units of its deviation within a prompt; a missing score counts as the prompt's
    mean."""
    a, b = torch.tensor([[0.0, 1.0, torch.nan]]), torch.tensor([[10.0, -10.0, 0.0]])
    scores, weights = {"a": a, "b": b, "judge": torch.eye(3)[:1]}, {"a": 1.0, "b": 0.4}
    expected = torch.tensor([[-0.5, 0.5, 0.0]]) / 0.5**0.5 + 0.4 * torch.tensor([[1.0, -1.0, 0.0]])
    close = rounding(10, size=1.0)
    torch.testing.assert_close(utility(scores, weights), expected.double(), **close)
    assert utility(scores, weights).argmax() == 1
    assert utility({**scores, "a": torch.ones(1, 3)}, weights).argmax() == 0  # by b
