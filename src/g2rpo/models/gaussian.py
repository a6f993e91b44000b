"""A policy with normal images, so that every distribution has a closed form and the SDE can be
tested against exact values."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from g2rpo.core.data import Cond
from g2rpo.core.holding import holding
from g2rpo.core.noise import per_row


class GaussianPolicy:
    """Flow matching between N(0, 1) and N(mean, std^2), entry by entry, with the exact velocity.

    With image ~ N(m, s^2), x at sigma is normal with mean (1 - sigma) m and variance (1 - sigma)^2
    s^2 + sigma^2, and the velocity is E[noise - image | x]. The mean is the trainable parameter. A
    prompt that is a number shifts the mean by it; an empty one does not. Latents are [3, size,
    size]; decoding maps them to [0, 1] by a sigmoid.
    """

    def __init__(
        self, mean: float = 0.0, std: float = 0.6, size: int = 4, dtype: torch.dtype = torch.float32
    ) -> None:
        self.mean = nn.Parameter(torch.full((3, size, size), mean))
        self.std = std
        self.size = size
        self.dtype = dtype
        self._base_mean = self.mean.detach().clone()
        self._in_base = False

    @property
    def device(self) -> torch.device:
        return self.mean.device

    @property
    def shift(self) -> float:
        return 1.0

    def encode(self, prompts: Sequence[str]) -> Cond:
        return Cond(
            {"shift": torch.tensor([float(prompt or 0) for prompt in prompts], device=self.device)}
        )

    def noise(self, generators: Sequence[torch.Generator]) -> Tensor:
        return torch.stack(
            [torch.randn(3, self.size, self.size, generator=g) for g in generators]
        ).to(self.device)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        own = self._base_mean if self._in_base else self.mean
        mean = own + cond.tensors["shift"].reshape(-1, 1, 1, 1)
        sigma = per_row(sigma, x)
        variance = (1 - sigma) ** 2 * self.std**2 + sigma**2
        deviation = (x - (1 - sigma) * mean) / variance
        return (sigma * deviation - mean - (1 - sigma) * self.std**2 * deviation).to(self.dtype)

    def decode(self, x: Tensor) -> Tensor:
        return x.float().sigmoid()

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [self.mean]

    def base(self) -> AbstractContextManager[None]:
        return holding(self, _in_base=True)

    def save(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        save_file({"mean": self.mean.detach()}, directory / "gaussian.safetensors")
        return directory / "gaussian.safetensors"
