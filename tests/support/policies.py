"""Policies of pipelines in memory or in folders, with options by name."""

import diffusers
import torch

from g2rpo.models.anyflow import DiffusersPolicy
from g2rpo.models.catalogue import SPECS
from g2rpo.models.modular import pipeline_class
from g2rpo.models.options import PolicyConfig
from g2rpo.models.pipelines import read_pipeline


def make(kind, pipeline, *, tuning="lora", device="cpu", keep_base=True, sharding=None, **options):
    """A policy of class `kind`; `options` are those of a config."""
    config = PolicyConfig(path="", tuning="full" if tuning == "full" else "lora", **options)
    return kind(
        pipeline, config, tuning=tuning, device=device, keep_base=keep_base, sharding=sharding
    )


def load(folder, *, dtype=torch.float32, tuning="lora", **options):
    """The policy of the pipeline in a folder."""
    name = diffusers.DiffusionPipeline.load_config(str(folder))["_class_name"]
    pipeline = read_pipeline(pipeline_class(name), folder, dtype, tuning)
    return make(DiffusersPolicy.of(SPECS[name]), pipeline, dtype=dtype, tuning=tuning, **options)


def guided_by(policy):
    """How many times guidance, s v - (s - 1) w, multiplies errors of the network."""
    return 2 * policy.guidance_scale - 1 if policy.guided else 1.0


def moved(policy, size=0.1):
    """The policy, with random numbers added to its trained weights."""
    for number, weight in enumerate(policy.trainable_parameters()):
        draw = torch.Generator().manual_seed(number)
        weight.data += size * torch.randn(weight.shape, generator=draw)
    return policy
