"""How groups are sampled, and what comes of it: plans, stochastic steps and rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from g2rpo.core.errors import refuse

Solver = Literal["euler", "dpmpp2m"]
"""The ODE solver of a tail (`rollout.tails`)."""


@dataclass(frozen=True)
class Plan:
    """How the members of one group are sampled: where noise enters, and how a member is finished.

    Steps `0 .. branch-1` follow the ODE, steps `branch .. merge-1` are stochastic, and each tail is
    an ODE trajectory from `merge` on. A tail lists the steps it visits: it begins at `merge`,
    increases, and ends at `num_steps`. A plan with branch = merge has no stochastic steps. With
    `merged` there is one stochastic step, from `branch` to `merge`. With `shared_noise` all members
    start from one initial noise and share the trajectory up to `branch`. Without it, their initial
    noises may have something in `common`, a number from 0 to 1: common * shared + sqrt(1 -
    common^2) * own. `trained` are the stochastic steps to learn from (None: all of them); `solver`
    integrates the tails. `granularities` name the tails in the log, one number each (empty: 1, 2,
    ...); the smallest is the finest. With `kept_sigma` the latents that the first tail passes
    nearest to this sigma are kept, for an algorithm that learns from states of the ODE. With
    `baseline` the ODE's own picture of the prompt is sampled too, once for all plans, and scored
    with every group; `Algorithm.advantages` then gets rewards less those of that picture. With
    `corrected` a stochastic step is the ODE's step and then a stochastic one in place: the kernel
    gets the latent where the ODE's step ends, and its velocity there without classifier-free
    guidance, so each stochastic step takes a second evaluation.
    """

    branch: int
    merge: int
    tails: tuple[tuple[int, ...], ...]
    _: KW_ONLY
    shared_noise: bool = True
    common: float = 0.0
    merged: bool = False
    baseline: bool = False
    corrected: bool = False
    trained: tuple[int, ...] | None = None
    solver: Solver = "euler"
    granularities: tuple[int, ...] = field(default=(), compare=False)
    kept_sigma: float | None = None

    def __post_init__(self) -> None:
        refuse(self._faults(), ValueError)

    def _faults(self) -> Iterator[str]:
        if not 0 <= self.branch <= self.merge:
            yield f"a plan needs 0 <= branch <= merge, got branch={self.branch}, merge={self.merge}"
        if self.branch == self.merge and self.shared_noise:
            yield "a plan without stochastic steps needs shared_noise=False: all members would be alike"
        if not 0 <= self.common <= 1 or (self.common and self.shared_noise):
            yield f"common must be from 0 to 1, and needs shared_noise=False, got {self.common}"
        if self.baseline and not self.shared_noise:
            yield "a baseline needs shared_noise=True: members without it have no ODE in common"
        if not self.tails:
            yield "a plan needs at least one tail"
        for tail in self.tails:
            if tail[:1] != (self.merge,) or any(a >= b for a, b in pairwise(tail)):
                yield f"a tail must start at merge={self.merge} and increase, got {tail}"
        if self.kept_sigma is not None and any(len(tail) < 3 for tail in self.tails[:1]):
            yield f"a kept latent needs a first tail of two steps, got {self.tails[0]}"
        if len({tail[-1] for tail in self.tails}) != 1:
            yield f"all tails must end at the same step, got {self.tails}"
        if self.corrected and any(tail[-1] == self.merge for tail in self.tails):
            yield f"a corrected step cannot be the last, got merge={self.merge}: there is no noise at sigma = 0"
        if self.granularities and len(self.granularities) != len(self.tails):
            yield f"granularities must name every tail once, got {self.granularities} for {len(self.tails)} tails"
        if self.trained is not None and not (
            self.trained and set(self.trained) <= set(self.stochastic)
        ):
            yield f"trained must name some of steps {[*self.stochastic]}, got {self.trained}"

    @property
    def stochastic(self) -> range:
        """The stochastic steps, by the grid indices at which they begin."""
        return range(self.branch, min(self.merge, self.branch + 1) if self.merged else self.merge)

    def after(self, step: int) -> int:
        """The grid index at which the stochastic step `step` ends."""
        return self.merge if self.merged else step + 1

    def trains(self, step: int) -> bool:
        """Whether the stochastic step `step` is learnt from."""
        return self.trained is None or step in self.trained

    def kept_step(self, sigmas: Tensor) -> int | None:
        """The step inside the first tail whose sigma, of the grid's [num_steps + 1], is nearest to
        `kept_sigma`; None without one."""
        kept = self.kept_sigma
        if kept is None:
            return None
        return min(self.tails[0][1:-1], key=lambda step: abs(float(sigmas[step]) - kept))

    def walks(self, sigmas: Tensor) -> tuple[tuple[int, ...], ...]:
        """The tails, and after them the first up to its kept step, if it has one."""
        kept, (first, *_) = self.kept_step(sigmas), self.tails
        return self.tails if kept is None else (*self.tails, first[: first.index(kept) + 1])

    @property
    def tail_names(self) -> tuple[int, ...]:
        """The number of each tail in the log."""
        return self.granularities or tuple(range(1, len(self.tails) + 1))


@dataclass(frozen=True)
class Transition:
    """One stochastic step of one group. `x` has one row where the members branch from a shared
    latent, else G rows."""

    step: int
    x: Tensor  # [1 or G, ...]
    x_next: Tensor  # [G, ...]
    old_mean: Tensor  # [1 or G, ...], the mean of the transition kernel p(x_next | x)
    old_log_prob: Tensor  # [G], float32


@dataclass(frozen=True)
class Rollout:
    """One `Plan` executed for one prompt."""

    prompt: int  # row of the conditioning batch
    plan: Plan
    transitions: tuple[Transition, ...]  # of the steps to learn from
    finals: Tensor  # [M, G, ...], latents at sigma = 0
    kept: tuple[int, Tensor] | None = None  # the step that `plan.kept_sigma` names, [G, ...] there
    ode: Tensor | None = None  # [...], the ODE's own latent at sigma = 0, of a plan with a baseline

    @classmethod
    def of(
        cls,
        prompt: int,
        plan: Plan,
        transitions: Sequence[Transition],
        ends: Tensor,
        sigmas: Tensor,
        ode: Tensor | None = None,
    ) -> Rollout:
        """From the latents [walks, G, ...] at the end of each of `plan.walks(sigmas)`."""
        step, tails = plan.kept_step(sigmas), len(plan.tails)
        kept = None if step is None else (step, ends[tails])
        return cls(prompt, plan, tuple(transitions), ends[:tails], kept, ode)

    @property
    def pictures(self) -> int:
        """How many are decoded and scored: each tail's, of the members and the baseline."""
        tails, members = self.finals.shape[:2]
        return tails * (members + (self.ode is not None))

    @property
    def scored(self) -> Tensor:
        """The latents of these pictures [M, G, ...], or [M, G + 1, ...] with the ODE's at the end."""
        if self.ode is None:
            return self.finals
        return torch.cat([self.finals, self.ode.expand_as(self.finals[:, :1])], 1)
