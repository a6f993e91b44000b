"""Policies of pipelines in memory or in folders, with options by name, and what they are asked."""

import diffusers
import torch

from g2rpo.core.noise import generator_for
from g2rpo.models.anyflow import DiffusersPolicy
from g2rpo.models.blueprint import built_on_meta
from g2rpo.models.catalogue import SPECS
from g2rpo.models.meta import on_meta
from g2rpo.models.modular import pipeline_class
from g2rpo.models.options import PolicyConfig
from g2rpo.models.pipelines import read_pipeline
from g2rpo.models.spec import parameters_of

PROMPTS = ["a red circle", "two blue square left of a circle", "a square"]


def make(kind, pipeline, *, tuning="lora", device="cpu", keep_base=True, sharding=None, **options):
    """A policy of class `kind`; `options` are those of a config."""
    config = PolicyConfig(path="", tuning="full" if tuning == "full" else "lora", **options)
    return kind(
        pipeline, config, tuning=tuning, device=device, keep_base=keep_base, sharding=sharding
    )


def small(pipeline):
    """Options of small pictures, or clips of few frames."""
    kind, size = type(pipeline), {"height": 32, "width": 32}
    if "max_sequence_length" in parameters_of(kind):
        size["max_sequence_length"] = 24
    if (spec := SPECS[kind.__name__]).video:
        size["num_frames"] = 1 + int(getattr(pipeline, spec.frames))
    return size


def policy_of(pipeline, tuning="frozen", **options):
    """The catalogue's policy of a pipeline, which draws small pictures."""
    kind = DiffusersPolicy.of(SPECS[type(pipeline).__name__])
    return make(kind, pipeline, tuning=tuning, **{**small(pipeline), **options})


def load(folder, tuning="lora", *, dtype=torch.float32, **options):
    """That of the pipeline in a folder."""
    name = diffusers.DiffusionPipeline.load_config(str(folder))["_class_name"]
    pipeline = read_pipeline(pipeline_class(name), folder, dtype, tuning)
    return policy_of(pipeline, tuning, dtype=dtype, **options)


def build_on_meta(blueprint, config):
    """That of a run, whole, without weights."""
    return built_on_meta(
        blueprint, config, {name: on_meta(part) for name, part in blueprint.parts.items()}
    )


def guided_by(policy):
    """How many times guidance, s v - (s - 1) w, multiplies errors of the network."""
    return 2 * policy.guidance_scale - 1 if policy.guided else 1.0


def moved(policy, size=0.1):
    """The policy, with random numbers added to its trained weights."""
    for number, weight in enumerate(policy.trainable_parameters()):
        weight.data += size * torch.randn(weight.shape, generator=generator_for(number))
    return policy


def question(policy, *sigmas, prompts=PROMPTS):
    """Noise, sigmas and conditioning, of a row for each sigma."""
    x = policy.noise([generator_for(row) for row in range(len(sigmas))])
    return x, torch.tensor(sigmas, device=x.device), policy.encode(prompts[: len(sigmas)])


@torch.no_grad()
def velocity(policy, *sigmas):
    """The answer to it, of one row if no sigma is named."""
    return policy.velocity(*question(policy, *(sigmas or (0.6,))))
