"""Pave-GRPO: what it costs, and its KL term; its gradient is in tests/published."""

from dataclasses import replace

import pytest
import torch

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.algorithms.g2rpo_variants import PaveGRPO
from g2rpo.core.data import Batch, Example
from g2rpo.core.flow import sigma_grid
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.train.updater import Trained
from tests.support.tolerances import rounding

SIGMAS = sigma_grid(6, 3.0)


def example(step):
    """A group that branched at `step`, from noise."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(1, 3, 2, 2, generator=generator)
    landed = torch.randn(3, 3, 2, 2, generator=generator)
    data = {"x_next": landed, "old_mean": 0 * x, "old_log_prob": torch.zeros(3)}
    return Example(0, step, x, torch.tensor([1.0, -0.5, -2.0]), data)


def loss(algorithm, policy, step):
    network = Trained(policy, policy.encode(["0.1"]))
    return algorithm.loss(Batch.of([example(step)], SIGMAS, first=True), network).values


def test_without_segments_it_is_g2rpo():
    policy = GaussianPolicy(size=2)
    ours, plain = (
        loss(kind(eta=0.8, **more), policy, 1)
        for kind, more in ((PaveGRPO, {"segments": ()}), (GranularGRPO, {}))
    )
    assert torch.equal(ours, plain)
    # the value is -2 A instead of -A
    assert not torch.allclose(loss(PaveGRPO(eta=0.8), policy, 1), plain)


@pytest.mark.parametrize("granularities", [(1,), (1, 2)])
def test_rollouts_are_g2rpos(granularities):
    branch = {"branch_steps": (0, 2, 4, 6), "granularities": granularities}
    assert PaveGRPO(granularities=granularities).plans(16) == GranularGRPO(**branch).plans(16)


def test_the_kl_term_is_that_of_the_whole_step_alone():
    policy = GaussianPolicy(mean=0.2, size=2)
    policy._base_mean = torch.zeros_like(policy.mean)
    plain, held = (loss(replace(PaveGRPO(), kl_weight=weight), policy, 1) for weight in (0.0, 0.5))
    alone, also = (
        loss(replace(GranularGRPO(eta=0.8), kl_weight=weight), policy, 1) for weight in (0.0, 0.5)
    )
    torch.testing.assert_close(held - plain, also - alone, **rounding(8, size=2.0))
    assert float((held - plain).detach().min()) > 0
