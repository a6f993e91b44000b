"""Random adapters, and files of them as other trainers write them."""

import torch
from safetensors.torch import load_file

from g2rpo.core.noise import generator_for
from g2rpo.lab.export import names_for, tensors_for
from g2rpo.models.adapters import CONFIG, PREFIX, Adapter, write_tensors
from g2rpo.models.pipelines import loader_of


def random_pairs(shapes, rank=3, seed="adapter", size=0.2):
    """An adapter of modules whose weights have these shapes [out, in]."""
    draw = generator_for(seed)
    pairs = {
        module: (torch.randn(rank, i, generator=draw), torch.randn(o, rank, generator=draw))
        for module, (o, i) in shapes.items()
    }
    return Adapter({module: (down, size * up) for module, (down, up) in pairs.items()})


def random_adapter(transformer, targets=("to_q", "to_k", "to_v", "to_out.0"), **options):
    ends = tuple(f".{target}" for target in targets)
    shapes = {
        name: module.weight.shape
        for name, module in transformer.named_modules()
        if isinstance(module, torch.nn.Linear) and f".{name}".endswith(ends)
    }
    return random_pairs(shapes, **options)


def write(adapter, file, format, transformer):
    """Writes an adapter as `g2rpo export` does."""
    if format == "diffusers":
        adapter.write(file, PREFIX)
    else:
        names = names_for(type(transformer).__name__, format=format)
        header = {key: text for key, text in adapter.metadata.items() if key != CONFIG}
        write_tensors(file, tensors_for(adapter, names, format), header)
    return file


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
