"""MixGRPO's whole training step against a restatement from its published formulas, on the tiny
FLUX."""

import pytest
import torch

from tests.published import windows
from tests.published.neighbours import flow_sde
from tests.support.tolerances import EXACT, network

pytestmark = pytest.mark.slow

SETTING = (
    "algorithm.name=mixgrpo",
    "algorithm.group_size=6",
    "sampling.decode_batch_size=6",  # as restated
    "algorithm.window_size=3",
    # so that the second iteration has another window, and an ODE step before it
    "algorithm.window_iterations=1",
    "sampling.num_steps=8",
    "optim.learning_rate=3e-3",
)


def mixed(scores):
    """Weights 3 and 1 are divided by their sum."""
    return (0.75 * windows.normalised(scores[0]) + 0.25 * windows.normalised(scores[1])).clamp(
        -5, 5
    )


@pytest.fixture(scope="module", params=[None, torch.bfloat16], ids=["float32", "bfloat16"])
def side_by_side(request, flux_directory):
    return windows.Windows(
        flux_directory, SETTING, request.param, flow_sde(0.7), accumulate=3, mix=mixed
    )


def test_windows_are_the_published_ones(side_by_side):
    """Steps 0-2, then 1-3: the window moves on by one; two optimizer steps of three members
    each."""
    assert side_by_side.restated.trained == [[0, 1, 2], [1, 2, 3]]
    assert len(side_by_side.ours.gradients) == 4


def test_samples_scores_gradients_and_weights_are_the_published_ones(side_by_side):
    windows.agree(side_by_side)


def test_the_first_rollout_is_bit_equal_in_bfloat16(side_by_side):
    """Velocities and noise in bfloat16 have the published roundings, so the transitions are equal
    as long as weights are.

    A float32 network sums batches of other sizes in another order on some processors: latents are
    up to 4, four steps.
    """
    apart = network(4.0, passes=4) if side_by_side.autocast is None else EXACT
    ours, theirs = side_by_side.ours.members(0), side_by_side.restated.members(0)
    for a, b in (
        (a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)
    ):
        for name in ("before", "after"):
            torch.testing.assert_close(a[name], b[name], **apart)
