"""Builds a task's FLUX pipeline: autoencoder, text encoders, transformer. What the tasks differ in
is said by a `Task`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from numpy.typing import NDArray
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPModel, CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from tools.testbed.training import Context, fit, save_half, to_images

WIDTH, POOLED_WIDTH = 128, 64  # of T5 and of CLIP's text tower
CHANNELS = 16  # of latents
KL_WEIGHT = 3e-4  # smooth latents: the generator's small errors should decode to small errors
TIME_SHIFT = 2.0  # more weight on high noise, which determines the composition
READING_BATCH = 128
IGNORED = -100  # an answer that is not asked for

Batch = tuple[Tensor, Tensor, Tensor | None]
"""Packed latents [B, tokens, 64], the captions' tokens, and the guidance of a model that has
one."""


@dataclass(frozen=True)
class Autoencoder:
    """Its shape and training; each of the `widths` beyond the first halves the side of the
    picture."""

    widths: tuple[int, ...]
    batch: int
    steps: int
    lr: float
    ema: float


@dataclass(frozen=True)
class Phase:
    """A phase of the transformer's training with its own peak learning rates, which decay to
    zero."""

    steps: int
    lr: float
    matrix_lr: float
    batch: Callable[[], Batch]


class Task:
    """What is drawn, how prompts are read, and how large and how long the stages are."""

    stage: str
    """The beginning of the stages' names, which seed their random numbers."""
    height: int
    width: int
    autoencoder: Autoencoder
    distances: tuple[int, int]
    """T5's buckets of relative positions, and the greatest distance."""
    reading_steps: int
    of_token: Sequence[int]
    """The number of classes of each question that T5 answers of a token."""
    of_prompt: Sequence[int]
    """The same of CLIP, of each of the prompt's `parts`."""
    parts = 1
    layers: tuple[int, int]
    """Double and single blocks of the transformer."""
    guided: bool
    first_stage: str
    """Seeds the transformer's first weights."""
    flux_ema: float
    fast: bool
    """Whether autoencoder and transformer are trained in bfloat16, and the transformer compiled,
    where that is faster."""
    card: str
    """README.md of the weights, up to its table of figures."""

    def tokenizer(self) -> Any:
        """With the longest prompt as its `model_max_length`."""
        raise NotImplementedError

    def pictures(
        self, ctx: Context, rng: np.random.Generator, count: int | None = None
    ) -> NDArray[np.uint8]:
        """`count` random pictures [N, H, W, 3], by default as many as latents are normalized
        with."""
        raise NotImplementedError

    def questions(self, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [B, T] of random prompts, and answers as class indices: of tokens [B, T, ...], of
        prompts [B, parts, ...]."""
        raise NotImplementedError

    def stages(self, ctx: Context, vae: AutoencoderKL) -> dict[str, Callable[[], list[Phase]]]:
        """The transformer's stages by name. After each the pipeline is saved, as rounded to half
        precision."""
        raise NotImplementedError

    def progress(self, ctx: Context, pipe: FluxPipeline) -> str:
        """How well the pipeline draws, in a line."""
        raise NotImplementedError

    def rewards(self, ctx: Context, vae: AutoencoderKL) -> tuple[CLIPModel, ...]:
        """Builds the learned rewards, if the task has any."""
        return ()

    def measure(
        self, ctx: Context, vae: AutoencoderKL, pipe: FluxPipeline, *rewards: CLIPModel
    ) -> dict[str, float]:
        """All figures of the card, on held-out prompts; shares are in [0, 1]."""
        raise NotImplementedError

    @property
    def latent(self) -> tuple[int, int, int]:
        scale = 2 ** (len(self.autoencoder.widths) - 1)
        return CHANNELS, self.height // scale, self.width // scale

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """Tokens [N, T], padded."""
        tokenizer = self.tokenizer()
        limit = tokenizer.model_max_length
        return tokenizer(
            list(texts), padding="max_length", max_length=limit, return_tensors="pt"
        ).input_ids

    def sample(
        self, pipe: FluxPipeline, texts: Sequence[str], *, seed: int = 0, batch: int = 100
    ) -> Tensor:
        """Images [B, 3, H, W] in [0, 1] of prompts, with guidance 3.5, in 10 steps."""
        generator = torch.Generator().manual_seed(seed)
        parts = [
            pipe(
                list(texts[i : i + batch]),
                height=self.height,
                width=self.width,
                num_inference_steps=10,
                guidance_scale=3.5,
                max_sequence_length=pipe.tokenizer.model_max_length,
                generator=generator,
                output_type="pt",
            ).images
            for i in range(0, len(texts), batch)
        ]
        return torch.cat(parts).float()


LICENCE = "---\nlicense: apache-2.0\nlibrary_name: diffusers\n---\n\n"
"""What the hub reads of a card. The weights have seen nothing but the package's own drawings."""


def build(task: Task, out: Path, *, seed: int = 0, quick: bool = False) -> dict[str, float]:
    """Writes `pipeline/`, `figures.json`, `README.md` and what else the task has into `out`;
    returns the figures.

    `quick` takes a few steps of everything, to see that it runs.
    """
    ctx = Context(out, seed, quick)
    ctx.work.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        vae = build_vae(ctx, task)
        rewards = task.rewards(ctx, vae)
        pipe = build_flux(ctx, task, vae, build_readers(ctx, task))
        figures = task.measure(ctx, vae, pipe, *rewards)
    (out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    rows = "".join(f"| {name} | {value:.4g} |\n" for name, value in figures.items())
    (out / "README.md").write_text(
        f"{LICENCE}{task.card}\n| figure | value |\n|---|---|\n{rows}", encoding="utf-8"
    )
    print(rows)
    return figures


# 1. The autoencoder.


def build_vae(ctx: Context, task: Task) -> AutoencoderKL:
    """Trains the autoencoder, sets its scaling and shift so that latents are about unit normal, and
    saves it."""
    folder = ctx.pipeline / "vae"
    if (folder / "config.json").exists():
        return AutoencoderKL.from_pretrained(folder, torch_dtype=torch.float32).eval()
    rng = ctx.rng(f"{task.stage}vae")
    shape = task.autoencoder
    levels = len(shape.widths)
    vae = AutoencoderKL(
        # thin where the picture is large, so that decoding stays cheap
        block_out_channels=shape.widths,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        layers_per_block=1,
        latent_channels=CHANNELS,
        norm_num_groups=4,
        sample_size=task.width,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )

    def loss() -> Tensor:
        images = to_images(task.pictures(ctx, rng, shape.batch)) * 2 - 1
        posterior = vae.encode(images).latent_dist
        decoded = vae.decode(posterior.sample()).sample.float()
        error = decoded - images
        # what tells shapes apart
        edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
        reconstruction = F.l1_loss(decoded, images) + error.pow(2).mean() + 0.5 * edges
        return reconstruction + KL_WEIGHT * posterior.kl().mean() / np.prod(task.latent)

    fit(
        "vae",
        vae,
        loss,
        steps=ctx.scaled(shape.steps, 4),
        lr=shape.lr,
        ema=shape.ema,
        fast=task.fast,
    )
    latents = encode(vae, task.pictures(ctx, rng))
    vae.register_to_config(
        shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item()
    )
    save_half(vae, folder)
    return vae


@torch.no_grad()
def encode(vae: AutoencoderKL, pictures: NDArray[np.uint8], batch: int = 256) -> Tensor:
    """Latents [N, 16, h, w] of pictures [N, H, W, 3]: the posterior's mean, scaled and shifted."""
    parts = [
        vae.encode(to_images(pictures[i : i + batch]) * 2 - 1).latent_dist.mode()
        for i in range(0, len(pictures), batch)
    ]
    return (torch.cat(parts) - vae.config.shift_factor) * vae.config.scaling_factor


@torch.no_grad()
def decode(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """Images [B, 3, H, W] in [0, 1] of scaled latents."""
    pixels = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample
    return (pixels.float() / 2 + 0.5).clamp(0, 1)


def psnr(images: Tensor, targets: Tensor) -> float:
    """Mean over pictures of the peak signal-to-noise ratio, in dB."""
    return (-10 * torch.log10((images - targets).pow(2).mean((1, 2, 3)))).mean().item()


# 2. The text encoders, pretrained on text alone, as those of real pipelines are.


class Readers(nn.Module):
    """The two text encoders, and the heads that are asked what was read; the heads are thrown away
    afterwards."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        tokens = task.tokenizer()
        special = {
            "vocab_size": len(tokens),
            "pad_token_id": tokens.pad_token_id,
            "eos_token_id": tokens.eos_token_id,
        }
        buckets, farthest = task.distances
        self.t5 = T5EncoderModel(
            T5Config(
                **special,
                d_model=WIDTH,
                d_kv=32,
                num_heads=4,
                d_ff=2 * WIDTH,
                num_layers=2,
                relative_attention_num_buckets=buckets,
                relative_attention_max_distance=farthest,
                feed_forward_proj="relu",
                dropout_rate=0.0,
                is_encoder_decoder=False,
            )
        )
        self.clip = CLIPTextModel(
            CLIPTextConfig(
                **special,
                bos_token_id=tokens.pad_token_id,
                hidden_size=POOLED_WIDTH,
                intermediate_size=2 * POOLED_WIDTH,
                num_attention_heads=4,
                num_hidden_layers=2,
                max_position_embeddings=tokens.model_max_length,
            )
        )
        self.token_head = nn.Linear(WIDTH, sum(task.of_token))
        self.prompt_head = nn.Linear(POOLED_WIDTH, task.parts * sum(task.of_prompt))


def build_readers(ctx: Context, task: Task) -> Readers:
    """Trains both text encoders to answer `task.questions`."""
    file = ctx.work / "readers.safetensors"
    rng = ctx.rng(f"{task.stage}reading")
    readers = Readers(task)
    if file.exists():
        load_model(readers, file)
        return readers.eval()

    def loss() -> Tensor:
        tokens, of_tokens, of_prompts = task.questions(rng)
        told = readers.token_head(readers.t5(tokens)[0])
        gist = readers.prompt_head(readers.clip(tokens).pooler_output).unflatten(
            -1, (task.parts, -1)
        )
        return surprise(told, of_tokens, task.of_token) + surprise(gist, of_prompts, task.of_prompt)

    fit(
        "reading",
        readers,
        loss,
        steps=ctx.scaled(task.reading_steps, 4),
        lr=2e-3,
        matrix_lr=8e-3,
        ema=0.99,
    )
    save_model(readers, str(file))
    return readers


def surprise(told: Tensor, answers: Tensor, classes: Sequence[int]) -> Tensor:
    """Mean cross-entropy of logits [..., sum(classes)] for answers [..., len(classes)], without
    those that are `IGNORED`."""
    parts = told.float().split(list(classes), dim=-1)
    losses = [
        F.cross_entropy(p.flatten(0, -2), answers[..., i].flatten(), ignore_index=IGNORED)
        for i, p in enumerate(parts)
    ]
    return torch.stack(losses).mean()


# 3. The transformer.


def build_flux(ctx: Context, task: Task, vae: AutoencoderKL, readers: Readers) -> FluxPipeline:
    """Trains the transformer by flow matching, and saves the whole pipeline."""
    if (ctx.pipeline / "model_index.json").exists():
        return load_pipeline(ctx.pipeline)
    ctx.rng(task.first_stage)
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=False),
        vae=vae,
        text_encoder=readers.clip,
        tokenizer=task.tokenizer(),
        text_encoder_2=readers.t5,
        tokenizer_2=task.tokenizer(),
        transformer=FluxTransformer2DModel(
            patch_size=1,
            in_channels=4 * CHANNELS,
            num_layers=task.layers[0],
            num_single_layers=task.layers[1],
            attention_head_dim=32,
            num_attention_heads=WIDTH // 32,
            joint_attention_dim=WIDTH,
            pooled_projection_dim=POOLED_WIDTH,
            guidance_embeds=task.guided,
            axes_dims_rope=(8, 12, 12),
        ),
    )
    for name, phases in task.stages(ctx, vae).items():
        folder = ctx.work / name
        if not (folder / "model_index.json").exists():
            train_flux(ctx, task, name, pipe, phases())
            save_pipeline(pipe, folder)
        # as rounded, so that an interrupted build continues as one that was not
        pipe = load_pipeline(folder)
    save_pipeline(pipe, ctx.pipeline)
    return pipe


def train_flux(
    ctx: Context, task: Task, name: str, pipe: FluxPipeline, phases: Sequence[Phase]
) -> None:
    """One stage of the transformer's training."""
    transformer = pipe.transformer
    pipe.set_progress_bar_config(disable=True)
    # compiled, which saves a third of the time
    if task.fast and not ctx.quick and shutil.which("g++"):
        # diffusers hooks the transformer when first used; later, that would recompile it
        task.progress(ctx, pipe)
        transformer = torch.compile(transformer)

    def loss(batch: Callable[[], Batch]) -> Tensor:
        latents, tokens, guidance = batch()
        with torch.no_grad():
            texts, pooled = pipe.text_encoder_2(tokens)[0], pipe.text_encoder(tokens).pooler_output
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
            img_ids=FluxPipeline._prepare_latent_image_ids(
                1, task.latent[1] // 2, task.latent[2] // 2, torch.device("cpu"), torch.float32
            ),
            return_dict=False,
        )[0]
        return (velocity.float() - (noise - latents)).pow(2).mean()

    for phase in phases:
        fit(
            name,
            pipe.transformer,
            partial(loss, phase.batch),
            steps=ctx.scaled(phase.steps, 4),
            lr=phase.lr,
            matrix_lr=phase.matrix_lr,
            progress=partial(task.progress, ctx, pipe),
            ema=task.flux_ema,
            fast=task.fast,
        )


def pack(latents: Tensor) -> Tensor:
    """Latents [N, 16, h, w] as FLUX reads them: [N, h*w/4, 64]."""
    return FluxPipeline._pack_latents(latents, *latents.shape)


def save_pipeline(pipe: FluxPipeline, folder: Path) -> None:
    """Writes the pipeline as float16 safetensors, without the paths it was loaded from, and leaves
    it, rounded, in float32."""
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
