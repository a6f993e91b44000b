"""Stage 2: a tiny CLIP, trained contrastively on drawings and their prompts. Its text tower also serves the pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPModel

from g2rpo.testbed.build.augment import mild
from g2rpo.testbed.build.common import FAMILY, Context, Dataset, fit, save_half
from g2rpo.testbed.build.text import END, MAX_TOKENS, PAD, VOCABULARY, tokenizer
from g2rpo.testbed.grammar import render_prompt, turned_round
from g2rpo.testbed.rewards import SceneCLIP, image_features, text_features
from g2rpo.testbed.scenes import SIDE, Scene

WIDTH = 96
BATCH = 128


def new_clip() -> CLIPModel:
    """An untrained CLIPModel: 8x8 patches, three image layers and two text layers."""
    tower = {"hidden_size": WIDTH, "num_attention_heads": 4, "projection_dim": 64}
    return CLIPModel(
        CLIPConfig(
            text_config={
                **tower,
                "vocab_size": len(VOCABULARY),
                "intermediate_size": 2 * WIDTH,
                "num_hidden_layers": 2,
                "max_position_embeddings": MAX_TOKENS,
                "pad_token_id": PAD,
                "bos_token_id": PAD,
                "eos_token_id": END,
            },
            vision_config={
                **tower,
                "intermediate_size": 2 * WIDTH,
                "num_hidden_layers": 3,
                "image_size": SIDE,
                "patch_size": 8,
            },
            projection_dim=64,
        )
    )


def build_clip(ctx: Context, dataset: Dataset) -> CLIPModel:
    """Trains CLIP on whole families of scenes, so that every batch has captions that differ in one word only."""
    folder = ctx.out / SceneCLIP.folder
    if (folder / "config.json").exists():
        return CLIPModel.from_pretrained(folder, dtype=torch.float32).eval()
    rng = ctx.rng("clip")
    clip = new_clip()

    def loss() -> Tensor:
        heads = rng.integers(len(dataset.scenes) // FAMILY, size=BATCH // FAMILY) * FAMILY
        rows = (heads[:, None] + np.arange(FAMILY)).ravel()
        return contrastive_loss(clip, mild(dataset.images(rows)), [dataset.scenes[i] for i in rows])

    fit(ctx, "clip", clip, loss, steps=ctx.scaled(2400, 4), lr=2e-3, matrix_lr=8e-3, ema=0.995)
    save_half(clip, folder)
    tokenizer().save_pretrained(folder)
    return clip


def contrastive_loss(clip: CLIPModel, images: Tensor, scenes: Sequence[Scene]) -> Tensor:
    """CLIP's loss on images [B, 3, 64, 64] of scenes; rows that share a prompt are not each other's negatives.

    Each image also tells its prompt from a foil with the same words in another order: the relation turned round.
    It is meant to keep the CLIP from reading prompts as bags of words; at this size it has not been seen to (LOG.md).
    """
    prompts = [render_prompt(scene) for scene in scenes]
    foils = [render_prompt(turned_round(scene)) for scene in scenes if scene.relation is not None]
    texts = text_features(clip, tokenizer(), prompts + foils)
    known = np.asarray(prompts)
    own = torch.eye(len(prompts), len(texts), dtype=torch.bool)
    twin = torch.from_numpy(np.asarray(prompts + foils) == known[:, None]) & ~own
    logits = image_features(clip, images) @ texts.T * clip.logit_scale.exp().clamp(max=100)
    logits = logits.float().masked_fill(twin, -torch.inf)
    target = torch.arange(len(prompts))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits[:, : len(prompts)].T, target)) / 2


@torch.no_grad()
def retrieval(clip: CLIPModel, images: Tensor, prompts: Sequence[str]) -> float:
    """The share of images whose nearest prompt, of all given, is their own."""
    texts = text_features(clip, tokenizer(), prompts)
    nearest = (image_features(clip, images) @ texts.T).argmax(1).tolist()
    return sum(prompts[n] == p for n, p in zip(nearest, prompts, strict=True)) / len(prompts)
