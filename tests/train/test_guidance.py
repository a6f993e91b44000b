"""Training at another guidance scale than held-out pictures have."""

from types import SimpleNamespace

import pytest
import torch

from g2rpo.config.read import load_config
from g2rpo.core.errors import UserError
from g2rpo.lab.plan.plan import make_plan
from g2rpo.models.catalogue import SPECS
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.rollout.guidance import guidance_of
from g2rpo.train.consistency import SETTINGS, complaints_of
from g2rpo.train.found import find
from tests.support.runs import trainer
from tests.support.tolerances import rounding


class Guided(GaussianPolicy):
    """Its velocities depend on the guidance scale; it notes with which they were asked for."""

    guidance_scale = 4.0

    def __init__(self):
        super().__init__()
        self.asked = []

    def velocity(self, x, sigma, cond):
        self.asked.append(
            (self.mean.requires_grad and torch.is_grad_enabled(), self.guidance_scale)
        )
        return self.guidance_scale / 2 * super().velocity(x, sigma, cond)


@pytest.mark.parametrize("name", ["g2rpo", "flow_grpo", "diffusion_nft", "fdfo", "refl"])
def test_rollouts_and_losses_have_the_trainings_scale_and_evaluations_the_policys(name):
    """Also for the untrained and the old weights, and in later updates of a rollout."""
    policy = Guided()
    asked = f"algorithm.name={name}", "sampling.guidance_scale=2", "algorithm.group_size=4"
    t = trainer(None, *asked, policy=policy)
    policy.asked.clear()
    row = t.iterate()
    assert {*policy.asked} == {(False, 2.0), (True, 2.0)}
    # a velocity of the other scale would be off by its size
    assert row.get("log_prob_drift", 0) <= rounding(60, size=1.0)["atol"]
    policy.asked.clear()
    t.evaluate()
    assert {*policy.asked} == {(False, 4.0)} and policy.guidance_scale == 4


def plans(config, *variants):
    """A plan for each variant of the overrides."""
    for overrides in variants:
        asked = load_config(str(config), overrides)
        yield make_plan(asked, cuda=True, heldout=3, distinct_prompts=6)


def flops(call):
    return call.roofline.flops


@pytest.mark.slow  # two plans
def test_a_plan_has_half_the_evaluations_in_training_alone(tiny_config, sd3_directory):
    own = [f"policy.path={sd3_directory}", "policy.guidance_scale=4.5"]
    guided, half = plans(tiny_config, own, [*own, "sampling.guidance_scale=1"])
    assert (guided.network_rows, half.network_rows) == (2, 1)
    for call in ("velocity", "training"):
        assert flops(getattr(half.traced, call)) < 0.6 * flops(getattr(guided.traced, call))
    of_a_row = [flops(plan.traced.heldout) / plan.traced.heldout.rows for plan in (guided, half)]
    assert of_a_row[0] == pytest.approx(of_a_row[1])


@pytest.mark.slow  # two plans
def test_a_plan_counts_judged_pictures_at_their_size(tiny_config):
    """Sixteen times as large as those that are trained on."""
    large = ["evaluation.height=128", "evaluation.width=128"]
    plain, larger = plans(tiny_config, [], large)
    assert larger.traced.training == plain.traced.training
    assert flops(larger.traced.heldout) > 10 * flops(plain.traced.heldout)
    before, after = plain.memory.moments, larger.memory.moments
    assert after["evaluation"] > before["evaluation"] and after["update"] == before["update"]


@pytest.mark.parametrize(
    ("kind", "scale", "guided"),
    [
        ("StableDiffusion3Pipeline", 1.0, False),
        ("StableDiffusion3Pipeline", 1.5, True),
        ("ZImagePipeline", 0.0, False),
        ("FluxPipeline", 0.5, True),
    ],
)
def test_guidance_begins_where_the_models_does(tiny_config, kind, scale, guided):
    """Training may have another scale, and controls of the base model vary it. FLUX's scale is an
    input of the network."""
    asked = [f"policy.kind={kind}", f"policy.guidance_scale={scale}", "sampling.guidance_scale=2"]
    asked += [] if kind.startswith("Flux") else ["policy.negative_prompt=blurry"]
    found = find(load_config(str(tiny_config), asked))
    settings = [complaint for check in SETTINGS for complaint in complaints_of(check, found)]
    complaints = " ".join([*found.faults, *settings])
    assert complaints.count("the model is sampled without guidance") == (0 if guided else 2)
    assert bool(complaints) == (not guided)
    policy = SimpleNamespace(guidance_scale=scale, spec=SPECS[kind])
    assert guidance_of(policy) == (scale if guided else None)


def test_a_policy_from_python_that_has_no_guidance_scale_is_given_none():
    with pytest.raises(UserError, match="guidance_scale=2: a GaussianPolicy has no guidance_scale"):
        trainer(None, "sampling.guidance_scale=2").iterate()
