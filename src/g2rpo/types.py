"""The nouns of g2rpo, and the three doors: Policy, Reward, Algorithm.

Time runs from sigma = 1 (noise) to sigma = 0 (image): x = (1 - sigma) * image + sigma * noise, velocity = noise - image.
A *step* is an index on the sigma grid (0 is pure noise, num_steps is the image); an *iteration* is one update of the weights.

Shape legend: P prompts, K plans per prompt, G group members, M tails (granularities) per member, R rewards,
B rows of a batch, [...] the latent of one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

Diffusion = Callable[[Tensor], Tensor]
"""The diffusion coefficient g of the SDE, as a function of sigma (elementwise)."""


@dataclass(frozen=True)
class Plan:
    """How the members of one group are sampled: where noise enters, and how a member is finished.

    Steps `0 .. branch-1` follow the ODE, steps `branch .. merge-1` are stochastic, and from `merge` on every tail is an
    ODE walk of its own. A tail lists the steps it visits: it begins at `merge`, increases, and ends at `num_steps`.
    With `shared_noise` all members start from one initial noise, so the walk up to `branch` is the same for all of them.
    """

    branch: int
    merge: int
    tails: tuple[tuple[int, ...], ...]
    shared_noise: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.branch < self.merge:
            raise ValueError(f"a plan needs 0 <= branch < merge, got branch={self.branch}, merge={self.merge}")
        if not self.tails:
            raise ValueError("a plan needs at least one tail")
        for tail in self.tails:
            if tail[0] != self.merge or any(a >= b for a, b in pairwise(tail)):
                raise ValueError(f"a tail must start at merge={self.merge} and increase, got {tail}")
        if len({tail[-1] for tail in self.tails}) != 1:
            raise ValueError(f"all tails must end at the same step, got {self.tails}")


@dataclass(frozen=True)
class Cond:
    """What a policy is conditioned on, one row per prompt: named tensors that share their first dimension."""

    tensors: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def rows(self, index: Tensor | Sequence[int]) -> Cond:
        """The rows named by `index`, in its order; rows may repeat."""
        return Cond({k: v[torch.as_tensor(index, device=v.device)] for k, v in self.tensors.items()})

    def to(self, device: torch.device | str) -> Cond:
        return Cond({k: v.to(device) for k, v in self.tensors.items()})


@dataclass(frozen=True)
class Transition:
    """One stochastic step of one group. `x` has one row where the members branch from a shared latent, else G rows."""

    step: int
    x: Tensor  # [1 or G, ...]
    x_next: Tensor  # [G, ...]
    old_log_prob: Tensor  # [G], float32


@dataclass(frozen=True)
class Rollout:
    """One `Plan` executed for one prompt."""

    prompt: int  # row of the conditioning batch
    plan: Plan
    transitions: tuple[Transition, ...]
    finals: Tensor  # [M, G, ...], latents at sigma = 0


@runtime_checkable
class Policy(Protocol):
    """A generator that can be trained. It owns guidance, packing, timestep scaling and dtype; callers see sigma only."""

    @property
    def device(self) -> torch.device: ...

    @property
    def shift(self) -> float:
        """The time shift (of `flow.sigma_grid`) with which the model is deployed."""
        ...

    def encode(self, prompts: Sequence[str]) -> Cond:
        """Conditioning for each prompt."""
        ...

    def noise(self, generators: Sequence[torch.Generator]) -> Tensor:
        """One initial latent per generator: [len(generators), ...], float32, standard normal."""
        ...

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Velocity at x [B, ...] for sigma [B], which may differ per row, and cond of B rows; differentiable."""
        ...

    def decode(self, x: Tensor) -> Tensor:
        """Images [B, 3, H, W], float32 in [0, 1], of latents at sigma = 0."""
        ...

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimizer updates, float32, in an order that never changes."""
        ...

    def base(self) -> AbstractContextManager[None]:
        """While entered, `velocity` is the untrained model's (for the KL term and for before/after pictures)."""
        ...

    def save(self, directory: Path) -> Path:
        """Writes the trained weights as their ecosystem reads them, and returns where."""
        ...


@runtime_checkable
class Reward(Protocol):
    """Scores pictures: raw, unweighted, higher is better. NaN means "no score" and is masked out of its group."""

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores [B], float32 on CPU, of images [B, 3, H, W] in [0, 1], each for its own prompt."""
        ...


@runtime_checkable
class Algorithm(Protocol):
    """Where noise enters, what a reward says about it, and the loss. Fields are the hyper-parameters."""

    @property
    def group_size(self) -> int: ...

    @property
    def update_every(self) -> Literal["rollout", "branch"]: ...

    @property
    def kl_weight(self) -> float: ...

    def diffusion(self, sigmas: Tensor) -> Diffusion:
        """g(sigma) for a run on the grid `sigmas`."""
        ...

    def plans(self, num_steps: int) -> list[Plan]:
        """The plans that every prompt is sampled with."""
        ...

    def advantages(self, rewards: Tensor, weights: Tensor) -> Tensor:
        """Advantages [N, G] from rewards [N, R, M, G] of N groups, whose entries may be NaN, and weights [R]."""
        ...

    def loss(self, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> Tensor:
        """The policy loss, one value per entry, before averaging; all arguments and the result have one shape."""
        ...
