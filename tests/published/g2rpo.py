"""One training step of G2RPO as published (arXiv 2510.01982 and its code), restated from formulas,
one latent at a time.

Nothing of this package is used, and no line is the published code's. With a bfloat16 `dtype` the
network runs under autocast over float32 weights and answers in bfloat16, and torch itself rounds
the products below, because sigmas have no dimension: an expression here has its factors in the
order of the published one.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor

from tests.published.neighbours import flow_sde


@dataclass(frozen=True)
class Setting:
    """The published script's values; `dtype` is the network's and the VAE's, and groups are
    normalised in `advantage_dtype`."""

    steps: int = 16
    shift: float = 3.0
    eta: float = 0.7
    branches: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    strides: tuple[int, ...] = (1, 2)
    clip_range: float = 1e-4
    largest_advantage: float = 5.0
    guidance: float = 3.5
    learning_rate: float = 2e-6
    weight_decay: float = 1e-4
    largest_norm: float = 1.0
    dtype: torch.dtype = torch.bfloat16
    advantage_dtype: torch.dtype = torch.float32

    @property
    def sigmas(self):
        """sigma = s u / (1 + (s - 1) u) for u = 1, ..., 0."""
        u = torch.linspace(1, 0, self.steps + 1)
        return (self.shift * u) / (1 + (self.shift - 1) * u)


@dataclass(frozen=True)
class Text:
    """One prompt's embeddings: tokens [1, L, D] and pooled [1, D]."""

    tokens: Tensor
    pooled: Tensor


@dataclass(frozen=True)
class Branch:
    """What became of one branch step: where it was, where its members landed, their old log-probs,
    and their finals."""

    x: Tensor  # [1, tokens, channels]
    landed: list[Tensor]  # members of [1, tokens, channels]
    log_probs: list[Tensor]  # members of [1]
    finals: list[list[Tensor]]  # strides, members


@torch.no_grad()
def encode(pipeline, prompt):
    tokens, pooled, _ = pipeline.encode_prompt(
        prompt, prompt, max_sequence_length=pipeline.tokenizer_2.model_max_length
    )
    return Text(tokens, pooled)


def pack(latent):
    """[C, H, W] -> [1, H/2 * W/2, 4C]: a token is a square of 2x2."""
    c, h, w = latent.shape
    return (
        latent.reshape(c, h // 2, 2, w // 2, 2).permute(1, 3, 0, 2, 4).reshape(1, h * w // 4, 4 * c)
    )


def unpack(x, height):
    """The inverse of `pack`, [1, C, height, W]."""
    rows, columns, c = height // 2, 2 * x.shape[1] // height, x.shape[2] // 4
    return (
        x.reshape(1, rows, columns, c, 2, 2)
        .permute(0, 3, 1, 4, 2, 5)
        .reshape(1, c, height, 2 * columns)
    )


def velocity(model, x, sigma, text, height, setting):
    """The network sees floor(1000 sigma) / 1000, the step has sigma itself."""
    tokens = x.shape[1]
    places = torch.cartesian_prod(torch.arange(height // 2), torch.arange(2 * tokens // height))
    with torch.autocast("cpu", torch.bfloat16, enabled=setting.dtype == torch.bfloat16):
        return model(
            hidden_states=x,
            timestep=torch.tensor([int(sigma * 1000)]) / 1000,
            guidance=torch.tensor([setting.guidance], dtype=setting.dtype),
            encoder_hidden_states=text.tokens,
            pooled_projections=text.pooled,
            txt_ids=torch.zeros(text.tokens.shape[1], 3, dtype=setting.dtype),
            img_ids=torch.cat([torch.zeros(tokens, 1), places], 1).to(setting.dtype),
            return_dict=False,
        )[0]


def stochastic_step(x, v, setting, branch):
    """(mean, std) of one Euler-Maruyama step of dx = (v + g^2 / (2 sigma) (x + (1 - sigma) v))
    dsigma + g dw, g = eta sqrt(sigma / (1 - sigma)), where the first sigma, which is 1, has the
    second in the denominator."""
    return flow_sde(setting.eta)(x, v, setting.sigmas, branch)


def log_prob(landed, mean, std):
    """The mean over entries of the log density, [1]."""
    entries = (
        -((landed - mean) ** 2) / (2 * std**2) - torch.log(std) - math.log(math.sqrt(2 * math.pi))
    )
    return entries.mean(dim=(1, 2))


def walk(x, sigmas, ask):
    """Euler's ODE walk: after each step where it is, and the image predicted from where it was."""
    for here, there in pairwise(sigmas):
        v = ask(x, here)
        image, x = x - here * v, x + v * (there - here)
        yield x, image


@torch.no_grad()
def rollout(model, text, noise, draws, height, setting):
    """An anchor from `noise` [C, H, W]; at each branch a member for each row of `draws[branch]`
    [members, tokens, channels].

    A tail of stride g walks sigma_{k+1}, sigma_{k+2}, sigma_{k+2+g}, ...; its last sigma is never
    walked to: the image is predicted from the one before.
    """

    def ask(x, sigma):
        return velocity(model, x, sigma, text, height, setting)

    start = pack(noise).to(setting.dtype)
    stored = [start, *(x.to(setting.dtype) for x, _ in walk(start.float(), setting.sigmas, ask))]
    branches = []
    for branch, own in zip(setting.branches, draws, strict=True):
        x = stored[branch]
        landed, log_probs, finals = [], [], [[] for _ in setting.strides]
        for draw in own:
            mean, std = stochastic_step(x.float(), ask(x, setting.sigmas[branch]), setting, branch)
            y = mean + std * draw[None].to(setting.dtype)
            landed.append(y)
            log_probs.append(log_prob(y, mean, std))
            for stride, images in zip(setting.strides, finals, strict=True):
                *_, (_, image) = walk(
                    y,
                    torch.cat(
                        [
                            setting.sigmas[branch + 1 : branch + 2],
                            setting.sigmas[branch + 2 :: stride],
                        ]
                    ),
                    ask,
                )
                images.append(image)
        branches.append(Branch(x, landed, log_probs, finals))
    return branches


@torch.no_grad()
def picture(vae, final, height, setting):
    """The 8-bit picture [3, H, W] of a final, by diffusers' own image processor."""
    latent = unpack(final, height) / vae.config.scaling_factor + vae.config.shift_factor
    with torch.autocast("cpu", torch.bfloat16, enabled=setting.dtype == torch.bfloat16):
        decoded = vae.decode(latent, return_dict=False)[0]
    (image,) = VaeImageProcessor(16).postprocess(decoded)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def advantages(scores, setting):
    """[members] of one branch's scores [rewards, strides, members]: Eq. 8 for each reward and
    stride, Eq. 11, the clamp."""
    groups = scores.to(setting.advantage_dtype)
    each = (groups - groups.mean(-1, keepdim=True)) / (groups.std(-1, keepdim=True) + 1e-8)
    return each.float().sum(1).sum(0).clamp(-setting.largest_advantage, setting.largest_advantage)


@dataclass
class Update:
    """What the optimizer steps saw: losses, clipped gradients by tensor, and norms before
    clipping."""

    losses: list[float]
    gradients: list[list[Tensor]]
    norms: list[float]


def update(model, texts, rollouts, weighed, height, setting):
    """An optimizer step after every branch, with the average over prompts (there one on each GPU)
    of Eq. 12's clipped loss.

    One forward pass serves the members of a group. `weighed` are advantages by prompt and branch.
    """
    seen = Update([], [], [])
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(
        weights,
        lr=setting.learning_rate,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=setting.weight_decay,
    )
    for place, branch in enumerate(setting.branches):
        for text, branches, groups in zip(texts, rollouts, weighed, strict=True):
            stored, advantage = branches[place], groups[place]
            v = velocity(model, stored.x, setting.sigmas[branch], text, height, setting).repeat(
                len(advantage), 1, 1
            )
            mean, std = stochastic_step(stored.x.float(), v, setting, branch)
            ratio = torch.exp(
                log_prob(torch.cat(stored.landed), mean, std) - torch.cat(stored.log_probs)
            )
            clipped = ratio.clamp(1 - setting.clip_range, 1 + setting.clip_range)
            loss = torch.maximum(-advantage * ratio, -advantage * clipped).mean() / len(texts)
            loss.backward()
            seen.losses.append(float(loss.detach()))
        seen.norms.append(float(torch.nn.utils.clip_grad_norm_(weights, setting.largest_norm)))
        seen.gradients.append([weight.grad.clone() for weight in weights])
        optimizer.step()
        optimizer.zero_grad()
    return seen
