"""Which kernel computes attention, in rollouts and in training alike."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Literal

import torch

from g2rpo.errors import UserError

Attention = Literal["auto", "cudnn", "flash", "flash2", "flash3", "efficient", "math"]
BACKENDS: Mapping[str, str] = {
    "cudnn": "_native_cudnn",
    "flash": "_native_flash",
    "flash2": "flash",
    "flash3": "_flash_3",
    "efficient": "_native_efficient",
    "math": "_native_math",
}
"""diffusers' names. Left out are kernels that round to fewer bits, that have no gradient, or whose code comes from a hub."""
PACKAGES: Mapping[str, str] = {"flash2": "flash_attn", "flash3": "flash_attn_interface"}
CUDA_ONLY = ("cudnn", "efficient", *PACKAGES)


def available(device: str) -> list[str]:
    """The kinds of attention that this installation has for `device`."""
    cuda = torch.device(device).type == "cuda"
    return ["auto", *(kind for kind in BACKENDS if _installed(kind) and (cuda or kind not in CUDA_ONLY))]


def check(kind: Attention, device: str) -> None:
    """UserError if this installation has no such attention for `device`."""
    if kind not in (have := available(device)):
        package = f" (it needs the package {PACKAGES[kind]})" if kind in PACKAGES else ""
        raise UserError(f"policy.attention={kind} cannot be had for {device}{package}; there are: {', '.join(have)}")


def choose(transformer: Any, kind: Attention) -> None:
    """Has a diffusers transformer compute its attention so; UserError if its attention cannot be chosen."""
    if kind == "auto":
        return
    from diffusers.models.attention_dispatch import attention_backend

    with attention_backend(BACKENDS[kind]):  # it restores the backend of all other models, which the next line would change
        transformer.set_attention_backend(BACKENDS[kind])
    if not any(getattr(getattr(module, "processor", None), "_attention_backend", None) for module in transformer.modules()):
        raise UserError(f"policy.attention={kind}: a {type(transformer).__name__} has no choice of attention; take it out")


def _installed(kind: str) -> bool:
    return kind not in PACKAGES or importlib.util.find_spec(PACKAGES[kind]) is not None
