"""The FLUX policy against diffusers' own pipeline, on tiny random weights of the same classes."""

import math

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from diffusers.image_processor import VaeImageProcessor

from g2rpo.core.images import to_uint8
from g2rpo.core.noise import generator_for
from g2rpo.models.pipelines import deployed_shift
from tests.support import policies

SCHEDULERS = {  # the published scheduler_config.json of both models
    "dev": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    "schnell": FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False),
}


def test_shifts_of_the_published_models():
    """FLUX.1-dev: mu = 0.5 at 256 tokens and 1.15 at 4096, linear between; 720x720 pixels are 45 *
    45 tokens."""
    assert deployed_shift(SCHEDULERS["dev"], 64 * 64) == pytest.approx(3.158, abs=5e-4)
    assert deployed_shift(SCHEDULERS["dev"], 45 * 45) == pytest.approx(2.224, abs=5e-4)
    assert deployed_shift(SCHEDULERS["schnell"], 45 * 45) == 1.0


def test_adapters_start_gaussian_where_that_is_asked_for(flux_directory):
    """Their first factor has std 1 / rank, as published codes have it; peft's default is uniform,
    and narrower here."""
    spreads = []
    for init in ("gaussian", "kaiming"):
        policy = policies.load(flux_directory, lora_rank=4, lora_init=init)
        adapters = dict(policy.pipeline.transformer.named_parameters())
        first = torch.cat([p.flatten() for name, p in adapters.items() if "lora_A" in name])
        assert not any(p.any() for name, p in adapters.items() if "lora_B" in name)
        spreads.append(float(first.detach().std() * 4))
    # five standard errors of the deviation of so many
    error = 5 / math.sqrt(2 * len(first))
    assert spreads[0] == pytest.approx(1, abs=error) and spreads[1] + error < 1


def test_weights_that_are_trained_start_as_the_checkpoint_has_them(flux_directory):
    """The file is float32, and so are masters, whatever the calls compute in; weights under an
    adapter are the calls'."""
    stored = FluxTransformer2DModel.from_pretrained(flux_directory, subfolder="transformer")
    full, lora = (
        policies.load(flux_directory, tuning, dtype=torch.bfloat16).pipeline.transformer
        for tuning in ("full", "lora")
    )
    masters = full.state_dict()
    assert all(torch.equal(masters[name], each) for name, each in stored.state_dict().items())
    under = (weight for name, weight in lora.named_parameters() if "lora_" not in name)
    assert {weight.dtype for weight in under} == {torch.bfloat16}


def test_published_pictures_are_those_of_diffusers_image_processor(flux_directory):
    """x / 2 + 1 / 2 in bfloat16, to the grey level; in float32 an eighth of the pixels and more
    have another level."""
    policy, exact = (
        policies.load(flux_directory, "frozen", dtype=torch.bfloat16, published_pictures=each)
        for each in (True, False)
    )
    vae, latents = policy.pipeline.vae, 2 * policy.noise([generator_for(i) for i in range(4)])
    unpacked = policy.pipeline._unpack_latents(latents, 32, 32, policy.pipeline.vae_scale_factor)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        scaled = unpacked / vae.config.scaling_factor + vae.config.shift_factor
        decoded = vae.decode(scaled).sample
    theirs = VaeImageProcessor(16).postprocess(decoded)
    levels = torch.from_numpy(np.stack(theirs)).permute(0, 3, 1, 2)
    assert torch.equal(to_uint8(policy.decode(latents)), levels)
    off = to_uint8(exact.decode(latents)).int() - levels.int()
    assert 0.125 < float((off != 0).float().mean()) < 0.5 and int(off.abs().max()) == 1
