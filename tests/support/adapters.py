"""Adapter files as other trainers write them, and velocities with them beside diffusers' own."""

import copy
from pathlib import Path

import torch
from safetensors.torch import load_file

from g2rpo.core.noise import generator_for
from g2rpo.lab.export import names_for, tensors_for
from g2rpo.models.adapters import CONFIG, PREFIX, Adapter, endings, write_tensors
from g2rpo.models.catalogue import SPECS
from g2rpo.models.pipelines import loader_of
from g2rpo.models.spec import parameters_of
from tests.support.policies import guided_by, make
from tests.support.tiny_pipelines import CLASSES, tiny_pipeline
from tests.support.tolerances import network

ORIGINAL = ["Flux2KleinPipeline", "QwenImagePipeline", "ZImagePipeline", "WanPipeline"]
READ = {
    "diffusers": [kind for kind in CLASSES if not SPECS[kind].pictured],
    "comfyui": [
        *ORIGINAL,
        "FluxPipeline",
        "StableDiffusion3Pipeline",
        "ChromaPipeline",
        "Krea2Pipeline",
        "LTXPipeline",
    ],
    "kohya": ORIGINAL,
    "ai-toolkit": ORIGINAL,
}
"""The classes whose tiny models diffusers reads in a format; its kohya converter of FLUX.1 and that
of Lumina 2 have the widths of the real models."""
SIZE = {"height": 32, "width": 32, "max_sequence_length": 24}


def random_adapter(
    transformer, targets=("to_q", "to_k", "to_v", "to_out.0"), rank=3, seed="adapter", size=0.2
):
    draw = generator_for(seed)
    shapes = {
        name: module.weight.shape
        for name, module in transformer.named_modules()
        if isinstance(module, torch.nn.Linear)
        and f".{name}".endswith(tuple(f".{target}" for target in targets))
    }
    pairs = {
        m: (torch.randn(rank, i, generator=draw), torch.randn(o, rank, generator=draw))
        for m, (o, i) in shapes.items()
    }
    return Adapter({module: (down, size * up) for module, (down, up) in pairs.items()})


def targets_of(kind):
    """The default, and what else diffusers' kohya converter of Wan expects."""
    return (*SPECS[kind].lora_targets, *(("net.0.proj", "net.2") if kind == "WanPipeline" else ()))


def write(adapter, file, format, transformer):
    """Writes an adapter as `g2rpo export` does."""
    if format == "diffusers":
        adapter.write(file, PREFIX)
        return file
    names = names_for(type(transformer).__name__, format=format)
    header = {key: text for key, text in adapter.metadata.items() if key != CONFIG}
    write_tensors(file, tensors_for(adapter, names, format), header)
    return file


def policy_of(kind, pipeline, tuning="frozen", **options):
    spec, size = SPECS[kind], dict(SIZE)
    if "max_sequence_length" not in parameters_of(type(pipeline)):
        del size["max_sequence_length"]
    frames = {"num_frames": 1 + int(getattr(pipeline, spec.frames))} if spec.video else {}
    return make(CLASSES[kind], pipeline, tuning=tuning, **{**size, **frames, **options})


@torch.no_grad()
def velocity(policy):
    x = policy.noise([generator_for(0)])
    return policy.velocity(x, torch.tensor([0.6]), policy.encode(["a red circle"]))


def fused(pipeline, file):
    """The pipeline with a file's LoRA in its weights, all by diffusers."""
    if loader_of(pipeline) == "load_lora_weights":
        pipeline.load_lora_weights(load_file(file))
        pipeline.fuse_lora()
        pipeline.unload_lora_weights()
    else:
        pipeline.transformer.load_lora_adapter(load_file(file))
        pipeline.transformer.fuse_lora()
        pipeline.transformer.unload_lora()
    return pipeline


def velocities_with(kind, format, folder):
    """Ours and diffusers' with the file that we read, and with the one that we write; and the
    tolerance between them, of which the adapter changes a hundred times as much."""
    pipeline = tiny_pipeline(kind)
    adapter = random_adapter(pipeline.transformer, targets_of(kind))
    file = write(
        adapter, Path(folder) / f"{kind}-{format}.safetensors", format, pipeline.transformer
    )
    ends = endings(adapter.layers, [name for name, _ in pipeline.transformer.named_modules()])
    untrained = velocity(policy_of(kind, copy.deepcopy(pipeline)))
    theirs = velocity(policy_of(kind, fused(copy.deepcopy(pipeline), file)))
    options = {"lora_rank": 3, "lora_alpha": 6, "lora_targets": ends}
    continued = policy_of(kind, copy.deepcopy(pipeline), "lora", adapter=str(file), **options)
    read = velocity(continued)
    continued.save(Path(folder) / f"{kind}-{format}")
    written = velocity(
        policy_of(
            kind,
            fused(pipeline, Path(folder) / f"{kind}-{format}/pytorch_lora_weights.safetensors"),
        )
    )
    allowed = network(guided_by(continued) * theirs.abs().max())
    assert (theirs - untrained).abs().max() > 100 * allowed["atol"]
    return [(read, theirs), (written, theirs)], allowed
