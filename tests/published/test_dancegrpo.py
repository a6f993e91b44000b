"""DanceGRPO's whole training step against a restatement from its published formulas, on the tiny
FLUX."""

import pytest
import torch

from tests.published import windows
from tests.published.neighbours import dance_sde

pytestmark = pytest.mark.slow

SETTING = (
    "algorithm.name=dancegrpo",
    "algorithm.group_size=8",
    "sampling.decode_batch_size=8",  # as restated
    "sampling.num_steps=8",
    "optim.learning_rate=1e-4",
)


def summed(scores):
    """Several rewards: their advantages, weighted 3 and 1, are added."""
    return (3 * windows.normalised(scores[0]) + windows.normalised(scores[1])).clamp(-5, 5)


@pytest.fixture(scope="module", params=[None, torch.bfloat16], ids=["float32", "bfloat16"])
def side_by_side(request, flux_directory):
    return windows.Windows(
        flux_directory, SETTING, request.param, dance_sde(0.3), accumulate=4, mix=summed
    )


def test_every_step_but_the_last_is_stochastic_and_some_are_trained(side_by_side):
    """int(0.6 * 7) of steps 0 .. 6, other ones in the second iteration; two optimizer steps an
    iteration."""
    first, second = side_by_side.restated.trained
    assert len(first) == len(second) == 4 and first != second and max(first + second) < 7
    assert [len(member.log_probs) for member in side_by_side.restated.groups[0][0]] == [7] * 8
    assert len(side_by_side.ours.gradients) == 4


def test_samples_scores_gradients_and_weights_are_the_published_ones(side_by_side):
    windows.agree(side_by_side)
