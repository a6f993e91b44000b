"""Flow-DPPO: which members an update leaves out."""

from itertools import product

import torch

from g2rpo.algorithms.flow_grpo import FlowDPPO
from tests.algorithms.test_neighbours import steps_of
from tests.support.tolerances import near, rounding

LIMIT = 1e-5


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
