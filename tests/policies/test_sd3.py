"""The SD3 policy against diffusers' own pipeline, on tiny random weights of the same classes."""

import numpy as np
import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.config.schema import grid_of
from g2rpo.core.data import Precision
from g2rpo.core.flow import sigma_grid
from g2rpo.core.seeding import generator_for
from g2rpo.evaluation.sampler import Sampler
from g2rpo.policies.anyflow import DiffusersPolicy
from g2rpo.rollout.engine import Engine
from g2rpo.training.updater import Trained
from tests.support.tiny import save_sd3

PROMPTS = ["a red circle", "two blue square left of a circle", "a square"]
SIZE = {"height": 32, "width": 24, "max_sequence_length": 10}
STEPS = 6


def load(directory, **options):
    return DiffusersPolicy.from_pretrained(directory, **{**SIZE, "tuning": "frozen", **options})


def pictures(policy, shift=3.0, batch_size=3):
    return Sampler(policy=policy, shift=shift, num_steps=STEPS, seed=5, batch_size=batch_size).pictures(PROMPTS)


def theirs(pipeline, guidance_scale=4.5, negative_prompt=None, deployed_grid=False):
    """Left alone, SD3's pipeline takes a grid of its own (`test_the_deployed_grid...`); ours is asked for explicitly."""
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        PROMPTS,
        negative_prompt=None if negative_prompt is None else [negative_prompt] * len(PROMPTS),
        num_inference_steps=STEPS,
        sigmas=None if deployed_grid else np.linspace(1, 1 / STEPS, STEPS),
        guidance_scale=guidance_scale,
        generator=[generator_for(5, "picture", i) for i in range(len(PROMPTS))],
        output_type="pt",
        **SIZE,
    ).images


def difference(a, b):
    return float((a - b).abs().max())


GUIDANCE = {
    "guided": {"guidance_scale": 4.5},
    "unguided": {"guidance_scale": 1.0},
    "negative": {"guidance_scale": 4.5, "negative_prompt": "two blue circle"},
}


@pytest.mark.parametrize("t5", [True, False], ids=["t5", "no t5"])
@pytest.mark.parametrize("guidance", GUIDANCE)
def test_policy_and_ode_equal_the_pipeline_at_the_same_seed(tmp_path, t5, guidance):
    """Same float32 network, noise and Euler steps; only the order of a few additions differs (measured: below 1e-6), and
    guidance multiplies that by up to 4.5: 1e-5 of [0, 1]."""
    directory = save_sd3(tmp_path, t5=t5)
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        directory, **({} if t5 else {"text_encoder_3": None, "tokenizer_3": None})
    )
    expected = theirs(pipeline, **GUIDANCE[guidance])
    torch.testing.assert_close(pictures(load(directory, **GUIDANCE[guidance])), expected, atol=1e-5, rtol=0)


def test_guidance_and_the_negative_prompt_reach_the_pictures(sd3_directory):
    """Otherwise parity above would compare three times the same pictures."""
    drawn = [pictures(load(sd3_directory, **options)) for options in GUIDANCE.values()]
    assert all(difference(a, b) > 1e-2 for a, b in [drawn[:2], drawn[1:], drawn[::2]])


def test_the_deployed_grid_is_another_one_and_the_policy_can_walk_it(sd3_directory):
    """diffusers' scheduler shifts the lower end of a static-shift grid twice (huggingface/diffusers#13243), so a pipeline
    that is not given `sigmas` spends its last step at sigma = 0.0089."""
    pipeline = StableDiffusion3Pipeline.from_pretrained(sd3_directory)
    expected = theirs(pipeline, deployed_grid=True)
    sigmas = pipeline.scheduler.sigmas
    assert float(sigmas[-2]) == pytest.approx(0.0089, abs=1e-4)
    policy = load(sd3_directory)
    assert policy.shift == 3.0
    walked = grid_of("scheduler", policy, len(sigmas) - 1)
    torch.testing.assert_close(walked, sigmas, atol=6e-8, rtol=0)  # one rounding of float32
    torch.testing.assert_close(pictures(policy, "scheduler"), expected, atol=1e-5, rtol=0)
    assert difference(pictures(policy), expected) > 1e-3


def velocities(policy, batch):
    cond = policy.encode(PROMPTS)
    x = policy.noise([generator_for(i) for i in range(3)])
    sigma = torch.tensor([1.0, 0.6, 0.2])
    with torch.no_grad():
        if batch:
            return policy.velocity(x, sigma, cond)
        return torch.cat([policy.velocity(x[i : i + 1], sigma[i : i + 1], cond.rows([i])) for i in range(3)])


@pytest.mark.parametrize("guidance", GUIDANCE)
def test_rows_of_one_batch_may_have_their_own_sigma(sd3_directory, guidance):
    policy = load(sd3_directory, **GUIDANCE[guidance])
    torch.testing.assert_close(velocities(policy, True), velocities(policy, False), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("scale", "rows"), [(0.0, 3), (1.0, 3), (4.5, 6)])
def test_guidance_costs_a_second_row_in_the_same_call(sd3_directory, scale, rows):
    policy = load(sd3_directory, guidance_scale=scale)
    seen = []
    policy.tuning.active.register_forward_hook(lambda module, args, out: seen.append(len(out[0])))
    velocities(policy, True)
    assert seen == [rows]
    assert ("negative_prompt_embeds" in policy.encode(PROMPTS).tensors) == (scale > 1)


def test_truncated_timesteps_are_the_published_ones(sd3_directory):
    """sigma = 0.8338 is fed as 833: equal to the plain policy at 0.833, different from it at 0.8338."""
    plain, truncating = load(sd3_directory), load(sd3_directory, truncate_timesteps=True)
    cond, x = plain.encode(PROMPTS[:1]), plain.noise([generator_for(0)])
    with torch.no_grad():
        fed = truncating.velocity(x, torch.tensor([0.8338]), cond)
        torch.testing.assert_close(fed, plain.velocity(x, torch.tensor([0.833]), cond), atol=1e-5, rtol=0)
        assert not torch.allclose(fed, plain.velocity(x, torch.tensor([0.8338]), cond), atol=1e-5, rtol=0)


def test_times_truncated_in_rollouts_alone_are_exact_in_a_loss(sd3_directory):
    """As DiffusionNFT's code has it: the sampler sees 833, the loss 833.8."""
    policy, sigma = load(sd3_directory, truncate_timesteps="rollout"), torch.tensor([0.8338])
    cond, x = policy.encode(PROMPTS[:1]), policy.noise([generator_for(0)])
    fed = []
    policy.tuning.active.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(float(kwargs["timestep"][0])), with_kwargs=True
    )
    engine = Engine(policy=policy, cond=cond, sigmas=torch.tensor([0.8338, 0.0]))
    engine.sample(x)
    trained = Trained(policy, cond)
    for velocity in (trained.velocity, trained.base_velocity, trained.old_velocity):
        velocity(x, sigma, [0])
    engine.sample(x)
    assert fed == pytest.approx([833, 833.8, 833.8, 833.8, 833], abs=1e-3)


def test_a_detached_negative_prediction_passes_no_gradient(sd3_directory):
    """FlowBP's cfg_detach_neg: the same velocity, and the gradient of the prediction with the prompt times the scale."""
    gradients, velocities = [], []
    for options in ({}, {"detach_negative": True}, {"guidance_scale": 1.0}):
        policy = load(sd3_directory, **{"guidance_scale": 3.5, "tuning": "full", **options})
        cond, x = policy.encode(PROMPTS[:1]), policy.noise([generator_for(0)])
        v = policy.velocity(x, torch.tensor([0.6]), cond)
        v.square().sum().backward() if not velocities else v.backward(2 * velocities[0])
        gradients.append(torch.cat([p.grad.flatten() for p in policy.trainable_parameters() if p.grad is not None]))
        velocities.append(v.detach())
    plain, detached, prompted = gradients
    assert torch.equal(velocities[0], velocities[1])
    torch.testing.assert_close(detached, 3.5 * prompted, atol=1e-4 * float(detached.norm()), rtol=0)
    assert float((plain - detached).norm()) > 0.1 * float(plain.norm())


@pytest.mark.parametrize(("size", "message"), [({"height": 34}, "multiples of 4"), ({"width": 52}, "up to 48 pixels")])
def test_a_size_the_model_cannot_draw_is_refused(sd3_directory, size, message):
    with pytest.raises(ValueError, match=message):
        load(sd3_directory, **size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tuning", ["lora", "full"])
@pytest.mark.parametrize("scale", [1.0, 4.5])
def test_ratio_is_exactly_one_before_the_first_update(sd3_directory, dtype, tuning, scale):
    """The rollout's log-prob, taken without gradients from the anchor's velocity, against the training pass, bit for bit."""
    policy = load(sd3_directory, tuning=tuning, dtype=dtype, gradient_checkpointing=True, guidance_scale=scale)
    assert all(p.dtype == torch.float32 for p in policy.trainable_parameters())
    algorithm = GranularGRPO(group_size=3, branch_steps=(0, 2), granularities=(1, 2))
    sigmas = sigma_grid(STEPS, 3.0)
    kernel = algorithm.kernel(sigmas)
    engine = Engine(
        policy=policy, cond=policy.encode(PROMPTS[:1]), sigmas=sigmas, precision=Precision(anchor=dtype, sample=dtype)
    )
    for rollout in engine.rollout(algorithm.plans(STEPS), 3, kernel, generator_for):
        (t,) = rollout.transitions
        sigma = sigmas[t.step]
        velocity = policy.velocity(t.x, sigma[None], engine.cond)
        log_prob = kernel(t.x, velocity.float(), sigma, sigmas[t.step + 1]).log_prob(t.x_next)
        assert torch.equal((log_prob - t.old_log_prob).exp(), torch.ones(3))
        log_prob[0].backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.trainable_parameters())


def perturb(policy, size):
    with torch.no_grad():
        for p in policy.trainable_parameters():
            p.add_(size * torch.randn(p.shape, generator=torch.Generator().manual_seed(2)))
    return policy


def test_a_fresh_adapter_changes_nothing_and_a_trained_one_can_be_switched_off(sd3_directory):
    plain = pictures(load(sd3_directory))
    tuned = load(sd3_directory, tuning="lora", lora_rank=4)
    assert difference(pictures(tuned), plain) < 1e-5
    perturb(tuned, 0.2)
    assert difference(pictures(tuned), plain) > 1e-2
    with tuned.base():
        assert difference(pictures(tuned), plain) < 1e-5


def test_a_saved_lora_loads_in_plain_diffusers_and_draws_the_same(sd3_directory, tmp_path):
    policy = perturb(load(sd3_directory, tuning="lora", lora_rank=4, lora_alpha=8), 0.2)
    assert policy.save(tmp_path).name == "pytorch_lora_weights.safetensors"
    pipeline = StableDiffusion3Pipeline.from_pretrained(sd3_directory)
    before = theirs(pipeline)
    pipeline.load_lora_weights(tmp_path, weight_name="pytorch_lora_weights.safetensors")
    after = theirs(pipeline)
    assert difference(before, after) > 1e-2
    torch.testing.assert_close(pictures(policy), after, atol=1e-5, rtol=0)
    sampling = load(sd3_directory)
    sampling.load(tmp_path)
    torch.testing.assert_close(pictures(sampling), after, atol=1e-5, rtol=0)


def test_fully_tuned_weights_load_with_from_pretrained(sd3_directory, tmp_path):
    policy = perturb(load(sd3_directory, tuning="full", keep_base=True), 0.02)
    policy.save(tmp_path)
    transformer = SD3Transformer2DModel.from_pretrained(tmp_path)
    after = theirs(StableDiffusion3Pipeline.from_pretrained(sd3_directory, transformer=transformer))
    torch.testing.assert_close(pictures(policy), after, atol=1e-5, rtol=0)
    sampling = load(sd3_directory)
    sampling.load(tmp_path)
    torch.testing.assert_close(pictures(sampling), after, atol=1e-5, rtol=0)
    with policy.base():
        torch.testing.assert_close(pictures(policy), pictures(load(sd3_directory)), atol=1e-5, rtol=0)
