"""The builder's own figures: how well the autoencoder and the base do their work on held-out words."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, FluxPipeline

from g2rpo.testbed.build.common import Context
from g2rpo.testbed.build.vae import decode
from g2rpo.testbed.build.words.flux import sample
from g2rpo.testbed.build.words.vae import encode, pictures
from g2rpo.testbed.words.judges import WordColour, WordDrawing, WordLetters, WordPaper
from g2rpo.testbed.words.language import parse, prompts

CARD = """# The weights of the task words

A tiny FLUX pipeline for 96x32 pictures of one word, trained from nothing on drawings by the package itself, with

    g2rpo testbed build --task words --out DIR

Every fifth letter of the captions in pretraining was wrong, so the base misspells by chance. Held-out words were in no caption
and no picture. Letters are read here by the nearest clean letter; what RapidOCR and Tesseract read, with and without training,
is in the README's table (`python -m benchmarks.quickstart`).

The weights that ship were made by these stages while the builder was being written (FLUX began from another initialization);
the command repeats the recipe, not these bits.

| figure | value |
|---|---|
"""


def measure(ctx: Context, vae: AutoencoderKL, pipe: FluxPipeline) -> dict[str, float]:
    """All figures, on held-out words."""
    texts = prompts("heldout")[: ctx.scaled(192, 8)]
    words = [word for text in texts if (word := parse(text)) is not None]
    decoded, drawn = decode(vae, encode(vae, words)), pictures(words)
    figures = {
        "VAE reconstruction PSNR (dB)": -10 * torch.log10((decoded - drawn).pow(2).mean((1, 2, 3))).mean().item(),
        "right letters, VAE reconstructions": WordLetters()(decoded, texts).mean().item(),
    }
    images = sample(pipe, texts)
    letters = WordLetters()(images, texts)
    figures["right letters, base"] = letters.mean().item()
    figures["right words, base"] = (letters == 1).float().mean().item()
    figures["right colours, base"] = WordColour()(images, texts).mean().item()
    figures["clean paper, base"] = WordPaper()(images, texts).mean().item()
    figures["drawing, base (dB)"] = WordDrawing()(images, texts).mean().item()
    for name, value in figures.items():
        ctx.log(f"{name}: {value:.4g}")
    return figures
