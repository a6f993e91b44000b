"""The FLUX policy against diffusers' own pipeline, on tiny random weights of the same classes."""

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.image_processor import VaeImageProcessor

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.core.data import Precision
from g2rpo.core.flow import sigma_grid
from g2rpo.core.seeding import generator_for
from g2rpo.evaluation.sampler import Sampler
from g2rpo.policies.anyflow import DiffusersPolicy
from g2rpo.policies.catalogue import flux
from g2rpo.policies.pipelines import deployed_shift
from g2rpo.rewards.pixels import to_uint8
from g2rpo.rollout.engine import Engine
from tests.support.tiny import save_flux

PROMPTS = ["a red circle", "two blue square left of a circle", "a square"]
SIZE = {"height": 32, "width": 32, "max_sequence_length": 12}


def load(directory, **options):
    return DiffusersPolicy.from_pretrained(directory, **{**SIZE, "tuning": "frozen", **options})


def pictures(policy, steps=6, seed=5, batch_size=3, shift=3.0):
    return Sampler(policy=policy, shift=shift, num_steps=steps, seed=seed, batch_size=batch_size).pictures(PROMPTS)


def theirs(pipeline, steps=6, seed=5, scale=None):
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        PROMPTS,
        height=32,
        width=32,
        num_inference_steps=steps,
        guidance_scale=3.5,
        max_sequence_length=12,
        generator=[generator_for(seed, "picture", i) for i in range(len(PROMPTS))],
        output_type="pt",
        joint_attention_kwargs=None if scale is None else {"scale": scale},
    ).images


@pytest.mark.parametrize("guidance_embeds", [True, False], ids=["dev", "schnell"])
def test_policy_and_ode_equal_the_pipeline_at_the_same_seed(tmp_path, guidance_embeds):
    """Same float32 network, same noise, same Euler steps; only the order of a few additions differs: 1e-5 of [0, 1]."""
    directory = save_flux(tmp_path, guidance_embeds=guidance_embeds)
    pipeline = FluxPipeline.from_pretrained(directory)
    torch.testing.assert_close(pictures(load(directory)), theirs(pipeline), atol=1e-5, rtol=0)


SCHEDULERS = {  # the published scheduler_config.json of both models
    "dev": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    "schnell": FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_policy_knows_the_shift_that_its_pipeline_samples_with(flux_directory, name):
    pipeline = FluxPipeline.from_pretrained(flux_directory, scheduler=SCHEDULERS[name])
    expected = theirs(pipeline)
    policy = DiffusersPolicy.of(flux)(pipeline, **SIZE, tuning="frozen")
    torch.testing.assert_close(pictures(policy, shift=policy.shift), expected, atol=1e-5, rtol=0)
    assert float((pictures(policy, shift=3.0) - expected).abs().max()) > 1e-3


def test_shifts_of_the_published_models():
    """FLUX.1-dev: mu = 0.5 at 256 tokens and 1.15 at 4096, linear between; 720x720 pixels are 45 * 45 tokens."""
    assert deployed_shift(SCHEDULERS["dev"], 64 * 64) == pytest.approx(3.158, abs=1e-3)
    assert deployed_shift(SCHEDULERS["dev"], 45 * 45) == pytest.approx(2.224, abs=1e-3)
    assert deployed_shift(SCHEDULERS["schnell"], 45 * 45) == 1.0


def test_guidance_reaches_the_network(flux_directory):
    weak, strong = pictures(load(flux_directory, guidance_scale=1.0)), pictures(load(flux_directory, guidance_scale=8.0))
    assert float((weak - strong).abs().max()) > 1e-4


def velocities(policy, batch):
    cond = policy.encode(PROMPTS)
    x = policy.noise([generator_for(i) for i in range(3)])
    sigma = torch.tensor([1.0, 0.6, 0.2])
    with torch.no_grad():
        if batch:
            return policy.velocity(x, sigma, cond)
        return torch.cat([policy.velocity(x[i : i + 1], sigma[i : i + 1], cond.rows([i])) for i in range(3)])


def test_rows_of_one_batch_may_have_their_own_sigma(flux_directory):
    policy = load(flux_directory)
    torch.testing.assert_close(velocities(policy, True), velocities(policy, False), atol=1e-5, rtol=1e-5)


def test_truncated_timesteps_are_the_published_ones(flux_directory):
    """sigma = 0.8338 is fed as 0.833: equal to the plain policy at 0.833, different from it at 0.8338."""
    plain, truncating = load(flux_directory), load(flux_directory, truncate_timesteps=True)
    cond, x = plain.encode(PROMPTS[:1]), plain.noise([generator_for(0)])
    with torch.no_grad():
        fed = truncating.velocity(x, torch.tensor([0.8338]), cond)
        torch.testing.assert_close(fed, plain.velocity(x, torch.tensor([0.833]), cond), atol=1e-6, rtol=0)
        assert not torch.allclose(fed, plain.velocity(x, torch.tensor([0.8338]), cond), atol=1e-6, rtol=0)


def test_adapters_start_gaussian_where_that_is_asked_for(flux_directory):
    """Their first factor has std 1 / rank, as published codes have it; peft's default is uniform, and narrower here."""
    spreads = []
    for init in ("gaussian", "kaiming"):
        policy = load(flux_directory, tuning="lora", lora_rank=4, lora_init=init)
        adapters = dict(policy.pipeline.transformer.named_parameters())
        first = torch.cat([p.flatten() for name, p in adapters.items() if "lora_A" in name])
        assert not any(p.any() for name, p in adapters.items() if "lora_B" in name)
        spreads.append(float(first.detach().std() * 4))
    assert spreads[0] == pytest.approx(1, abs=0.05) and spreads[1] < 0.7


def test_a_size_the_model_cannot_draw_is_refused(flux_directory):
    with pytest.raises(ValueError, match="multiples of 4"):
        load(flux_directory, height=34)


def test_weights_that_are_trained_start_as_the_checkpoint_has_them(flux_directory):
    """The file is float32, and so are masters, whatever the calls compute in; weights under an adapter are the calls'."""
    stored = FluxTransformer2DModel.from_pretrained(flux_directory, subfolder="transformer").state_dict()
    masters = load(flux_directory, tuning="full", dtype=torch.bfloat16).pipeline.transformer.state_dict()
    assert all(torch.equal(masters[name], weight) for name, weight in stored.items())
    under = load(flux_directory, tuning="lora", dtype=torch.bfloat16).pipeline.transformer.named_parameters()
    assert {weight.dtype for name, weight in under if "lora_" not in name} == {torch.bfloat16}


def test_published_pictures_are_those_of_diffusers_image_processor(flux_directory):
    """x / 2 + 1 / 2 in bfloat16, to the grey level; in float32 an eighth of the pixels and more have another level."""
    policy = load(flux_directory, dtype=torch.bfloat16, published_pictures=True)
    vae, latents = policy.pipeline.vae, 2 * policy.noise([generator_for(i) for i in range(4)])
    unpacked = policy.pipeline._unpack_latents(latents, 32, 32, policy.pipeline.vae_scale_factor)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        decoded = vae.decode(unpacked / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
    theirs = VaeImageProcessor(16).postprocess(decoded)
    levels = torch.stack([torch.from_numpy(np.array(picture)) for picture in theirs]).permute(0, 3, 1, 2)
    assert torch.equal(to_uint8(policy.decode(latents)), levels)
    exact = to_uint8(load(flux_directory, dtype=torch.bfloat16).decode(latents)).int() - levels.int()
    assert 0.125 < float((exact != 0).float().mean()) < 0.5 and int(exact.abs().max()) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_ratio_is_exactly_one_before_the_first_update(flux_directory, dtype, tuning):
    """The rollout's log-prob, taken without gradients from the anchor's velocity, against the training pass, bit for bit."""
    policy = load(flux_directory, tuning=tuning, dtype=dtype, gradient_checkpointing=True)
    algorithm = GranularGRPO(group_size=3, branch_steps=(0, 2), granularities=(1, 2))
    sigmas = sigma_grid(6, 3.0)
    kernel = algorithm.kernel(sigmas)
    engine = Engine(
        policy=policy, cond=policy.encode(PROMPTS[:1]), sigmas=sigmas, precision=Precision(anchor=dtype, sample=dtype)
    )
    for rollout in engine.rollout(algorithm.plans(6), 3, kernel, generator_for):
        (t,) = rollout.transitions
        sigma = sigmas[t.step]
        velocity = policy.velocity(t.x, sigma[None], engine.cond)
        assert velocity.requires_grad
        log_prob = kernel(t.x, velocity.float(), sigma, sigmas[t.step + 1]).log_prob(t.x_next)
        if dtype == torch.float32:
            assert torch.equal((log_prob - t.old_log_prob).exp(), torch.ones(3))
        else:  # the anchor evaluates the unrounded latent; under bfloat16 the network rounds it to the same one
            assert torch.equal((log_prob - t.old_log_prob).exp(), torch.ones(3))


def test_a_fresh_adapter_changes_nothing_and_a_trained_one_can_be_switched_off(flux_directory):
    plain = pictures(load(flux_directory))
    tuned = load(flux_directory, tuning="lora", lora_rank=4)
    torch.testing.assert_close(pictures(tuned), plain, atol=1e-6, rtol=0)
    with torch.no_grad():
        for p in tuned.trainable_parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    assert float((pictures(tuned) - plain).abs().max()) > 1e-3
    with tuned.base():
        torch.testing.assert_close(pictures(tuned), plain, atol=1e-6, rtol=0)


def perturb(policy, size):
    with torch.no_grad():
        for p in policy.trainable_parameters():
            p.add_(size * torch.randn(p.shape, generator=torch.Generator().manual_seed(2)))
    return policy


def test_a_saved_lora_loads_in_plain_diffusers_and_draws_the_same(flux_directory, tmp_path):
    policy = perturb(load(flux_directory, tuning="lora", lora_rank=4, lora_alpha=8), 0.2)
    assert policy.save(tmp_path).name == "pytorch_lora_weights.safetensors"
    pipeline = FluxPipeline.from_pretrained(flux_directory)
    before = theirs(pipeline)
    pipeline.load_lora_weights(tmp_path, weight_name="pytorch_lora_weights.safetensors")
    after = theirs(pipeline)
    assert float((after - before).abs().max()) > 1e-3
    torch.testing.assert_close(pictures(policy), after, atol=1e-5, rtol=0)
    sampling = load(flux_directory)
    sampling.load(tmp_path)
    torch.testing.assert_close(pictures(sampling), after, atol=1e-5, rtol=0)


def test_fully_tuned_weights_load_with_from_pretrained(flux_directory, tmp_path):
    policy = perturb(load(flux_directory, tuning="full", keep_base=True), 0.01)
    policy.save(tmp_path)
    transformer = FluxTransformer2DModel.from_pretrained(tmp_path)
    after = theirs(FluxPipeline.from_pretrained(flux_directory, transformer=transformer))
    torch.testing.assert_close(pictures(policy), after, atol=1e-5, rtol=0)
    sampling = load(flux_directory)
    sampling.load(tmp_path)
    torch.testing.assert_close(pictures(sampling), after, atol=1e-5, rtol=0)
    with policy.base():
        torch.testing.assert_close(pictures(policy), pictures(load(flux_directory)), atol=1e-6, rtol=0)
