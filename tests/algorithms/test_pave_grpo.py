"""Pave-GRPO's KL term; its gradient is in tests/published."""

from dataclasses import replace

import torch

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.algorithms.g2rpo_variants import PaveGRPO
from g2rpo.core.data import Batch, Example
from g2rpo.core.flow import sigma_grid
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.train.updater import Trained
from tests.support.tolerances import rounding

SIGMAS = sigma_grid(6, 3.0)


def test_the_kl_term_is_that_of_the_whole_step_alone():
    """Of a group that branched at step 1."""
    policy, generator = GaussianPolicy(mean=0.2, size=2), torch.Generator().manual_seed(1)
    policy._base_mean = torch.zeros_like(policy.mean)
    x, *landed = torch.randn(4, 1, 3, 2, 2, generator=generator)
    data = {"x_next": torch.cat(landed), "old_mean": 0 * x, "old_log_prob": torch.zeros(3)}
    example = Example(0, 1, x, torch.tensor([1.0, -0.5, -2.0]), data)
    batch = Batch.of([example], sigma_grid(6, 3.0), first=True)
    network, terms = Trained(policy, policy.encode(["0.1"])), []
    for algorithm in (PaveGRPO(eta=0.8), GranularGRPO(eta=0.8)):
        held = replace(algorithm, kl_weight=0.5).loss(batch, network).values
        terms.append(held - replace(algorithm, kl_weight=0.0).loss(batch, network).values)
    torch.testing.assert_close(*terms, **rounding(8, size=2.0))
    assert float(terms[0].detach().min()) > 0
