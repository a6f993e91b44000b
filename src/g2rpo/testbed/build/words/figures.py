"""The builder's own figures: how well the autoencoder and the base do their work on held-out words."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, FluxPipeline

from g2rpo.testbed.build.common import Context
from g2rpo.testbed.build.vae import decode
from g2rpo.testbed.build.words.flux import sample
from g2rpo.testbed.build.words.vae import encode, pictures
from g2rpo.testbed.words.judges import WordColour, WordDrawing, WordLetters, WordPaper, letters_of
from g2rpo.testbed.words.language import TWINS, parse, prompts

CARD = """# The weights of the task words

A tiny FLUX pipeline for 96x32 pictures of one word, trained from nothing on drawings by the package itself, with

    g2rpo testbed build --task words --out DIR

**The base was made to write two letters wrongly**: in the last stage of pretraining 3 in 4 of the letters a and e were drawn
as r and n, so that most of its pictures misspell, and so does its most likely picture. Held-out words were in no caption and no
picture. Letters are read here by the nearest clean letter; what RapidOCR and Tesseract read, with and without training, is in
docs/reproduction.md (`python -m benchmarks.quickstart`).

The weights that ship were made by these stages while the builder was being written (FLUX began from another initialization);
the command repeats the recipe, not these bits.

| figure | value |
|---|---|
"""


def share(values: list[bool]) -> float:
    """The share of true values; NaN of none."""
    return sum(values) / len(values) if values else float("nan")


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
    pairs = [
        (a, b)
        for image, word in zip(images, words, strict=True)
        for a, b in zip(word.letters, letters_of(image, word), strict=True)
    ]
    figures["right letters among a and e, base"] = share([a == b for a, b in pairs if a in TWINS])
    figures["r and n in the place of a and e, base"] = share([b == TWINS[a] for a, b in pairs if a in TWINS])
    figures["right letters among all others, base"] = share([a == b for a, b in pairs if a not in TWINS])
    figures["right words, base"] = (letters == 1).float().mean().item()
    figures["ink's closeness to the asked colour, base"] = WordColour()(images, texts).mean().item()
    figures["clean paper, base"] = WordPaper()(images, texts).mean().item()
    figures["drawing, base (dB)"] = WordDrawing()(images, texts).mean().item()
    for name, value in figures.items():
        ctx.log(f"{name}: {value:.4g}")
    return figures
