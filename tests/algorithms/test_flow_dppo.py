"""Flow-DPPO: which members an update leaves out, member by member and in a run."""

from itertools import product

import torch

from g2rpo.algorithms.flow_grpo import FlowDPPO
from tests.algorithms.test_neighbours import steps_of
from tests.support.runs import trainer
from tests.support.tolerances import near, rounding

LIMIT = 1e-5
NAME = ("algorithm.name=flow_dppo", "algorithm.group_size=6", "sampling.num_steps=8")


def test_a_member_counts_unless_it_would_go_further_away():
    """Every sign of the advantage, side of the ratio and side of the limit."""
    cases = list(product((-2.0, 0.0, 1.5), (-0.1, 0.0, 0.1), (0.5 * LIMIT, LIMIT, 3 * LIMIT)))
    advantages, log_ratio, kl = (torch.tensor(column) for column in zip(*cases, strict=True))
    log_ratio.requires_grad_()
    steps = steps_of(len(cases), log_prob=log_ratio, old_kl=kl, advantages=advantages)
    loss = FlowDPPO(divergence_limit=LIMIT).policy_loss(steps)
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
    for (a, side, divergence), value, slope in zip(cases, loss, gradient, strict=True):
        left_out = divergence >= LIMIT and a * side > 0
        expected = 0.0 if left_out else -a * torch.tensor(side).exp()
        close = near(float(expected), rounding(4))
        assert float(value.detach()) == close and float(slope) == close


def moved(*overrides):
    t = trainer(None, *NAME, "algorithm.update_every=2", "optim.learning_rate=0.3", *overrides)
    for _ in range(3):
        t.iterate()
    return t.policy.mean.detach()


def test_in_a_run_the_limit_acts_after_the_first_update_of_a_rollout():
    """A limit that nothing reaches changes nothing; one that all reach leaves other weights."""
    never, published = moved("algorithm.divergence_limit=1e6"), moved()
    assert not torch.allclose(never, published, atol=1e-3)
    once = ["algorithm.update_every=rollout"]  # the only update of a rollout is the first
    assert torch.equal(
        moved(*once, "algorithm.divergence_limit=1e6"),
        moved(*once, "algorithm.divergence_limit=1e-15"),
    )
