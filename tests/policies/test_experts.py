"""Wan2.2-A14B's two experts: each acts on its side of the boundary as in diffusers' own pipeline,
and one is trained."""

import copy
from contextlib import nullcontext

import pytest
import torch
from diffusers import UniPCMultistepScheduler

from g2rpo.assembly.blueprint import size_of
from g2rpo.assembly.components import check_trained_steps
from g2rpo.assembly.config import load_config
from g2rpo.core.errors import UserError
from g2rpo.core.seeding import generator_for
from g2rpo.evaluation.sampler import Sampler
from g2rpo.lab.check_gradient import perturb
from g2rpo.lab.check_model import checks, drawn_by, load_saved, prompts_for
from g2rpo.lab.plan.plan import make_plan
from g2rpo.policies.catalogue import SPECS
from g2rpo.policies.options import PolicyConfig
from tests.support.policies import make
from tests.support.tiny_pipelines import CLASSES, two_experts
from tests.support.tolerances import network
from tests.support.variants import few

WAN, BOUNDARY = "WanPipeline", 0.875
SIZE = {"height": 32, "width": 48, "max_sequence_length": 24, "num_frames": 3}
PROMPTS = ["a red circle", "two blue square left of a circle"]
STEPS = 5
DRAWN = network(9.0, passes=2)
"""Guidance by 5 multiplies errors by 9; and the VAE follows."""


@pytest.fixture(scope="module")
def original():
    return two_experts(BOUNDARY)


def load(original, tuning="frozen", **options):
    return make(
        CLASSES[WAN], copy.deepcopy(original), **SIZE, tuning=tuning, lora_rank=4, **options
    )


def pictures(policy):
    options = {"shift": "model", "num_steps": STEPS, "seed": 5, "batch_size": 3}
    return Sampler(policy=policy, **options, decode_batch_size=2).pictures(PROMPTS)


def theirs(pipeline, **options):
    config = PolicyConfig(path="", **SIZE, **options)
    return drawn_by(copy.deepcopy(pipeline), SPECS[WAN], config, PROMPTS, STEPS).pictures


GUIDED = [{}, {"guidance_scale": 4.0, "guidance_scale_2": 2.0}, {"guidance_scale": 1.0}]


@pytest.mark.parametrize("options", few(GUIDED, GUIDED[1].__eq__), ids=str)
def test_pictures_equal_the_pipelines_own(original, options):
    policy = load(original, **options)
    # both act
    assert {policy.trains_at(float(sigma)) for sigma in policy.grid(STEPS)[:-1]} == {True, False}
    torch.testing.assert_close(pictures(policy), theirs(original, **options), **DRAWN)


def test_both_scales_and_both_experts_are_seen(original):
    plain = theirs(original, guidance_scale=4.0)
    assert float((theirs(original, **GUIDED[1]) - plain).abs().max()) > 1e-3
    other = copy.deepcopy(original)
    other.transformer_2 = other.transformer
    assert float((theirs(other, guidance_scale=4.0) - plain).abs().max()) > 1e-3


@torch.no_grad()
def test_rows_of_both_experts_share_no_call(original):
    policy = load(original)
    x, cond = (
        policy.noise([generator_for(i) for i in range(3)]),
        policy.encode([*PROMPTS, PROMPTS[0]]),
    )
    sigma = torch.tensor([0.95, 0.3, BOUNDARY])
    alone = torch.cat(
        [policy.velocity(x[i : i + 1], sigma[i : i + 1], cond.rows([i])) for i in range(3)]
    )
    close = network(9 * alone.abs().max())
    torch.testing.assert_close(policy.velocity(x, sigma, cond), alone, **close)


@pytest.mark.slow
@pytest.mark.parametrize("expert", ["high", "low"])
def test_check_model_passes_for_either_expert(original, expert, tmp_path):
    options = PolicyConfig(path="", **SIZE, lora_rank=4, expert=expert)
    prompts = prompts_for(SPECS[WAN], tmp_path)
    found = list(checks(lambda: copy.deepcopy(original), CLASSES[WAN], options, prompts, tmp_path))
    assert all(check.passed for check in found) and len(found) == 8, found


def test_an_adapter_draws_the_same_in_plain_diffusers_in_its_own_expert_alone(original, tmp_path):
    options = {**GUIDED[1], "expert": "low"}
    policy = load(original, "lora", **options)
    perturb(policy)
    tuned = pictures(policy)
    policy.save(tmp_path)
    drawn = []
    for low in (False, True):
        plain = copy.deepcopy(original)
        load_saved(plain, tmp_path, "lora", low=low)
        drawn.append(float((theirs(plain, **options) - tuned).abs().max()))
    assert drawn[1] <= DRAWN["atol"] < 1e-3 < drawn[0]


def test_a_loss_of_the_frozen_expert_is_refused(original):
    policy = load(original, "lora")
    x, cond = policy.noise([generator_for(0)]), policy.encode(PROMPTS[:1])
    with (
        policy.in_loss(),
        pytest.raises(UserError, match="sigma 0.300, where the trained weights do not act"),
    ):
        policy.velocity(x, torch.tensor([0.3]), cond)


def test_the_grid_of_unipc_is_switched_where_the_pipeline_does(original):
    """Its times are whole numbers."""
    pipeline = copy.deepcopy(original)
    pipeline.scheduler = UniPCMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0
    )
    policy = make(CLASSES[WAN], pipeline, **SIZE, tuning="frozen")
    sigmas = policy.grid(40)
    pipeline.scheduler.set_timesteps(40)
    high = [bool(time >= 1000 * BOUNDARY) for time in pipeline.scheduler.timesteps]
    assert [policy.trains_at(float(sigma)) for sigma in sigmas[:-1]] == high
    assert {*high} == {True, False}


def test_a_plan_counts_the_frozen_expert(original, tmp_path):
    original.save_pretrained(tmp_path, safe_serialization=True)
    model = {"pipeline": "", "tuning": "lora", "path": tmp_path, **SIZE}
    options = [f"policy.{name}={value}" for name, value in model.items()]
    options += ["algorithm.branch_steps=[0,1,2]"]

    def plan(*more):
        config = load_config("scenes", [*options, *more])
        return make_plan(config, cuda=False, heldout=1, distinct_prompts=1)

    memory, frozen = plan().memory, size_of(original.transformer_2)
    assert memory.parts["frozen expert"] == memory.parts["frozen weights"] == frozen
    assert memory.host > 2 * frozen
    with pytest.raises(UserError, match="trains at sigma 0.800, where the trained weights do not"):
        plan("sampling.shift=1")


STEPS_OF_HIGH = r"g2rpo trains at sigma 0.824.*steps \[0, 1, 2\] of 10"
REFUSED = [
    ("high", "algorithm.branch_steps=[0,3]", STEPS_OF_HIGH),
    ("high", "algorithm.name=diffusion_nft", "diffusion_nft trains at"),
    ("low", "algorithm.branch_steps=[3,4]", None),
    ("low", "algorithm.branch_steps=[2,3]", "g2rpo trains at sigma 0.889"),
]


@pytest.mark.parametrize(("expert", "change", "message"), REFUSED)
def test_what_is_trained_lies_on_the_side_of_the_expert(original, expert, change, message):
    config = load_config("scenes", ["policy.pipeline=", "sampling.shift=2", change])
    policy = load(original, expert=expert)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        check_trained_steps(config, policy)
