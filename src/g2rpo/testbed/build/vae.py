"""Stage 1: the autoencoder, 64x64 pictures <-> 16 x 8 x 8 latents."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL
from torch import Tensor
from torch.nn import functional as F

from g2rpo.testbed.build.common import Context, Dataset, fit, save_half
from g2rpo.testbed.scenes import SIDE

KL_WEIGHT = 3e-4  # smooth latents: the generator's small errors should decode to small errors
BATCH = 32


def new_vae() -> AutoencoderKL:
    """An untrained autoencoder, thin where the picture is large so that decoding stays cheap."""
    return AutoencoderKL(
        block_out_channels=(8, 16, 32, 64),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        sample_size=SIDE,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def build_vae(ctx: Context, dataset: Dataset) -> AutoencoderKL:
    """Trains the autoencoder, sets its scaling and shift so that latents are about unit normal, and saves it."""
    folder = ctx.pipeline / "vae"
    if (folder / "config.json").exists():
        return AutoencoderKL.from_pretrained(folder, torch_dtype=torch.float32).eval()
    rng = ctx.rng("vae")
    vae = new_vae()

    def loss() -> Tensor:
        images = dataset.images(rng.integers(len(dataset.scenes), size=BATCH)) * 2 - 1
        posterior = vae.encode(images).latent_dist
        decoded = vae.decode(posterior.sample()).sample.float()
        return reconstruction_loss(decoded, images) + KL_WEIGHT * posterior.kl().mean() / 1024

    fit(ctx, "vae", vae, loss, steps=ctx.scaled(4000, 4), lr=2e-3, ema=0.998, bf16=True)
    latents = encode(vae, dataset, min(4096, len(dataset.scenes)))
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())
    save_half(vae, folder)
    return vae


def reconstruction_loss(decoded: Tensor, images: Tensor) -> Tensor:
    """Absolute and squared error of the pixels, and of their differences (edges are what tells shapes apart)."""
    error = decoded - images
    edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    return F.l1_loss(decoded, images) + error.pow(2).mean() + 0.5 * edges


@torch.no_grad()
def encode(vae: AutoencoderKL, dataset: Dataset, count: int, batch: int = 256) -> Tensor:
    """Latents [count, 16, 8, 8] (the posterior's mean, scaled and shifted) of the world's first pictures."""
    parts = [
        vae.encode(dataset.images(slice(i, min(i + batch, count))) * 2 - 1).latent_dist.mode() for i in range(0, count, batch)
    ]
    return (torch.cat(parts) - vae.config.shift_factor) * vae.config.scaling_factor


@torch.no_grad()
def decode(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """Images [B, 3, 64, 64] in [0, 1] of scaled latents."""
    pixels = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample
    return (pixels.float() / 2 + 0.5).clamp(0, 1)
