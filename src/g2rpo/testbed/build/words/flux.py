"""Stage 3: the tiny FLUX learns, by flow matching, first to write, then two letters wrongly.

In the first phases every fifth letter of a caption is wrong, as captions of the web do not always say what is to be seen.
In the last one captions are right, but 3 in 4 of the letters a and e are drawn as r and n. The base therefore writes cleanly
and in the right colour, and its most likely drawing of these letters is wrong: neither a smaller first noise nor more steps
mend that, as they do where errors are spread over many letters (`python -m benchmarks.quickstart`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from torch import Tensor

from g2rpo.testbed.build.common import Context, fit
from g2rpo.testbed.build.flux import flow_loss, load_pipeline, pipeline_of, save_pipeline
from g2rpo.testbed.build.words.reading import MAX_TOKENS, POOLED_WIDTH, WIDTH, Readers, tokenize, tokenizer
from g2rpo.testbed.build.words.vae import LATENT, encode
from g2rpo.testbed.words import drawing
from g2rpo.testbed.words.judges import WordLetters
from g2rpo.testbed.words.language import confused, misspelt, prompts, random_word

BATCH = 64
GRID = LATENT[1] // 2, LATENT[2] // 2  # tokens


@dataclass(frozen=True)
class Phase:
    """A stretch of pretraining with its own warm-up and decay."""

    name: str
    pictures: int
    steps: int
    lr: float  # of matrices inside blocks four times as much
    wrong_letters: float = 0.0  # share of a caption's letters that are replaced by any other
    twins: float = 0.0  # share of the letters with a twin that are drawn as their twin


PHASES = (
    Phase("words flux", 24_576, 600, 2e-3, wrong_letters=0.2),
    Phase("words flux 2", 12_288, 700, 2e-3, wrong_letters=0.2),
    Phase("words flux 3", 12_288, 240, 1e-3, twins=0.75),
)


def new_transformer() -> FluxTransformer2DModel:
    """An untrained FLUX of one double and three single blocks, without guidance."""
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * LATENT[0],
        num_layers=1,
        num_single_layers=3,
        attention_head_dim=32,
        num_attention_heads=WIDTH // 32,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=POOLED_WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )


def new_pipeline(ctx: Context, vae: AutoencoderKL, readers: Readers) -> FluxPipeline:
    """The pipeline around an autoencoder and text encoders, with an untrained transformer."""
    ctx.rng("words transformer")
    return pipeline_of(vae, readers, tokenizer, new_transformer())


def build_flux(ctx: Context, vae: AutoencoderKL, readers: Readers) -> FluxPipeline:
    """Trains the transformer and saves the whole pipeline."""
    if (ctx.pipeline / "model_index.json").exists():
        return load_pipeline(ctx.pipeline)
    pipe = new_pipeline(ctx, vae, readers)
    for phase in PHASES:
        folder = ctx.work / phase.name
        if not (folder / "model_index.json").exists():
            learn(ctx, phase, pipe, vae)
            save_pipeline(pipe, folder)
        pipe = load_pipeline(folder)  # as rounded, so that an interrupted build continues as one that was not
    save_pipeline(pipe, ctx.pipeline)
    return pipe


def learn(ctx: Context, phase: Phase, pipe: FluxPipeline, vae: AutoencoderKL) -> None:
    """One phase of pretraining, on pictures of its own."""
    rng = ctx.rng(phase.name)
    words = [random_word(rng) for _ in range(ctx.scaled(phase.pictures, 128))]
    latents = encode(vae, [confused(word, phase.twins, rng) for word in words])
    latents = FluxPipeline._pack_latents(latents, len(latents), *LATENT)
    t5, clip = pipe.text_encoder_2.requires_grad_(False), pipe.text_encoder.requires_grad_(False)

    def loss() -> Tensor:
        rows = rng.integers(len(words), size=BATCH)
        tokens = tokenize([misspelt(words[i], phase.wrong_letters, rng) for i in rows])
        texts, pooled = t5(tokens)[0], clip(tokens).pooler_output
        return flow_loss(pipe.transformer, latents[rows], texts, pooled, grid=GRID)

    def snapshot(step: int) -> None:
        texts = prompts("heldout")[: ctx.scaled(48, 4)]
        letters = WordLetters()(sample(pipe, texts), texts)
        ctx.log(f"{phase.name} {step} letters {letters.mean():.2f}, words {(letters == 1).float().mean():.2f}")

    steps = ctx.scaled(phase.steps, 4)
    fit(ctx, phase.name, pipe.transformer, loss, steps=steps, lr=phase.lr, matrix_lr=4 * phase.lr, ema=0.98, snapshot=snapshot)


def sample(pipe: FluxPipeline, texts: Sequence[str], *, seed: int = 0, steps: int = 10) -> Tensor:
    """Images [B, 3, 32, 96] in [0, 1] of prompts, in 10 steps."""
    images = pipe(
        list(texts),
        height=drawing.HEIGHT,
        width=drawing.WIDTH,
        num_inference_steps=steps,
        max_sequence_length=MAX_TOKENS,
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
    ).images
    return images.float()
