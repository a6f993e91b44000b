"""Pictures from files as latents of a pipeline's denoising loop.

How latents are packed, scaled and shifted is in the pipeline's own code, which decodes: run on a
few latents up to its VAE, it tells the order, scale and shift of the entries, which are inverted
here. So no pipeline needs a declaration for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from g2rpo.core.data import Cond, Prompt
from g2rpo.core.errors import UserError
from g2rpo.policies.replay import Caught, Pictures

NAME = "latents"


class Undecoded(Pictures):
    """A VAE whose decoding raises `Caught` with what it is given."""

    def decode(self, latents: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor]:
        raise Caught(latents)


@dataclass(frozen=True)
class Layout:
    """What a pipeline makes of latents before its VAE decodes them: entry i of the result is entry
    `order[i]` of the latent, times `scale[i]`, plus `shift[i]`."""

    order: Tensor
    scale: Tensor
    shift: Tensor
    shape: tuple[int, ...]
    """Of the latents of a picture."""
    clip: bool
    """Whether the VAE is one of clips, [B, C, T, H, W]."""

    @classmethod
    def of(cls, before_vae: Callable[[Tensor], Tensor], like: Tensor) -> Layout:
        """By the results for latents [1, ...] of zeros, ones and numbers in turn; UserError for a
        pipeline that does more than reorder, scale and shift."""
        numbers = torch.arange(like.numel(), dtype=torch.float32, device=like.device)
        probes = (torch.zeros_like(like), torch.ones_like(like), numbers.view_as(like))
        answers = [before_vae(probe) for probe in probes]
        shift, one, counted = (answer.flatten().double() for answer in answers)
        scale = one - shift
        order = ((counted - shift) / scale).round().nan_to_num(-1).long()
        entries = torch.arange(like.numel(), device=like.device)
        if not torch.equal(order.sort().values, entries):
            raise UserError("this pipeline's latents are not those of its VAE in another order")
        return cls(order, scale, shift, tuple(like.shape[1:]), answers[0].ndim == 5)

    def latents(self, encoded: Tensor) -> Tensor:
        """Latents [B, ...], float32, of what the VAE encodes [B, ...]; UserError for a VAE that
        encodes to another size than it decodes."""
        if (made := encoded[0].numel()) != len(self.order):
            raise UserError(f"this VAE encodes to {made} numbers and decodes {len(self.order)}")
        flat = (encoded.flatten(1).double() - self.shift) / self.scale
        found = torch.empty_like(flat)
        found[:, self.order] = flat
        return found.float().unflatten(1, self.shape)


def as_asked(picture: Tensor, vae: Any, clip: bool) -> Tensor:
    """A picture [1, 3, H, W] in [0, 1] as a VAE encodes it: from -1 to 1, opaque where it takes
    transparency, a clip of one frame where it takes clips."""
    channels = vae.config.get("in_channels") or vae.config.get("input_channels") or 3
    opaque = picture.new_ones(1, max(0, channels - 3), *picture.shape[2:])
    asked = 2 * torch.cat([picture, opaque], 1) - 1
    return asked[:, :, None] if clip else asked


def mode_of(answer: Any) -> Tensor:
    """The most likely latents in the answer of a VAE's `encode`, of any class of diffusers'."""
    if (distribution := getattr(answer, "latent_dist", None)) is not None:
        mode: Tensor = distribution.mode()
        return mode
    for name in ("latents", "latent"):
        if (latents := getattr(answer, name, None)) is not None:
            return Tensor(latents)
    raise UserError(f"this pipeline's VAE answers with a {type(answer).__name__}, not with latents")


class PictureEncoder:
    """`encode` of a policy's `latents_of`, for `embeddings.CachedEncoder`: the latents of each
    prompt's only picture."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    @property
    def device(self) -> torch.device:
        device: torch.device = self.policy.device
        return device

    def encode(self, prompts: Sequence[str]) -> Cond:
        files = [path for prompt in prompts if isinstance(prompt, Prompt) for path in prompt.images]
        return Cond({NAME: self.policy.latents_of(files)})

    def at_work(self) -> AbstractContextManager[None]:
        """Nothing: the VAE is on the device."""
        return nullcontext()

    def park(self) -> None:
        """Nothing: the VAE stays, to decode."""
