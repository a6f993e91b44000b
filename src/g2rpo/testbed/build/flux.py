"""Stage 5: the tiny FLUX. The transformer learns, by flow matching, on captions that are not always right.

As with a model trained on the web, some captions are wrong, less often at higher guidance: half of them at guidance 1, hardly
any at guidance 5. What the base then gets wrong is content rather than drawing, and reinforcement learning has something
natural to sharpen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from g2rpo.testbed.build.common import Context, compiled, draw_dataset, fast_bf16, fit
from g2rpo.testbed.build.reading import POOLED_WIDTH, WIDTH, Readers
from g2rpo.testbed.build.text import MAX_TOKENS, tokenize, tokenizer
from g2rpo.testbed.build.vae import encode
from g2rpo.testbed.grammar import corrupt, prompts, render_prompt
from g2rpo.testbed.rewards import SceneAccuracy
from g2rpo.testbed.scenes import SIDE

GUIDANCE = (1.0, 5.0)
TIME_SHIFT = 2.0  # more weight on high noise, which determines the composition
BATCH = 128
WRONG_CAPTIONS = 2  # per picture; a single one would be memorised


@dataclass(frozen=True)
class Phase:
    """A phase of training with its own peak learning rates, which decay to zero."""

    steps: int
    lr: float
    matrix_lr: float
    wrong_captions: tuple[float, float]  # their share at either end of the guidance range


PHASES = (
    Phase(3000, 2e-3, 8e-3, (0.5, 0.05)),
    Phase(2000, 1.5e-3, 6e-3, (0.5, 0.02)),
    Phase(4500, 1.5e-3, 6e-3, (0.5, 0.0)),
)


def new_transformer() -> FluxTransformer2DModel:
    """An untrained FLUX of two double and four single blocks, 2.4 million parameters."""
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=WIDTH // 32,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=POOLED_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )


def pipeline_of(vae: AutoencoderKL, readers: Any, tokenizer: Callable[[], Any], transformer: Any) -> FluxPipeline:
    """The pipeline around an autoencoder, text encoders `readers.clip` and `readers.t5`, and a transformer."""
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=False),
        vae=vae,
        text_encoder=readers.clip,
        tokenizer=tokenizer(),
        text_encoder_2=readers.t5,
        tokenizer_2=tokenizer(),
        transformer=transformer,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def build_flux(ctx: Context, vae: AutoencoderKL, readers: Readers) -> FluxPipeline:
    """Trains the transformer and saves the whole pipeline."""
    if (ctx.pipeline / "model_index.json").exists():
        return load_pipeline(ctx.pipeline)
    latents, right, wrong = training_data(ctx, vae)
    ctx.rng("flux")
    pipe = pipeline_of(vae, readers, tokenizer, new_transformer())
    sample(pipe, ["a red circle"])  # diffusers hooks the transformer when first used; later, that would recompile it
    transformer = compiled(ctx, pipe.transformer)

    def loss(wrong_captions: tuple[float, float]) -> Tensor:
        rows = torch.randint(len(latents), (BATCH,))
        guidance = torch.empty(BATCH).uniform_(*GUIDANCE)
        is_wrong = torch.rand(BATCH) < wrong_share(guidance, wrong_captions)
        tokens = torch.where(is_wrong[:, None], wrong[rows, torch.randint(WRONG_CAPTIONS, (BATCH,))], right[rows])
        with torch.no_grad():
            texts, pooled = readers.t5(tokens)[0], readers.clip(tokens).pooler_output
        return flow_loss(transformer, latents[rows].float(), texts, pooled, guidance, grid=(SIDE // 16, SIDE // 16))

    def snapshot(step: int) -> None:
        scores = [accuracy(pipe, prompts(split)[:100]) for split in ("train", "heldout")]
        ctx.log(f"flux {step} accuracy: train {scores[0]:.2f}, held-out {scores[1]:.2f}")
        save_pipeline(pipe, ctx.work / "snapshot")

    for phase in PHASES:
        fit(
            ctx,
            "flux",
            pipe.transformer,
            partial(loss, phase.wrong_captions),
            steps=ctx.scaled(phase.steps, 4),
            lr=phase.lr,
            matrix_lr=phase.matrix_lr,
            ema=0.998,
            bf16=True,
            snapshot=snapshot,
        )
    save_pipeline(pipe, ctx.pipeline)
    return pipe


def wrong_share(guidance: Tensor, ends: tuple[float, float]) -> Tensor:
    """The share of wrong captions among pictures shown with this guidance: linear between the ends of its range."""
    (low, high), (at_low, at_high) = GUIDANCE, ends
    return at_low + (guidance - low) / (high - low) * (at_high - at_low)


def training_data(ctx: Context, vae: AutoencoderKL) -> tuple[Tensor, Tensor, Tensor]:
    """Neatly laid out pictures as packed latents [N, 16, 64] float16, their captions [N, 16], and wrong ones.

    The wrong captions [N, WRONG_CAPTIONS, 16] are wrong in one attribute.
    """
    file = ctx.work / "flux.safetensors"
    if not file.exists():
        rng = ctx.rng("flux data")
        dataset = draw_dataset(rng, ctx.scaled(128_000, 256), neat=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=fast_bf16()):
            latents = encode(vae, dataset, len(dataset.scenes)).half()
        packed = FluxPipeline._pack_latents(latents, len(latents), 16, SIDE // 8, SIDE // 8)
        right = tokenize([render_prompt(scene) for scene in dataset.scenes])
        foils = [render_prompt(corrupt(scene, rng)) for scene in dataset.scenes for _ in range(WRONG_CAPTIONS)]
        wrong = tokenize(foils).reshape(len(right), WRONG_CAPTIONS, -1)
        save_file({"latents": packed.contiguous(), "right": right, "wrong": wrong}, file)
    data = load_file(file)
    return data["latents"], data["right"], data["wrong"]


def flow_loss(
    transformer: Callable[..., Any],
    latents: Tensor,
    texts: Tensor,
    pooled: Tensor,
    guidance: Tensor | None = None,
    *,
    grid: tuple[int, int],
) -> Tensor:
    """The flow matching loss on packed latents [B, tokens of `grid`, 64]: the error of the predicted velocity."""
    noise = torch.randn_like(latents)
    odds = TIME_SHIFT * torch.randn(len(latents)).exp()
    sigma = odds / (1 + odds)
    at = sigma[:, None, None]
    velocity = transformer(
        hidden_states=(1 - at) * latents + at * noise,
        timestep=sigma,
        guidance=guidance,
        pooled_projections=pooled,
        encoder_hidden_states=texts,
        txt_ids=torch.zeros(texts.shape[1], 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(1, *grid, "cpu", torch.float32),
        return_dict=False,
    )[0]
    return (velocity.float() - (noise - latents)).pow(2).mean()


def sample(pipe: FluxPipeline, texts: Sequence[str], *, seed: int = 0, batch: int = 100) -> Tensor:
    """Images [B, 3, 64, 64] in [0, 1] of prompts, with the default settings: guidance 3.5, 10 steps."""
    generator = torch.Generator().manual_seed(seed)
    parts = [
        pipe(
            list(texts[i : i + batch]),
            height=SIDE,
            width=SIDE,
            num_inference_steps=10,
            guidance_scale=3.5,
            max_sequence_length=MAX_TOKENS,
            generator=generator,
            output_type="pt",
        ).images
        for i in range(0, len(texts), batch)
    ]
    return torch.cat(parts).float()


def accuracy(pipe: FluxPipeline, texts: Sequence[str]) -> float:
    """The share of pictures that show all that their prompt asks for, and nothing else."""
    return SceneAccuracy()(sample(pipe, texts), texts).mean().item()


def save_pipeline(pipe: FluxPipeline, folder: Path) -> None:
    """Writes the pipeline as float16 safetensors, without the paths it was loaded from, and leaves it in float32."""
    pipe.to(torch.float16).save_pretrained(folder, safe_serialization=True)
    pipe.to(torch.float32)
    for file in folder.rglob("*.json"):
        settings = json.loads(file.read_text(encoding="utf-8"))
        if settings.pop("_name_or_path", None) is not None:
            file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_pipeline(folder: Path) -> FluxPipeline:
    """The pipeline in float32, without progress bars."""
    pipe = FluxPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe
