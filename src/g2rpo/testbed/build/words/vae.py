"""Stage 1: the autoencoder, 96x32 pictures of words <-> 16 x 8 x 24 latents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from g2rpo.testbed.build.common import Context, fit, save_half, to_images
from g2rpo.testbed.build.vae import KL_WEIGHT, reconstruction_loss
from g2rpo.testbed.words.drawing import WIDTH, draw
from g2rpo.testbed.words.language import Word, random_word

BATCH = 16
LATENT = (16, 8, 24)
CHUNK = 256


def new_vae() -> AutoencoderKL:
    """An untrained autoencoder; a quarter of the side, so that a token of FLUX is 8x8 pixels, half a letter."""
    return AutoencoderKL(
        block_out_channels=(8, 16, 32),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=LATENT[0],
        norm_num_groups=4,
        sample_size=WIDTH,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def build_vae(ctx: Context) -> AutoencoderKL:
    """Trains the autoencoder, sets its scaling and shift so that latents are about unit normal, and saves it."""
    folder = ctx.pipeline / "vae"
    if (folder / "config.json").exists():
        return AutoencoderKL.from_pretrained(folder, torch_dtype=torch.float32).eval()
    rng = ctx.rng("words vae")
    vae = new_vae()

    def loss() -> Tensor:
        images = pictures([random_word(rng) for _ in range(BATCH)]) * 2 - 1
        posterior = vae.encode(images).latent_dist
        decoded = vae.decode(posterior.sample()).sample.float()
        return reconstruction_loss(decoded, images) + KL_WEIGHT * posterior.kl().mean() / np.prod(LATENT)

    fit(ctx, "vae", vae, loss, steps=ctx.scaled(1000, 4), lr=3e-3, ema=0.99)
    latents = encode(vae, [random_word(rng) for _ in range(ctx.scaled(2048, 16))])
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())
    save_half(vae, folder)
    return vae


def pictures(words: Sequence[Word]) -> Tensor:
    """Clean drawings [B, 3, 32, 96] in [0, 1]."""
    return to_images(np.stack([draw(word) for word in words]))


@torch.no_grad()
def encode(vae: AutoencoderKL, words: Sequence[Word]) -> Tensor:
    """Latents [B, 16, 8, 24] of clean drawings: the posterior's mean, scaled and shifted."""
    chunks = [words[i : i + CHUNK] for i in range(0, len(words), CHUNK)]
    modes = torch.cat([vae.encode(pictures(chunk) * 2 - 1).latent_dist.mode() for chunk in chunks])
    return (modes - vae.config.shift_factor) * vae.config.scaling_factor
