"""Free knobs against closed forms: on the Gaussian policy every sampler's result is known."""

import math

import pytest
import torch

from g2rpo.evaluation.controls import Control, best_control, default_controls
from g2rpo.evaluation.sampler import Sampler
from g2rpo.policies.gaussian import GaussianPolicy
from tests.support.runs import brightness

PROMPTS = ["0.3", "-0.2", "0.1"]
OPTIONS = {"shift": 3.0, "seed": 5, "batch_size": 2, "decode_batch_size": 2}


def latents(steps=10, prompts=PROMPTS, policy=None, **knobs):
    kept = []
    Sampler(policy=policy or GaussianPolicy(mean=0.5), num_steps=steps, **OPTIONS).evaluate(
        prompts,
        {"bright": brightness},
        kept=lambda images: kept.append(torch.logit(images.double())) or images,
        control=Control(**knobs),
    )
    return torch.cat(kept)


@pytest.mark.parametrize("solver", ["euler", "dpmpp2m", "forecast"])
def test_without_first_noise_every_solver_ends_at_the_mean(solver):
    """From x = 0 the path is (1 - sigma) m, along which the velocity is -m everywhere: no step errs."""
    means = torch.tensor([0.5 + float(prompt) for prompt in PROMPTS]).double()
    found = latents(noise=0, solver=solver)
    torch.testing.assert_close(found, means[:, None, None, None].expand_as(found), atol=1e-5, rtol=0)


def test_a_smaller_first_noise_shrinks_the_deviation_from_the_mean():
    """The velocity is linear in the deviation from that path, so half the noise gives half the deviation."""
    means = torch.tensor([0.5 + float(prompt) for prompt in PROMPTS]).double()[:, None, None, None]
    torch.testing.assert_close(latents(noise=0.5) - means, (latents() - means) / 2, atol=1e-5, rtol=0)


def test_a_second_order_solver_comes_closer_to_the_odes_end():
    exact = latents(steps=250)
    errors = {solver: float((latents(solver=solver) - exact).abs().mean()) for solver in ("euler", "dpmpp2m")}
    assert errors["dpmpp2m"] < 0.7 * errors["euler"]


def test_the_stochastic_solver_keeps_the_marginal():
    """Mean m and standard deviation .6, of 100 x 48 numbers, for any initial noise; to the grid's error of a few percent."""
    found = latents(steps=60, prompts=["0"] * 100, solver="sde")
    assert float(found.mean()) == pytest.approx(0.5, abs=0.02) and float(found.std()) == pytest.approx(0.6, rel=0.05)
    one, again = (latents(steps=3, solver="sde") for _ in range(2))
    assert torch.equal(one, again)


def test_guidance_is_set_while_sampling_only():
    seen = []

    class Guided(GaussianPolicy):
        guidance_scale = 3.5

        def velocity(self, x, sigma, cond):
            seen.append(self.guidance_scale)
            return super().velocity(x, sigma, cond)

    policy = Guided()
    latents(policy=policy, guidance=7.0)
    assert set(seen) == {7.0} and policy.guidance_scale == 3.5


def test_default_controls_turn_one_knob_each():
    controls = default_controls(100, 3.5)
    assert all(len(control.knobs) == 1 for control in controls) and len({str(control) for control in controls}) == len(controls)
    assert [control.steps for control in controls if control.steps] == [200, 250]
    assert {control.guidance for control in controls} == {None, 1.75, 5.25, 7.0, 10.5}
    assert not any(control.guidance for control in default_controls(10, None))


def test_the_best_control_is_that_of_the_highest_mean():
    nan = math.nan
    best = best_control({"a": [0, 0, 1], "b": [1, nan, 0.5], "c": [nan] * 3}, tuned=[1, 1, nan])
    assert (best.control, best.mean, best.lead.mean, best.lead.count) == ("b", 0.75, 0.0, 1)
    assert best_control({"c": [nan]}, [1]) is None


@pytest.mark.parametrize("steps", [100, 150, 250])
def test_no_control_is_there_twice_or_the_base_itself(steps):
    controls = default_controls(steps, 3.5)
    assert len(set(map(str, controls))) == len(controls) and all(c.steps is None or steps < c.steps <= 250 for c in controls)
