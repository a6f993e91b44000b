"""The options of policies of diffusers pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from g2rpo.policies.attention import Attention
from g2rpo.policies.quantized import Quantize
from g2rpo.policies.tuning import LoraInit, TuningMode


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """The options of `config.PolicyConfig` as policies take them, and what a run adds; None is the policy's own default.

    height, width: of pictures, in pixels.
    truncate_timesteps: the network sees floor(1000 sigma), as in some published code; diffusers' pipelines do not. "rollout":
    only in sampling, not in a loss.
    detach_negative: guidance lets no gradient through the prediction without the prompt.
    lora_init: how the first factor of an adapter is drawn (`tuning.LoraInit`).
    published_pictures: see `pipelines.decode_latents`.
    quantize: how frozen weights are stored (`policies.quantized`).
    compile: see `pipelines.PipelinePolicy.compile`.
    seed: of the adapters' first values. keep_base: keep a copy of weights that training or `load` changes.
    """

    height: int
    width: int
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    max_sequence_length: int | None = None
    num_frames: int | None = None
    tuning: TuningMode = "lora"
    lora_rank: int = 32
    lora_alpha: float = 64
    lora_targets: Sequence[str] | None = None
    lora_init: LoraInit = "kaiming"
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    quantize: Quantize = "none"
    attention: Attention = "auto"
    autocast: bool = True
    compile: bool = False
    gradient_checkpointing: bool = False
    truncate_timesteps: bool | Literal["rollout"] = False
    detach_negative: bool = False
    published_pictures: bool = False
    vae_tiling: bool = False
    seed: int = 0
    keep_base: bool = True
