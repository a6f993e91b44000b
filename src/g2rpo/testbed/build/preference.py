"""Stage 3: the preference model, the tiny CLIP fine-tuned on pairs of pictures for a prompt, ordered by quality."""

from __future__ import annotations

import copy

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPModel

from g2rpo.testbed.build.augment import harsh, mild
from g2rpo.testbed.build.clip import contrastive_loss
from g2rpo.testbed.build.common import FAMILY, Context, Dataset, fit, save_half
from g2rpo.testbed.build.text import tokenizer
from g2rpo.testbed.build.vae import decode, encode
from g2rpo.testbed.grammar import render_prompt
from g2rpo.testbed.rewards import ScenePreference, image_features, text_features
from g2rpo.testbed.scenes import Scene

BATCH = 64  # prompts; each brings four pictures
# The pictures of a prompt, and which is preferred to which: (better, worse).
RIGHT, RIGHT_UGLY, WRONG, WRONG_UGLY = range(4)
ORDER = ((RIGHT, RIGHT_UGLY), (RIGHT, WRONG), (RIGHT, WRONG_UGLY), (RIGHT_UGLY, WRONG_UGLY), (WRONG, WRONG_UGLY))


def build_preference(ctx: Context, dataset: Dataset, vae: AutoencoderKL, clip: CLIPModel) -> CLIPModel:
    """Fine-tunes a copy of CLIP on ordered pictures: right before wrong, clean before ugly."""
    folder = ctx.out / ScenePreference.folder
    if (folder / "config.json").exists():
        return CLIPModel.from_pretrained(folder, dtype=torch.float32).eval()
    rng = ctx.rng("preference")
    model = copy.deepcopy(clip)
    generated = generated_like(ctx, dataset, vae)

    def loss() -> Tensor:
        pictures, scenes = ballot(dataset, rng, generated)
        scores = cosines(model, pictures, scenes) * ScenePreference.scale
        taste = torch.stack([-F.logsigmoid(scores[:, a] - scores[:, b]).mean() for a, b in ORDER]).mean()
        return taste + contrastive_loss(model, pictures[:, RIGHT], scenes)  # the CLIP loss, so that it stays a CLIP

    fit(ctx, "preference", model, loss, steps=ctx.scaled(600, 4), lr=1e-3, ema=0.99)
    save_half(model, folder)
    tokenizer().save_pretrained(folder)
    return model


def cosines(model: CLIPModel, pictures: Tensor, scenes: list[Scene]) -> Tensor:
    """Cosines [B, 4] of pictures [B, 4, 3, 64, 64] and their scenes' prompts."""
    images = image_features(model, pictures.flatten(0, 1)).unflatten(0, pictures.shape[:2])
    texts = text_features(model, tokenizer(), [render_prompt(scene) for scene in scenes])
    return (images * texts[:, None]).sum(-1).float()


def generated_like(ctx: Context, dataset: Dataset, vae: AutoencoderKL) -> tuple[Tensor, Tensor]:
    """The first families as a good and as a poor generator would draw them: decoded latents, clean and noisy."""
    count = min(ctx.scaled(4096, 32), len(dataset.scenes))
    latents = encode(vae, dataset, count)
    amount = 0.25 + 0.5 * torch.rand(count, 1, 1, 1)
    noisy = latents * (1 - 0.3 * amount) + amount * torch.randn_like(latents)
    clean, poor = (torch.cat([decode(vae, part) for part in z.split(256)]) for z in (latents, noisy))
    return clean, poor


def ballot(dataset: Dataset, rng: np.random.Generator, generated: tuple[Tensor, Tensor]) -> tuple[Tensor, list[Scene]]:
    """Pictures [BATCH, 4, 3, 64, 64] to be ordered, and the scenes asked for. Half of them passed through the autoencoder."""
    clean, noisy = generated
    pick = np.concatenate(
        [
            rng.integers(len(clean) // FAMILY, size=BATCH // 2),
            rng.integers(len(dataset.scenes) // FAMILY, size=BATCH - BATCH // 2),
        ]
    )
    rows = pick * FAMILY + rng.integers(FAMILY, size=BATCH)
    other = np.array([_relative(dataset, rng, row) for row in rows])
    decoded = torch.arange(BATCH)[:, None, None, None] < BATCH // 2
    poor = decoded & (torch.rand(BATCH, 1, 1, 1) < 0.6)
    pictures = []
    for chosen in (rows, other):
        inside = torch.from_numpy(chosen % len(clean))
        good = torch.where(decoded, clean[inside], dataset.images(chosen))
        pictures += [mild(good), torch.where(poor, noisy[inside], harsh(good))]
    return torch.stack(pictures, 1), [dataset.scenes[i] for i in rows]


def _relative(dataset: Dataset, rng: np.random.Generator, row: int) -> int:
    """Another picture of the row's family, of a scene that differs in an attribute or two."""
    head = row - row % FAMILY
    return int(rng.choice([i for i in range(head, head + FAMILY) if dataset.scenes[i] != dataset.scenes[row]]))


@torch.no_grad()
def pair_accuracy(
    model: CLIPModel, dataset: Dataset, rng: np.random.Generator, generated: tuple[Tensor, Tensor], rounds: int
) -> dict[str, float]:
    """The share of pairs in which the better picture scores higher, by kind of pair."""
    wins: dict[str, list[Tensor]] = {"clean over ugly": [], "right over wrong": []}
    for _ in range(rounds):
        scores = cosines(model, *ballot(dataset, rng, generated))
        wins["clean over ugly"].append((scores[:, RIGHT] > scores[:, RIGHT_UGLY]).float().mean())
        wins["right over wrong"].append((scores[:, RIGHT] > scores[:, WRONG]).float().mean())
    return {name: torch.stack(values).mean().item() for name, values in wins.items()}
