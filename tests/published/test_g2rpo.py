"""The trainer under `reference` and `reference-hps-clip` is the published G2RPO, to the bit where sums are the same.

The other side is `tests.published.g2rpo`: formulas written out, a latent at a time.
"""

import pytest
import torch

from tests.published.beside import FLOAT32, ONE_BY_ONE, differences
from tests.published.g2rpo import Setting

SAMPLED = ("grid", "floor(1000 sigma)", "anchors", "branch latents", "log-probs", "finals", "scores", "optimizer steps")


@pytest.mark.parametrize(
    ("recipe", "strides", "dtype", "overrides", "gradients", "weights"),
    [
        ("reference", (1, 2), torch.bfloat16, (), 5e-2, 5e-2),
        ("reference-hps-clip", (1, 2, 3), torch.bfloat16, (), 5e-2, 5e-2),
        ("reference-hps-clip", (1, 2, 3), torch.float32, FLOAT32, 1e-4, 2e-4),
    ],
    ids=["hps", "hps-clip", "hps-clip-float32"],
)
def test_a_training_step_is_the_published_one(flux_directory, recipe, strides, dtype, overrides, gradients, weights):
    """What is sampled, and the pictures' scores, are equal to the bit: the same operations on tensors of one row.

    Advantages: theirs subtract a float32 mean of scores of .3 (1.5e-8 off) and divide by a std of no less than 1e-3, for six
    rewards and granularities: 1e-4, ours in float64. Losses are these times a ratio of 1. Gradients inherit 1e-4 / 2 in
    float32. In bfloat16 each member's gradient of the shared velocity is rounded there (2^-9 = 2e-3) before they are added up,
    and partly cancel; a tensor deep in the network has at most some ten times that. AdamW's first steps are signs, which
    gradients near nothing may turn: the way of the weights differs as much as gradients do.
    """
    found = differences(
        flux_directory, recipe, Setting(strides=strides, dtype=dtype), *ONE_BY_ONE, *overrides, "algorithm.group_size=3"
    )
    assert {name: found[name] for name in SAMPLED} == dict.fromkeys(SAMPLED, 0)
    assert found["advantages"] < 1e-4 and found["mean loss"] < 1e-5
    assert found["gradients"] < gradients and found["weights"] < weights


def test_batches_differ_by_the_order_of_float32_sums(flux_directory):
    """Products of 24 rows may add in another order than those of one: 6e-8 * sqrt(100) a layer, ten layers, 16 steps, |x| 9."""
    setting = Setting(strides=(1, 2, 3), dtype=torch.float32)
    found = differences(flux_directory, "reference-hps-clip", setting, *FLOAT32, "algorithm.group_size=3")
    assert found["finals"] < 1e-3 and found["log-probs"] < 1e-5 and found["weights"] < 2e-3


def small(folder, *overrides):
    setting = Setting(steps=8, branches=(1, 4), strides=(1, 2))
    options = ("algorithm.group_size=3", "algorithm.branch_steps=[1,4]", "sampling.num_steps=8", *ONE_BY_ONE)
    return differences(folder, "reference", setting, *options, *overrides)


@pytest.fixture(scope="module")
def undisturbed(flux_directory):
    return small(flux_directory)


@pytest.mark.parametrize(
    ("override", "quantity"),
    [
        ("policy.truncate_timesteps=false", "finals"),
        ("policy.published_pictures=false", "scores"),
        ("sampling.anchor_dtype=float32", "anchors"),
        ("sampling.step_dtype=float32", "branch latents"),
        ("algorithm.eta=0.6999", "branch latents"),
        ("algorithm.tail=closed", "finals"),
        ("algorithm.advantage_clip=0.5", "advantages"),
        ("algorithm.clip_range=1e-6", "gradients"),
        ("algorithm.update_every=rollout", "optimizer steps"),
        ("optim.max_grad_norm=1e-3", "gradients"),
        ("optim.learning_rate=2.4e-6", "weights"),
    ],
)
def test_the_comparison_sees_every_setting(flux_directory, undisturbed, override, quantity):
    """With one setting of `reference` undone, the quantity that it rules differs: at all, or several times as much."""
    assert small(flux_directory, override)[quantity] > 3 * undisturbed[quantity]
