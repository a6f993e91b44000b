"""The mathematics of flow.py against closed forms, published formulas and diffusers' own
scheduler."""

import itertools
import math
from functools import partial

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch.testing import assert_close

from g2rpo.algorithms.flow_grpo import DanceGRPO, FlowGRPO
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.core.flow import flow_sde, ode_step, scheduler_grid, sde_step, sigma_grid, tail
from g2rpo.core.noise import Normal, times
from g2rpo.models.gaussian import GaussianPolicy
from tests.support.tolerances import EXACT, FLOAT64, rounding
from tests.support.variants import few


@pytest.mark.parametrize("shift", [1.0, 1.15, 1.5, 2.0, 2.5, 3.0, 3.5, 5.0, 6.0, 7.0, 12.0, 17.0])
def test_sigma_grid_has_the_bits_of_published_code(shift):
    """It computes in float32, and floor(1000 sigma), which the network sees, hangs on the last bit:
    of 10 steps at shift 3 one has 874, where float64 has 875. The first sigma is 1, also where the
    shift makes it 1 - 6e-8. In all 1,200 grids."""
    for steps in range(1, 101):
        u = torch.linspace(1, 0, steps + 1)
        published = (shift * u) / (1 + (shift - 1) * u)
        ours = sigma_grid(steps, shift)
        assert torch.equal(torch.floor(ours * 1000), torch.floor(published * 1000))
        assert torch.equal(ours[1:], published[1:])
    assert sigma_grid(4, 1.111)[0] == 1


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA")],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_a_narrow_product_is_rounded_as_torch_rounds_it(device):
    """The published loop multiplies bfloat16 tensors with float32 ones without dimensions; a batch
    here has a number a row."""
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(5)).bfloat16().to(device)
    values = torch.tensor([-0.0217391, 1.245], device=device)
    theirs = torch.stack([x[0] * values[0], x[1] * values[1]])
    assert theirs.dtype == times(values, x).dtype == torch.bfloat16
    assert torch.equal(times(values, x), theirs) and torch.equal(times(values[1], x), x * values[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "narrow", "error"),
    [
        (torch.float64, torch.float64, rounding(40, size=4.0, unit=FLOAT64)),
        (torch.float32, torch.bfloat16, EXACT),
    ],
)
def test_steps_are_the_published_expressions(device, dtype, narrow, error):
    """Flow-GRPO's SDE step, mean and sample, the ODE step, and the image x - sigma v; with a
    velocity in bfloat16 term by term as torch evaluates them."""
    same = partial(assert_close, **error)
    x, v, e = torch.randn(3, 1, 5, 16, generator=torch.Generator().manual_seed(6), dtype=dtype).to(
        device
    )
    v, e, sigmas = v.to(narrow), e.to(narrow), sigma_grid(16, 3.0).to(device, dtype)
    for i in range(8):
        sigma, dt = sigmas[i], sigmas[i + 1] - sigmas[i]
        s = torch.sqrt(sigma / (1 - (sigmas[1] if sigma == 1 else sigma))) * 0.7
        mean = x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
        kernel = sde_step(x, v, sigma, sigmas[i + 1], flow_sde(sigmas, 0.7)(sigma))
        same(kernel.mean, mean)
        same(kernel.sample(e), mean + s * torch.sqrt(-dt) * e)
        same(ode_step(x, v, sigma, sigmas[i + 1]), x + v * dt)
        same(ode_step(x, v, sigma, torch.zeros_like(sigma)), x - sigma * v)


@pytest.mark.parametrize("shift", [1.0, 1.111, 3.0, 7.0])
def test_the_schedulers_grid_is_diffusers(shift):
    """At every number of steps; it is not the even grid, where the last step is a wide one. Four
    roundings of float32: diffusers keeps its lowest and highest sigma in float32, shifts them
    again, and both sides round the result."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    for steps in range(1, 101):
        scheduler.set_timesteps(steps)
        assert_close(scheduler_grid(steps, shift), scheduler.sigmas, **rounding(4, size=1.0))
        assert scheduler_grid(steps, shift)[0] == 1 and scheduler_grid(steps, shift)[-1] == 0
    assert (scheduler_grid(10, shift) - sigma_grid(10, shift)).abs().max() > 0.09
    for wrong in ((0, 3.0), (10, 0.0)):
        with pytest.raises(ValueError, match="num_steps|shift"):
            scheduler_grid(*wrong)


def test_without_noise_the_sde_step_is_the_ode_step_bit_for_bit():
    sigmas = sigma_grid(10, 3.0)
    x, v = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(3))
    for i in range(10):
        kernel = sde_step(x, v, sigmas[i], sigmas[i + 1], torch.tensor(0.0))
        assert torch.equal(kernel.mean, ode_step(x, v, sigmas[i], sigmas[i + 1]))


def marginal_error(kernel_on, num_steps: int, samples: int) -> tuple[float, float]:
    """(|mean error|, |std error|) of the SDE's samples at sigma = 0 on a Gaussian target, every
    step stochastic."""
    policy = GaussianPolicy(mean=0.8, std=0.6, size=1)
    cond = policy.encode(["0"])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples // 3, 3, 1, 1, generator=generator)
    # The last sigma of the start is just below 1, where Flow-GRPO's g is finite, and the noise
    # level is exactly that of x.
    sigmas = torch.linspace(0.98, 0.0, num_steps + 1)
    x = (1 - sigmas[0]) * 0.8 + ((1 - sigmas[0]) ** 2 * 0.36 + sigmas[0] ** 2).sqrt() * x
    kernel = kernel_on(sigmas)
    with torch.no_grad():
        for i in range(num_steps):
            v = policy.velocity(x, sigmas[i], cond)
            noise = torch.randn(x.shape, generator=generator)
            x = kernel(x, v, sigmas[i], sigmas[i + 1]).sample(noise)
    return abs(float(x.mean()) - 0.8), abs(float(x.std()) - 0.6)


@pytest.mark.parametrize(
    "algorithm",
    few([GranularGRPO(), FlowGRPO(), DanceGRPO(eta=0.6)], lambda kind: kind.name == "g2rpo"),
    ids=lambda algorithm: algorithm.name,
)
def test_sde_reaches_the_marginals_of_the_ode(algorithm):
    """The only test that notices a wrong SDE: shapes, ratio = 1 and rising rewards survive a
    flipped score.

    Two parts: the error shrinks with the step (Euler-Maruyama is of weak order 1, so 8 times the
    steps should divide a bias by about 8; a factor 4 is asked), and the limit is right. With n =
    240,000 entries the standard error of the mean is 0.6 / sqrt(n) = 1.2e-3 and of the std 0.6 /
    sqrt(2n) = 9e-4; the bound is four of them plus the bias left at 400 steps.
    """
    coarse = marginal_error(algorithm.kernel, 25, 240_000)
    fine = marginal_error(algorithm.kernel, 400, 240_000)
    assert max(fine) < 4 * 1.2e-3 + max(coarse) / 16 and max(fine) < 0.01


def test_log_prob_is_the_mean_over_entries_of_torchs_normal():
    mean, x = torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(4))
    std = torch.tensor([0.1, 0.2, 0.5, 1.0, 2.0])
    theirs = torch.distributions.Normal(mean, std.reshape(5, 1, 1)).log_prob(x).mean((1, 2))
    # squares up to 100, of which logarithms of 1 are subtracted
    assert_close(Normal(mean, std).log_prob(x), theirs, **rounding(40, size=1.0))


def published_tail(branch: int, num_steps: int, stride: int) -> list[int]:
    """The published schedule by its own recipe: the concatenated list of sigmas, all of whose
    entries but the last are evaluated, and the image is predicted from the last evaluated one."""
    indices = [*range(branch + 2), *range(branch + 2, num_steps + 1, stride)]
    return [*indices[branch + 1 : -1], num_steps]


@pytest.mark.parametrize("stride", [1, 2, 3, 5])
def test_reference_tails_are_the_published_schedule(stride):
    for branch in range(15):
        steps = tail(branch + 1, 16, stride, "reference")
        assert list(steps) == published_tail(branch, 16, stride)
        assert len(steps) - 1 == math.ceil((15 - branch) / stride)


def test_closed_tails_never_jump_further_than_their_granularity():
    for start in range(16):
        for granularity in (1, 2, 3, 5):
            steps = tail(start, 16, granularity, "closed")
            jumps = [b - a for a, b in itertools.pairwise(steps)]
            assert (steps[0], steps[-1], jumps[0]) == (start, 16, 1) and max(jumps) <= granularity
