"""The builder's own figures: the quality of each trained part on held-out pictures."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, FluxPipeline
from torch import Tensor
from transformers import CLIPModel

from g2rpo.testbed.build.augment import mild
from g2rpo.testbed.build.clip import retrieval
from g2rpo.testbed.build.common import FAMILY, Context, draw_dataset
from g2rpo.testbed.build.flux import accuracy
from g2rpo.testbed.build.preference import generated_like, pair_accuracy
from g2rpo.testbed.build.vae import decode, encode
from g2rpo.testbed.grammar import prompts, render_prompt
from g2rpo.testbed.rewards import SceneAccuracy

CARD = """# The testbed's weights

Weights of g2rpo's embedded world: a tiny FLUX pipeline, a tiny CLIP and a tiny preference model for 64x64 drawings of
simple scenes. All were trained from nothing, on pictures and prompts drawn by the package itself, with

    g2rpo testbed build --out DIR

The base model learned from captions of which a share is wrong, less so the higher the guidance: it draws cleanly, but
often not quite what was asked. That is what reinforcement learning is to mend.

The weights that ship were made by these stages one at a time, while the builder was being written, with slightly other
settings (LOG.md says which); the command repeats the recipe, not these bits.

| figure | value |
|---|---|
"""


def measure(ctx: Context, vae: AutoencoderKL, clip: CLIPModel, preference: CLIPModel, pipe: FluxPipeline) -> dict[str, float]:
    """All figures, on freshly drawn pictures; accuracies are shares in [0, 1]."""
    rng = ctx.rng("figures")
    fresh = draw_dataset(rng, ctx.scaled(4000, 64))
    rows = ctx.scaled(1000, 64)
    texts = [render_prompt(scene) for scene in fresh.scenes]
    drawn = fresh.images(slice(None))
    decoded = decode(vae, encode(vae, fresh, rows))
    single = slice(0, FAMILY * 256, FAMILY)  # one picture of each family
    figures = {
        "detector accuracy on drawings": _mean_accuracy(drawn, texts),
        "detector accuracy on VAE reconstructions": _mean_accuracy(decoded, texts[:rows]),
        "VAE reconstruction PSNR (dB)": _psnr(decoded, drawn[:rows]),
        "CLIP retrieval of the prompt among 256": retrieval(clip, mild(drawn[single]), texts[single]),
        "CLIP retrieval of the prompt among 4 that differ in a word or two": _family_retrieval(clip, drawn, texts, rows),
    }
    generated = generated_like(ctx, fresh, vae)
    for name, share in pair_accuracy(preference, fresh, rng, generated, ctx.scaled(16, 1)).items():
        figures[f"preference pairs, {name}"] = share
    for split in ("train", "heldout"):
        figures[f"base accuracy, {split} prompts"] = accuracy(pipe, prompts(split)[: ctx.scaled(400, 8)])
    for name, value in figures.items():
        ctx.log(f"{name}: {value:.4g}")
    return figures


def _mean_accuracy(images: Tensor, texts: list[str]) -> float:
    return SceneAccuracy()(images, texts).mean().item()


def _psnr(images: Tensor, targets: Tensor) -> float:
    """Mean over pictures of the peak signal-to-noise ratio."""
    return (-10 * torch.log10((images - targets).pow(2).mean((1, 2, 3)))).mean().item()


def _family_retrieval(clip: CLIPModel, images: Tensor, texts: list[str], rows: int) -> float:
    """The share of pictures whose nearest prompt of their family is their own."""
    families = range(0, rows, FAMILY)
    return sum(retrieval(clip, images[i : i + FAMILY], texts[i : i + FAMILY]) for i in families) / len(families)
