"""The SD3 policy against diffusers' own pipeline, on tiny random weights of the same classes."""

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from g2rpo.core.noise import generator_for
from g2rpo.rollout.engine import Engine
from g2rpo.train.evaluation.sampler import Sampler
from g2rpo.train.updater import Trained
from tests.support import policies
from tests.support.policies import PROMPTS, question
from tests.support.tiny import save_sd3
from tests.support.tolerances import near, network, rounding
from tests.support.variants import few

SIZE = {"height": 32, "width": 24, "max_sequence_length": 10}
STEPS = 6
DRAWN = network(8.0, passes=2)
"""Of pictures: guidance by 4.5 multiplies errors by 8, and the VAE follows."""


def load(directory, **options):
    return policies.load(directory, **{**SIZE, "tuning": "frozen", **options})


def pictures(policy):
    return Sampler(policy=policy, shift=3.0, num_steps=STEPS, seed=5, batch_size=3).pictures(
        PROMPTS
    )


def theirs(pipeline, negative_prompt=None):
    """With our grid. Left alone, diffusers' scheduler shifts the lower end of a static-shift grid
    twice (huggingface/diffusers#13243); test_any_pipeline.py walks that one."""
    pipeline.set_progress_bar_config(disable=True)
    options = {
        "negative_prompt": negative_prompt and [negative_prompt] * len(PROMPTS),
        "sigmas": np.linspace(1, 1 / STEPS, STEPS),
        "generator": [generator_for(5, "picture", i) for i in range(len(PROMPTS))],
    }
    options |= {"num_inference_steps": STEPS, "guidance_scale": 4.5, "output_type": "pt", **SIZE}
    return pipeline(PROMPTS, **options).images


@pytest.mark.parametrize("t5", few([True, False], bool), ids=["t5", "no t5"])
def test_pictures_with_a_negative_prompt_equal_the_pipelines_own(tmp_path, t5):
    """Same float32 network, noise and Euler steps; only the order of sums differs."""
    directory, negative = save_sd3(tmp_path, t5=t5), "two blue circle"
    without = {} if t5 else {"text_encoder_3": None, "tokenizer_3": None}
    pipeline = StableDiffusion3Pipeline.from_pretrained(directory, **without)
    expected = theirs(pipeline, negative)
    drawn = pictures(load(directory, guidance_scale=4.5, negative_prompt=negative))
    torch.testing.assert_close(drawn, expected, **DRAWN)
    assert (theirs(pipeline) - expected).abs().max() > 1e-2


def test_times_truncated_in_rollouts_alone_are_exact_in_a_loss(sd3_directory):
    """As DiffusionNFT's code has it: the sampler sees 833, the loss 833.8."""
    policy = load(sd3_directory, truncate_timesteps="rollout")
    x, sigma, cond = question(policy, 0.8338)
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
    assert fed == near([833, 833.8, 833.8, 833.8, 833], rounding(2))


def test_a_detached_negative_prediction_passes_no_gradient(sd3_directory):
    """FlowBP's cfg_detach_neg: the same velocity, and the gradient of the prediction with the
    prompt times the scale."""
    gradients, velocities = [], []
    for options in ({}, {"detach_negative": True}, {"guidance_scale": 1.0}):
        policy = load(sd3_directory, **{"guidance_scale": 3.5, "tuning": "full", **options})
        v = policy.velocity(*question(policy, 0.6))
        v.square().sum().backward() if not velocities else v.backward(2 * velocities[0])
        grads = [p.grad for p in policy.trainable_parameters() if p.grad is not None]
        gradients.append(torch.cat([grad.flatten() for grad in grads]))
        velocities.append(v.detach())
    plain, detached, prompted = gradients
    assert torch.equal(velocities[0], velocities[1])
    # there and back through the network, whose prediction is multiplied by 3.5
    close = network(3.5 * prompted.abs().max(), passes=2)
    torch.testing.assert_close(detached, 3.5 * prompted, **close)
    assert float((plain - detached).norm()) > 0.1 * float(plain.norm())


@pytest.mark.parametrize(
    ("size", "message"), [({"height": 34}, "multiples of 4"), ({"width": 52}, "up to 48 pixels")]
)
def test_a_size_the_model_cannot_draw_is_refused(sd3_directory, size, message):
    with pytest.raises(ValueError, match=message):
        load(sd3_directory, **size)
