"""Which kernel computes attention, in rollouts and in training alike."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

Attention = Literal["auto", "cudnn", "flash", "flash2", "flash3", "efficient", "math"]
BACKENDS: Mapping[str, str] = {
    "cudnn": "_native_cudnn",
    "flash": "_native_flash",
    "flash2": "flash",
    "flash3": "_flash_3",
    "efficient": "_native_efficient",
    "math": "_native_math",
}
"""diffusers' names. Left out are kernels that round to fewer bits, that have no gradient, or whose
code comes from a hub."""
PACKAGES: Mapping[str, str] = {"flash2": "flash_attn", "flash3": "flash_attn_interface"}
MASKLESS = ("flash", "flash2", "flash3")
"""Kernels that take no mask."""
CUDA_ONLY = ("cudnn", "efficient", *PACKAGES)


def attention_kinds(device: str) -> list[str]:
    """The kinds of attention that this installation has for `device`."""
    cuda = torch.device(device).type == "cuda"
    return [
        "auto",
        *(kind for kind in BACKENDS if _installed(kind) and (cuda or kind not in CUDA_ONLY)),
    ]


def faults_of_attention(kind: Attention, device: str) -> Iterator[str]:
    """Why this installation has no such attention for `device`."""
    if kind not in (have := attention_kinds(device)):
        package = f" (it needs the package {PACKAGES[kind]})" if kind in PACKAGES else ""
        yield f"policy.attention={kind} is not available for {device}{package}; available: {', '.join(have)}"
    elif kind == "cudnn" and mixes_layouts(torch.device(device)):
        yield f"policy.attention=cudnn: with torch {torch.__version__} its gradients are wrong; take auto or flash"


def mixes_layouts(device: torch.device) -> bool:
    """Whether torch's cuDNN attention takes the layout of one output gradient for that of another.

    torch keeps a cuDNN graph for the shapes and strides of queries, keys and values, but not for
    the strides of the output's gradient. A gradient in another layout is then read with the strides
    of the first. FLUX has both: the gradient of a single-stream block is a slice of a wider tensor.
    With torch 2.11.0 on an H200 gradients were 110 % off without a word; in the other order memory
    beyond the tensor was read ("illegal memory access").
    """
    batch, tokens, heads, width = 1, 256, 2, 64
    values = torch.randn(batch, tokens, heads, width, device=device, dtype=torch.bfloat16)
    narrow = torch.randn(batch, tokens, heads * width, device=device, dtype=torch.bfloat16)
    slice_of_wide = torch.cat([narrow, torch.zeros_like(narrow)], dim=-1)[..., : heads * width]
    gradients = []
    for given in (narrow, slice_of_wide):  # in this order nothing beyond a tensor is read
        leaf = values.clone().requires_grad_()
        each = leaf.transpose(1, 2)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = functional.scaled_dot_product_attention(each, each, each)
        out.transpose(1, 2).flatten(2).backward(given)
        assert leaf.grad is not None
        gradients.append(leaf.grad.float())
    first, second = gradients
    # rounding in bfloat16 gives less than 0.01
    return float((second - first).norm()) > 0.1 * float(first.norm())


def _installed(kind: str) -> bool:
    return kind not in PACKAGES or importlib.util.find_spec(PACKAGES[kind]) is not None
