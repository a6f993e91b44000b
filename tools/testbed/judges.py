"""The learned rewards of scenes: a tiny CLIP, trained contrastively on drawings and their prompts,
and a preference model, that CLIP fine-tuned on pairs of pictures for a prompt, ordered by
quality."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast

from g2rpo.data.testbed.rewards import SceneCLIP, ScenePreference, image_features, text_features
from g2rpo.data.testbed.scenes import SIDE, Scene, render_prompt
from tools.testbed.augment import harsh, mild
from tools.testbed.drawings import FAMILY, Dataset, turned_round
from tools.testbed.pipeline import decode, encode
from tools.testbed.training import Context, fit, save_half

WIDTH = 96
BATCH = 128
PROMPTS = 64  # in a batch of ordered pictures; each brings four of them
# The pictures of a prompt, and which is preferred to which: (better, worse).
RIGHT, RIGHT_UGLY, WRONG, WRONG_UGLY = range(4)
ORDER = (
    (RIGHT, RIGHT_UGLY),
    (RIGHT, WRONG),
    (RIGHT, WRONG_UGLY),
    (RIGHT_UGLY, WRONG_UGLY),
    (WRONG, WRONG_UGLY),
)


def new_clip(tokenizer: PreTrainedTokenizerFast) -> CLIPModel:
    """An untrained CLIPModel: 8x8 patches, three image layers and two text layers."""
    tower = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_attention_heads": 4,
        "projection_dim": 64,
    }
    return CLIPModel(
        CLIPConfig(
            text_config={
                **tower,
                "vocab_size": len(tokenizer),
                "num_hidden_layers": 2,
                "max_position_embeddings": tokenizer.model_max_length,
                "pad_token_id": tokenizer.pad_token_id,
                "bos_token_id": tokenizer.pad_token_id,
                "eos_token_id": tokenizer.eos_token_id,
            },
            vision_config={**tower, "num_hidden_layers": 3, "image_size": SIDE, "patch_size": 8},
            projection_dim=64,
        )
    )


def build_clip(ctx: Context, dataset: Dataset, tokenizer: PreTrainedTokenizerFast) -> CLIPModel:
    """Trains CLIP on whole families of scenes, so that every batch has captions that differ in one
    word only."""
    folder = ctx.out / SceneCLIP.folder
    if (folder / "config.json").exists():
        return CLIPModel.from_pretrained(folder, dtype=torch.float32).eval()
    rng = ctx.rng("clip")
    clip = new_clip(tokenizer)

    def loss() -> Tensor:
        heads = rng.integers(len(dataset.scenes) // FAMILY, size=BATCH // FAMILY) * FAMILY
        rows = (heads[:, None] + np.arange(FAMILY)).ravel()
        return contrastive_loss(
            clip, tokenizer, mild(dataset.images(rows)), [dataset.scenes[i] for i in rows]
        )

    fit("clip", clip, loss, steps=ctx.scaled(2400, 4), lr=2e-3, matrix_lr=8e-3, ema=0.995)
    save_half(clip, folder)
    tokenizer.save_pretrained(folder)
    return clip


def build_preference(
    ctx: Context,
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerFast,
    vae: AutoencoderKL,
    clip: CLIPModel,
) -> CLIPModel:
    """Fine-tunes a copy of CLIP on ordered pictures: right before wrong, clean before ugly."""
    folder = ctx.out / ScenePreference.folder
    if (folder / "config.json").exists():
        return CLIPModel.from_pretrained(folder, dtype=torch.float32).eval()
    rng = ctx.rng("preference")
    model = copy.deepcopy(clip)
    generated = generated_like(ctx, dataset, vae)

    def loss() -> Tensor:
        pictures, scenes = ballot(dataset, rng, generated)
        scores = cosines(model, tokenizer, pictures, scenes) * ScenePreference.scale
        taste = torch.stack(
            [-F.logsigmoid(scores[:, a] - scores[:, b]).mean() for a, b in ORDER]
        ).mean()
        # so that it stays a CLIP
        return taste + contrastive_loss(model, tokenizer, pictures[:, RIGHT], scenes)

    fit("preference", model, loss, steps=ctx.scaled(600, 4), lr=1e-3, ema=0.99)
    save_half(model, folder)
    tokenizer.save_pretrained(folder)
    return model


def contrastive_loss(
    clip: CLIPModel, tokenizer: PreTrainedTokenizerFast, images: Tensor, scenes: Sequence[Scene]
) -> Tensor:
    """CLIP's loss on images [B, 3, 64, 64] of scenes; rows that share a prompt are not each other's
    negatives.

    Each image also tells its prompt from a foil with the same words in another order: the relation
    turned round. It is meant to keep the CLIP from reading prompts as bags of words; at this size
    it has not been seen to (studies/LOG.md).
    """
    prompts = [render_prompt(scene) for scene in scenes]
    foils = [render_prompt(turned_round(scene)) for scene in scenes if scene.relation is not None]
    texts = text_features(clip, tokenizer, prompts + foils)
    own = torch.eye(len(prompts), len(texts), dtype=torch.bool)
    twin = torch.from_numpy(np.asarray(prompts + foils) == np.asarray(prompts)[:, None]) & ~own
    logits = image_features(clip, images) @ texts.T * clip.logit_scale.exp().clamp(max=100)
    logits = logits.float().masked_fill(twin, -torch.inf)
    target = torch.arange(len(prompts))
    return (
        F.cross_entropy(logits, target) + F.cross_entropy(logits[:, : len(prompts)].T, target)
    ) / 2


def cosines(
    model: CLIPModel, tokenizer: PreTrainedTokenizerFast, pictures: Tensor, scenes: list[Scene]
) -> Tensor:
    """Cosines [B, 4] of pictures [B, 4, 3, 64, 64] and their scenes' prompts."""
    images = image_features(model, pictures.flatten(0, 1)).unflatten(0, pictures.shape[:2])
    texts = text_features(model, tokenizer, [render_prompt(scene) for scene in scenes])
    return (images * texts[:, None]).sum(-1).float()


def generated_like(ctx: Context, dataset: Dataset, vae: AutoencoderKL) -> tuple[Tensor, Tensor]:
    """The first families as a good and as a poor generator would draw them: decoded latents, clean
    and noisy."""
    latents = encode(vae, dataset.pictures[: ctx.scaled(4096, 32)])
    amount = 0.25 + 0.5 * torch.rand(len(latents), 1, 1, 1)
    noisy = latents * (1 - 0.3 * amount) + amount * torch.randn_like(latents)
    clean, poor = (
        torch.cat([decode(vae, part) for part in z.split(256)]) for z in (latents, noisy)
    )
    return clean, poor


def ballot(
    dataset: Dataset, rng: np.random.Generator, generated: tuple[Tensor, Tensor]
) -> tuple[Tensor, list[Scene]]:
    """Pictures [PROMPTS, 4, 3, 64, 64] to be ordered, and the scenes asked for. Half of them passed
    the autoencoder."""
    clean, noisy = generated
    half, families = PROMPTS // 2, (len(clean) // FAMILY, len(dataset.scenes) // FAMILY)
    pick = np.concatenate([rng.integers(count, size=half) for count in families])
    rows = pick * FAMILY + rng.integers(FAMILY, size=PROMPTS)
    other = np.array([_relative(dataset, rng, row) for row in rows])
    decoded = torch.arange(PROMPTS)[:, None, None, None] < half
    poor = decoded & (torch.rand(PROMPTS, 1, 1, 1) < 0.6)
    pictures = []
    for chosen in (rows, other):
        inside = torch.from_numpy(chosen % len(clean))
        good = torch.where(decoded, clean[inside], dataset.images(chosen))
        pictures += [mild(good), torch.where(poor, noisy[inside], harsh(good))]
    return torch.stack(pictures, 1), [dataset.scenes[i] for i in rows]


def _relative(dataset: Dataset, rng: np.random.Generator, row: int) -> int:
    """Another picture of the row's family, of a scene that differs in an attribute or two."""
    head = row - row % FAMILY
    return int(
        rng.choice(
            [i for i in range(head, head + FAMILY) if dataset.scenes[i] != dataset.scenes[row]]
        )
    )


@torch.no_grad()
def retrieval(
    clip: CLIPModel, tokenizer: PreTrainedTokenizerFast, images: Tensor, prompts: Sequence[str]
) -> float:
    """The share of images whose nearest prompt, of all given, is their own."""
    texts = text_features(clip, tokenizer, prompts)
    nearest = (image_features(clip, images) @ texts.T).argmax(1).tolist()
    return sum(prompts[n] == p for n, p in zip(nearest, prompts, strict=True)) / len(prompts)


@torch.no_grad()
def pair_accuracy(
    model: CLIPModel,
    tokenizer: PreTrainedTokenizerFast,
    dataset: Dataset,
    rng: np.random.Generator,
    generated: tuple[Tensor, Tensor],
    rounds: int,
) -> dict[str, float]:
    """The share of pairs in which the better picture scores higher, by kind of pair."""
    rows = torch.cat(
        [cosines(model, tokenizer, *ballot(dataset, rng, generated)) for _ in range(rounds)]
    )
    worse = {"clean over ugly": RIGHT_UGLY, "right over wrong": WRONG}
    return {
        name: (rows[:, RIGHT] > rows[:, other]).float().mean().item()
        for name, other in worse.items()
    }
