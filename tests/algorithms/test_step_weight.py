"""How much a branch step counts in G2RPO's loss, against the closed form of its gradient."""

import pytest
import torch

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.algorithms.policy_gradient import Steps
from g2rpo.flow import sigma_grid
from tests.support.runs import trainer

ETA, STEPS, ENTRIES = 0.7, 10, 48


def pushed(algorithm, step, advantage=1.0):
    """(what the loss does to the velocity of a branch step, the noise that entered there)."""
    generator = torch.Generator().manual_seed(step)
    sigmas = sigma_grid(STEPS, 3.0)
    x, v, noise = torch.randn(3, 1, ENTRIES, generator=generator)
    v.requires_grad_()
    landing = algorithm.kernel(sigmas)(x, v, sigmas[step], sigmas[step + 1])
    log_prob = landing.log_prob(landing.mean.detach() + landing.std * noise)
    ones = torch.ones(1)
    steps = Steps(
        log_prob=log_prob,
        old_log_prob=log_prob.detach(),
        old_kl=0 * ones,
        advantages=advantage * ones,
        std=landing.std * ones,
        dsigma=(sigmas[step] - sigmas[step + 1]) * ones,
        step=torch.tensor([step]),
    )
    algorithm.policy_loss(steps).sum().backward()
    return v.grad, noise


@pytest.mark.parametrize("step", [1, 3, 6, 8])
@pytest.mark.parametrize("weight", ["none", "noise", "even"])
def test_the_velocity_is_pushed_against_the_noise_as_hard_as_the_weight_says(weight, step):
    """d mean / d v = dsigma (1 + g^2 (1 - sigma) / (2 sigma)) = dsigma (1 + eta^2 / 2), and d log p / d mean = noise / std."""
    sigmas = sigma_grid(STEPS, 3.0).double()
    sigma, dsigma = float(sigmas[step]), float(sigmas[step] - sigmas[step + 1])
    std = ETA * (sigma / (1 - sigma) * dsigma) ** 0.5
    factor = {"none": 1.0, "noise": std, "even": std / dsigma}[weight]
    grad, noise = pushed(GranularGRPO(step_weight=weight), step, advantage=2.0)
    expected = 2.0 * factor * dsigma * (1 + ETA**2 / 2) / std * noise / ENTRIES
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=0)  # sigmas are float32, and 1 - sigma is small


def test_without_a_weight_late_branch_steps_rule_and_with_even_none_does():
    def sizes(weight):
        pushes = (pushed(GranularGRPO(step_weight=weight), step) for step in range(1, 9))
        return torch.tensor([float(grad.norm() / noise.norm()) for grad, noise in pushes])

    plain, noisy, even = (sizes(weight) / sizes(weight)[0] for weight in ("none", "noise", "even"))
    sigmas = sigma_grid(STEPS, 3.0)
    dsigma = (sigmas[1:9] - sigmas[2:10]) / (sigmas[1] - sigmas[2])
    torch.testing.assert_close(even, torch.ones(8), rtol=1e-4, atol=0)
    torch.testing.assert_close(noisy, dsigma, rtol=1e-4, atol=0)
    assert (plain.diff() > 0).all() and plain[-1] > 10


def test_a_run_takes_the_weight():
    """One branch step alone: a weight scales its gradient by a known number."""
    one = ("algorithm.branch_steps=[2]", "algorithm.group_size=4", "optim.max_grad_norm=1e9")
    t = trainer(None, *one)
    norm = {own: trainer(None, *one, f"algorithm.step_weight={own}").iterate()["grad_norm"] for own in ("none", "even")}
    sigma, after = t.sigmas[2], t.sigmas[3]
    std = float(t.algorithm.kernel(t.sigmas)(torch.zeros(1, 1), torch.zeros(1, 1), sigma, after).std)
    assert norm["even"] == pytest.approx(norm["none"] * std / float(sigma - after), rel=1e-4)
