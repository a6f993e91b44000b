"""Which kernel computes attention, in rollouts and in training alike."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Literal

import torch

from g2rpo.core.errors import UserError

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
MASKLESS = ("flash", "flash2", "flash3")
"""Kernels that take no mask."""
CUDA_ONLY = ("cudnn", "efficient", *PACKAGES)


def attention_kinds(device: str) -> list[str]:
    """The kinds of attention that this installation has for `device`."""
    cuda = torch.device(device).type == "cuda"
    return ["auto", *(kind for kind in BACKENDS if _installed(kind) and (cuda or kind not in CUDA_ONLY))]


def check_attention(kind: Attention, device: str) -> None:
    """UserError if this installation has no such attention for `device`."""
    if kind not in (have := attention_kinds(device)):
        package = f" (it needs the package {PACKAGES[kind]})" if kind in PACKAGES else ""
        raise UserError(f"policy.attention={kind} is not available for {device}{package}; available: {', '.join(have)}")


def _installed(kind: str) -> bool:
    return kind not in PACKAGES or importlib.util.find_spec(PACKAGES[kind]) is not None
