"""The trainer under `reference` and `reference-hps-clip` is the published G2RPO, to the bit where
sums are the same.

The other side is `tests.published.g2rpo`: formulas written out, a latent at a time.
"""

import math

import pytest
import torch

from tests.published.beside import FLOAT32, ONE_BY_ONE, differences
from tests.published.g2rpo import Setting
from tests.support.tolerances import network
from tests.support.variants import few

ALL = tuple(range(8))
"""The published branch steps."""


@pytest.mark.parametrize(
    ("dtype", "overrides", "branches"),
    few(
        [(torch.bfloat16, (), (0, 7)), (torch.bfloat16, (), ALL), (torch.float32, FLOAT32, ALL)],
        lambda each: each[2] != ALL,
    ),
    ids=["bfloat16, two branches", "bfloat16", "float32"],
)
def test_a_training_step_is_the_published_one_to_the_bit(
    flux_directory, dtype, overrides, branches
):
    """Latents, log-probs, pictures, scores, losses, gradients of every tensor, and weights after an
    AdamW step a branch.

    The same operations on tensors of one row, in the same order. Groups are normalised in float64,
    here and for once there.
    """
    setting = Setting(dtype=dtype, advantage_dtype=torch.float64, branches=branches)
    steps = f"algorithm.branch_steps={list(branches)}"
    found = differences(
        flux_directory,
        "reference",
        setting,
        *ONE_BY_ONE,
        *overrides,
        steps,
        "algorithm.group_size=2",
    )
    assert found == dict.fromkeys(found, 0)


# float32 advantages are what a size in published.md is of; parity is tested below
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "overrides", "gradients"),
    [(torch.bfloat16, (), 3e-2), (torch.float32, FLOAT32, 1e-4)],
    ids=["bfloat16", "float32"],
)
def test_what_float32_advantages_make_of_it(flux_directory, dtype, overrides, gradients):
    """All that is sampled is equal, with two rewards and three granularities too.

    Theirs subtract a float32 mean of scores of .3 (1.5e-8 off) and divide by a std of no less than
    1e-3, for six groups: 1e-4. Losses and float32 gradients inherit it. In bfloat16 it turns the
    rounding (2^-9 = 2e-3) of some numbers in the backward pass, which differ by up to some ten of
    it deep in the network. AdamW's first steps are signs, and of gradients that are normal a share
    of 0.8 e / 2 changes sign where they are e apart: a way of 2 each.
    """
    setting = Setting(strides=(1, 2, 3), dtype=dtype)
    found = differences(
        flux_directory,
        "reference-hps-clip",
        setting,
        *ONE_BY_ONE,
        *overrides,
        "algorithm.group_size=3",
    )
    sampled = list(found)[: list(found).index("advantages")]
    assert {name: found[name] for name in sampled} == dict.fromkeys(sampled, 0)
    assert (
        0 < found["advantages"] < 1e-4
        and found["mean loss"] < 1e-5
        and found["optimizer steps"] == 0
    )
    assert found["gradients"] < gradients
    assert found["weights"] < 2 * math.sqrt(0.4 * gradients)


# that rows of a batch are as alone is tested in tests/rollout and for every model
@pytest.mark.slow
def test_batches_differ_by_the_order_of_float32_sums(flux_directory):
    """Products of 24 rows may add in another order than those of one: 16 steps, |x| 9. A log-prob
    has a step's mean, a sixteenth of a velocity, over its noise of 0.2."""
    setting = Setting(strides=(1, 2, 3), dtype=torch.float32)
    found = differences(
        flux_directory, "reference-hps-clip", setting, *FLOAT32, "algorithm.group_size=3"
    )
    assert found["finals"] < network(9.0, passes=16)["atol"]
    assert found["log-probs"] < network(9.0)["atol"] / 16 / 0.2


def small(folder, *overrides):
    setting = Setting(steps=8, branches=(1, 4), strides=(1, 2))
    options = (
        "algorithm.group_size=3",
        "algorithm.branch_steps=[1,4]",
        "sampling.num_steps=8",
        *ONE_BY_ONE,
    )
    return differences(folder, "reference", setting, *options, *overrides)


@pytest.fixture(scope="module")
def undisturbed(flux_directory):
    return small(flux_directory)


SEEN = [
    ("policy.truncate_timesteps=false", "finals"),
    ("policy.published_pictures=false", "scores"),
    ("Precision.anchor=float32", "anchors"),
    ("Precision.step=float32", "branch latents"),
    ("algorithm.eta=0.6999", "branch latents"),
    ("algorithm.tail=closed", "finals"),
    ("algorithm.advantage_clip=0.5", "advantages"),
    ("algorithm.clip_range=1e-6", "gradients"),
    ("algorithm.update_every=rollout", "optimizer steps"),
    ("optim.max_grad_norm=1e-3", "gradients"),
    ("optim.learning_rate=2.4e-6", "weights"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("override", "quantity"), SEEN)
def test_the_comparison_sees_every_setting(flux_directory, undisturbed, override, quantity):
    """With one setting of `reference` undone, the quantity that it rules differs: at all, or
    several times as much."""
    assert small(flux_directory, override)[quantity] > 3 * undisturbed[quantity]
