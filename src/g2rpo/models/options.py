"""The options of a policy: the section `policy` of a run's configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat

from g2rpo.core.plain import Count, Section
from g2rpo.models.quantized import Quantize

Attention = Literal["auto", "cudnn", "flash", "flash2", "flash3", "efficient", "math"]
TuningMode = Literal["lora", "full", "frozen"]
"""What of a policy is trained; "frozen", for sampling, is no option of a config."""


def _dtype_name(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


Dtype = Annotated[Literal["float32", "bfloat16"], BeforeValidator(_dtype_name)]
"""From Python also torch's."""


class PolicyConfig(Section):
    """The model, and which of its weights are trained."""

    path: str
    """A diffusers pipeline: a directory, a hub id, or "testbed" for the one inside the package."""
    kind: str | None = None
    """The policy's class: a name, FILE.py:NAME or MODULE:NAME. None: the one for the pipeline's
    class."""
    pipeline: str | None = None
    """The class that the pipeline must have; a recipe's values are for one kind of model. None: any
    that is known."""
    height: Count
    width: Count
    guidance_scale: NonNegativeFloat | None = None
    """An input of the network (FLUX.1), or the scale of classifier-free guidance, which costs a
    second evaluation; 1 and below (Z-Image, Krea-2: 0) turns it off. None: the model's own
    (docs/models.md)."""
    negative_prompt: str | None = None
    """For models with classifier-free guidance."""
    num_frames: Count | None = None
    """Of a video. None: one, a picture."""
    max_sequence_length: Annotated[int, Field(gt=0, le=4096)] | None = None
    """Tokens of the long prompt encoder. None: the pipeline's default, such as 512 for FLUX and 256
    for SD3."""
    tuning: Literal["lora", "full"] = "lora"
    """"lora": float32 adapters of frozen weights. "full": all weights of the transformer, in
    float32."""
    lora_rank: Count = 32
    lora_alpha: PositiveFloat = 64.0
    lora_targets: list[str] | None = None
    """Endings of the names of the modules that get an adapter. None: the attention's, as in
    diffusers' scripts."""
    lora_above: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The adapter acts at sigmas above this, and below the base model finishes the picture, in
    training and samples alike. Late steps, which early branch steps never train, change with the
    others and lose detail (docs/algorithm.md). 0: everywhere."""
    lora_init: Literal["kaiming", "gaussian"] = "kaiming"
    """How peft draws the first factor of an adapter; the second is 0. "gaussian": with std 1 /
    rank."""
    adapter: str | None = None
    """A LoRA to continue: a .safetensors file, a folder with one, a run, or OWNER/NAME[/FILE] of
    the hub. Rank, alpha and targets are the file's. The base model of losses and comparisons is
    then the model with it. Under full tuning it is merged at first."""
    dtype: Dtype = "float32"
    """Of the network's weights and calls; "bfloat16" on a GPU. Latents have
    `sampling.precision`."""
    quantize: Quantize = "none"
    """How the frozen weights of a LoRA are stored: in a byte each (int8) or in half of one
    (nf4)."""
    autocast: bool = True
    """Calls in bfloat16 run under torch.autocast, with norms in float32, as in published code.
    false: as diffusers' pipelines compute, in bfloat16 but for what a model itself keeps in
    float32; for LoRA, and a GPU's memory and time."""
    offload: bool = False
    """The blocks of the frozen base live in host memory, and come to the GPU as they are called. The
    same results in less memory, and in the same time where copies are hidden behind products
    (`g2rpo plan --all`)."""
    compile: bool | Literal["auto"] = False
    """Blocks run through torch.compile, in rollouts and in training alike; seconds to minutes
    before the first calls. "auto": where `g2rpo train` plans that a CUDA GPU saves more than twice
    that, and rollout and training may round differently (docs/performance.md)."""
    attention: Attention = "auto"
    """Of attention: torch's choice without cuDNN; cudnn, flash, efficient or math of torch; flash2,
    flash3 of packages."""
    device: str = "auto"
    """"auto": a CUDA GPU if there is one, else the CPU. "mps": Apple's GPU, in float32 or with
    `autocast=false`, without `quantize`, `compile` and sharding; not yet tested on a Mac."""
    gradient_checkpointing: bool = False
    """Activations are computed again in the backward pass: less memory, a second forward pass."""
    truncate_timesteps: bool | Literal["rollout"] = False
    """The network sees floor(1000 sigma) / 1000, as in the published code of G2RPO, DanceGRPO and
    MixGRPO; "rollout": where pictures are sampled, and sigma in the loss (DiffusionNFT)."""
    detach_negative: bool = False
    """For SD3's guidance: no gradient goes through the prediction without the prompt (FlowBP)."""
    published_pictures: bool = False
    """Latents become pictures with the roundings of the published code of G2RPO
    (`models.replay.Pictures`)."""
    vae_tiling: bool = False
    """FLUX's VAE decodes pictures above 1024 pixels in tiles. Rewards see their seams."""
