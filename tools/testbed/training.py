"""What all stages share: where and how a build runs, the training loop, and pictures as tensors."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


@dataclass(frozen=True)
class Context:
    """The output folder, seed and effort of a build."""

    out: Path
    seed: int = 0
    quick: bool = False

    def scaled(self, full: int, quick: int) -> int:
        """A number of steps or samples: `full`, or `quick` for a smoke test."""
        return quick if self.quick else full

    @property
    def work(self) -> Path:
        """Intermediate files, not shipped."""
        return self.out / "work"

    @property
    def pipeline(self) -> Path:
        return self.out / "pipeline"

    def rng(self, stage: str) -> np.random.Generator:
        """A stage's own numpy generator; also seeds torch, so that a stage does not depend on those
        before it."""
        entropy = [self.seed, *stage.encode()]
        torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))
        return np.random.default_rng(entropy)


def to_images(pictures: NDArray[np.uint8]) -> Tensor:
    """[B, H, W, 3] uint8 to [B, 3, H, W] float in [0, 1]."""
    return torch.from_numpy(np.array(pictures)).permute(0, 3, 1, 2).float() / 255


def bf16(enabled: bool = True) -> torch.autocast:
    """Autocast to bfloat16 where this CPU multiplies such matrices in hardware; elsewhere it would
    only slow training down."""
    return torch.autocast(
        "cpu",
        torch.bfloat16,
        enabled=enabled and bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)()),
    )


def new_optimizers(model: nn.Module, lr: float, matrix_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside transformer blocks, AdamW for all else: embeddings, modulations,
    convolutions, gains."""
    inner: list[nn.Parameter] = []
    outer: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        matrix = p.ndim == 2 and ("block" in name or "layers" in name)
        (inner if matrix and ".norm" not in name and "relative" not in name else outer).append(p)
    adam = torch.optim.AdamW(outer, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    return (
        [
            adam,
            torch.optim.Muon(
                inner, lr=matrix_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
            ),
        ]
        if inner
        else [adam]
    )


def fit(
    name: str,
    model: nn.Module,
    loss: Callable[[], Tensor],
    *,
    steps: int,
    lr: float,
    matrix_lr: float | None = None,
    ema: float,
    fast: bool = False,
    progress: Callable[[], str] | None = None,
) -> None:
    """Minimizes `loss()` over the model's weights, with warm-up and cosine, and ends on their
    moving average.

    `fast` asks for bfloat16; `progress()` is printed regularly, of the averaged weights.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    average = [p.detach().clone() for p in params]
    optimizers = new_optimizers(model, lr, matrix_lr or lr)
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    warmup, every = max(1, min(200, steps // 10)), max(1, steps // 20)
    start, total = time.perf_counter(), 0.0
    model.train()
    for step in range(1, steps + 1):
        for group, peak in groups:
            group["lr"] = peak * min(step / warmup, 0.501 + 0.5 * math.cos(math.pi * step / steps))
        with bf16(fast):
            value = loss()
        model.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        # A faster decay at first, because the weights are still untrained.
        torch._foreach_lerp_(
            average, [p.detach() for p in params], 1 - min(ema, step / (step + 10))
        )
        total += value.item()
        if step % every == 0:
            rate = (time.perf_counter() - start) / step
            print(f"{name} {step}/{steps} loss {total / every:.4f} ({rate:.2f} s/step)", flush=True)
            total = 0.0
            if progress is not None:
                live = [p.detach().clone() for p in params]
                _assign(params, average)
                print(f"{name} {step} {progress()}", flush=True)
                _assign(params, live)
                model.train()
    _assign(params, average)
    model.eval()


@torch.no_grad()
def _assign(params: list[nn.Parameter], values: list[Tensor]) -> None:
    for param, value in zip(params, values, strict=True):
        param.copy_(value)


def save_half(model: Any, folder: Path) -> None:
    """Writes a diffusers or transformers model as float16 safetensors, and leaves it, rounded, in
    float32."""
    model.half().save_pretrained(folder, safe_serialization=True)
    model.float()
