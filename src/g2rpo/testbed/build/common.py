"""The common part of all stages of the builder: settings, the training loop, and the training pictures."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from g2rpo.testbed.grammar import corrupt, parse, render_prompt, sample_train_scene
from g2rpo.testbed.scenes import SIDE, Scene, draw, layout

Log = Callable[[str], None]
FAMILY = 4  # pictures in a row of the data that share a scene but for one edit


@dataclass(frozen=True)
class Context:
    """The output folder, seed, effort and log function of a build."""

    out: Path
    seed: int = 0
    quick: bool = False
    log: Log = print

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
        """A stage's own numpy generator; also seeds torch, so that a stage does not depend on those before it."""
        entropy = [self.seed, *stage.encode()]
        torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))
        return np.random.default_rng(entropy)


@dataclass(frozen=True)
class Dataset:
    """The training pictures [N, 64, 64, 3] uint8 and their scenes, in families of `FAMILY` that differ in one edit."""

    pictures: NDArray[np.uint8]
    scenes: list[Scene]

    def images(self, rows: NDArray[np.int64] | slice) -> Tensor:
        """Rows as float images [B, 3, 64, 64] in [0, 1]."""
        return to_images(self.pictures[rows])


def to_images(pictures: NDArray[np.uint8]) -> Tensor:
    """[B, H, W, 3] uint8 to [B, 3, H, W] float in [0, 1]."""
    return torch.from_numpy(np.array(pictures)).permute(0, 3, 1, 2).float() / 255


def build_dataset(ctx: Context) -> Dataset:
    """Draws the training pictures, or reads back the ones an earlier run drew."""
    pictures_file, prompts_file = ctx.work / "pictures.npy", ctx.work / "prompts.json"
    if prompts_file.exists():
        scenes = [parse(prompt) for prompt in json.loads(prompts_file.read_text(encoding="utf-8"))]
        return Dataset(np.load(pictures_file, mmap_mode="r"), scenes)
    dataset = draw_dataset(ctx.rng("world"), ctx.scaled(100_000, 256))
    ctx.work.mkdir(parents=True, exist_ok=True)
    np.save(pictures_file, dataset.pictures)
    prompts_file.write_text(json.dumps([render_prompt(scene) for scene in dataset.scenes]), encoding="utf-8")
    return dataset


def draw_dataset(rng: np.random.Generator, count: int, *, neat: bool = False) -> Dataset:
    """`count` pictures and their scenes, family by family; none is held out."""
    scenes: list[Scene] = []
    pictures = np.empty((count, SIDE, SIDE, 3), np.uint8)
    while len(scenes) < count:
        base = sample_train_scene(rng)
        for scene in (base, *(corrupt(base, rng) for _ in range(FAMILY - 1))):
            pictures[len(scenes)] = draw(layout(scene, rng, neat=neat), rng)
            scenes.append(scene)
    return Dataset(pictures, scenes)


def fast_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware; elsewhere autocast would only slow training down."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())


def compiled(ctx: Context, model: nn.Module) -> Callable[..., Any]:
    """The model's forward for training: compiled, which saves a third of the time where a C++ compiler is at hand."""
    return model if ctx.quick or shutil.which("g++") is None else torch.compile(model)


def new_optimizers(model: nn.Module, lr: float, matrix_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside transformer blocks, AdamW for all else: embeddings, modulations, convolutions, gains."""
    inner: list[nn.Parameter] = []
    outer: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        matrix = p.ndim == 2 and ("block" in name or "layers" in name)
        (inner if matrix and ".norm" not in name and "relative" not in name else outer).append(p)
    adam = torch.optim.AdamW(outer, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    return [adam, torch.optim.Muon(inner, lr=matrix_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")] if inner else [adam]


def fit(
    ctx: Context,
    name: str,
    model: nn.Module,
    loss: Callable[[], Tensor],
    *,
    steps: int,
    lr: float,
    matrix_lr: float | None = None,
    ema: float,
    bf16: bool = False,
    snapshot: Callable[[int], None] | None = None,
) -> None:
    """Minimizes `loss()` over the model's weights, with warm-up and cosine, and ends on their moving average.

    `bf16` asks for autocast where that is fast; `snapshot(step)` is called regularly with the averaged weights.
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
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16 and fast_bf16()):
            value = loss()
        model.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        # A faster decay at first, because the weights are still untrained.
        torch._foreach_lerp_(average, [p.detach() for p in params], 1 - min(ema, step / (step + 10)))
        total += value.item()
        if step % every == 0:
            rate = (time.perf_counter() - start) / step
            ctx.log(f"{name} {step}/{steps} loss {total / every:.4f} ({rate:.2f} s/step)")
            total = 0.0
            if snapshot is not None:
                live = [p.detach().clone() for p in params]
                _assign(params, average)
                snapshot(step)
                _assign(params, live)
                model.train()
    _assign(params, average)
    model.eval()


@torch.no_grad()
def _assign(params: list[nn.Parameter], values: list[Tensor]) -> None:
    for param, value in zip(params, values, strict=True):
        param.copy_(value)


def save_half(model: Any, folder: Path) -> None:
    """Writes a diffusers or transformers model as float16 safetensors, and leaves the model itself in float32."""
    model.half().save_pretrained(folder, safe_serialization=True)
    model.float()
