"""The training pass: log-probs of stored transitions under the current weights, the loss, and optimizer steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from g2rpo.contracts import log_ratio_of, loss_of, name_of
from g2rpo.distributed import World
from g2rpo.errors import UserError
from g2rpo.memory import BatchSizes, bounded_by
from g2rpo.objectives import kernel_kl
from g2rpo.sharding import WHOLE, Replicated
from g2rpo.types import Algorithm, Cond, Kernel, Normal, Policy, Steps, Transition


@dataclass(frozen=True)
class Experience:
    """One stochastic step of one group with what the rewards said about it: a shared latent teaches G members at once."""

    prompt: int  # row of the conditioning batch
    transition: Transition
    advantages: Tensor  # [G]
    counted: Tensor | None = None  # [G], the members that an update's mean is taken over; None: all

    @property
    def rows(self) -> int:
        """Latents that the network has to see."""
        return len(self.transition.x)

    @property
    def mask(self) -> Tensor:
        """Which members count, [G]."""
        return torch.ones_like(self.advantages, dtype=torch.bool) if self.counted is None else self.counted

    def members(self, start: int, stop: int) -> Experience:
        """The part of members start .. stop - 1."""
        t, some = self.transition, slice(start, stop)
        own = some if self.rows > 1 else slice(None)
        x, x_next, old_mean, old_log_prob = t.x[own], t.x_next[some], t.old_mean[own], t.old_log_prob[some]
        transition = Transition(t.step, x, x_next, old_mean, old_log_prob)
        return Experience(self.prompt, transition, self.advantages[some], self.mask[some])


def without_zero_advantages(experience: Sequence[Experience]) -> list[Experience]:
    """`experience` in which a member of a prompt counts if it has an advantage other than 0 at any step.

    The others teach nothing but the KL term, and would make the mean of the rest smaller (Flow-GRPO's code).
    """
    alive: dict[int, Tensor] = {}
    for item in experience:
        alive[item.prompt] = alive.get(item.prompt, False) | (item.advantages != 0)
    return [replace(item, counted=alive[item.prompt]) for item in experience]


@dataclass
class UpdateStats:
    """What an update saw, member by member; `summary` condenses it for the log."""

    loss: float = 0.0
    kls: list[Tensor] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    log_ratios: list[Tensor] = field(default_factory=list)
    drifts: list[float] = field(default_factory=list)
    skipped: int = 0

    def add(self, passes: UpdateStats, share: float) -> None:
        """Takes over what the passes of one update saw, which is `share` of all."""
        self.loss += passes.loss * share
        self.kls += passes.kls
        self.log_ratios += passes.log_ratios
        self.drifts += passes.drifts

    def of_all(self, world: World) -> UpdateStats:
        """What all ranks saw; norms and skips are the same on each of them."""
        loss = float(world.gather(torch.tensor([self.loss], dtype=torch.float64)).sum())
        kls = [world.gather(torch.cat(self.kls))] if self.kls else []
        drifts = world.gather(torch.tensor(self.drifts)).tolist()
        return replace(self, loss=loss, kls=kls, log_ratios=[world.gather(torch.cat(self.log_ratios))], drifts=drifts)

    def summary(self, clip_range: float) -> dict[str, float]:
        log_ratio = torch.cat(self.log_ratios)
        ratio = log_ratio.exp()
        return {
            "loss": self.loss,
            "kl": float(torch.cat(self.kls).mean()) if self.kls else 0.0,
            "grad_norm": sum(self.grad_norms) / max(1, len(self.grad_norms)),
            "ratio_deviation": float((ratio - 1).abs().max()),
            "clip_fraction": float(((ratio - 1).abs() > clip_range).float().mean()),
            "log_prob_drift": max(self.drifts, default=0.0),
            "skipped_updates": float(self.skipped),
        }


@dataclass
class Updater:
    """Turns experience into optimizer steps: one for all of it, or one for each part, as the algorithm asks.

    The loss is a mean over members and steps, with `drop_zero_advantages` over those that `without_zero_advantages` keeps.
    Passes of at most `sizes.micro` latents accumulate gradients; an update is the same whatever that size is. When memory runs
    out in a pass, the update's gradients are dropped and it begins again with smaller passes. Every rank has as many members as
    any other; `shards` sums their gradients: when each has all of its own or, where weights are in pieces, pass by pass.
    `step_dtype` is the engine's.
    """

    policy: Policy
    algorithm: Algorithm
    optimizer: torch.optim.Optimizer
    sigmas: Tensor
    kernel: Kernel
    sizes: BatchSizes
    max_grad_norm: float
    shards: Replicated = WHOLE
    step_dtype: torch.dtype = torch.float32
    skipped_in_a_row: int = 0

    def update(self, experience: Sequence[Experience], cond: Cond) -> UpdateStats:
        stats = UpdateStats()
        if self.algorithm.drop_zero_advantages:
            experience = without_zero_advantages(experience)
        batches = list(self._batches(experience))
        for number, batch in enumerate(batches):
            counted = self.shards.world.total(sum(int(item.mask.sum()) for item in batch))[0]
            with self.shards.training():
                passes = self.sizes.fit(partial(self._accumulate, batch, cond, counted, on_policy=number == 0))
            stats.add(passes, 1 / len(batches))
            self.shards.reduce(self.policy.trainable_parameters())
            self._step(stats)
        return stats.of_all(self.shards.world)

    def _accumulate(self, batch: Sequence[Experience], cond: Cond, counted: int, on_policy: bool) -> UpdateStats:
        """Leaves the gradients of one update, and nothing else, whatever was there before; `counted` members on all ranks."""
        stats = UpdateStats()
        self.optimizer.zero_grad(set_to_none=True)
        for part in _passes(batch, self.sizes.micro):
            with bounded_by("micro"):
                loss = self._loss(part, cond, on_policy, stats) / max(1, counted)
                loss.backward()
            stats.loss += float(loss.detach())
        return stats

    def _batches(self, experience: Sequence[Experience]) -> Iterator[list[Experience]]:
        every = self.algorithm.update_every
        if every == "rollout":
            yield list(experience)
            return
        if isinstance(every, int):
            for start in range(0, self.algorithm.group_size, every):
                yield [item.members(start, start + every) for item in experience]
            return
        if every != "branch":
            raise UserError(
                f"algorithm {name_of(self.algorithm)}: update_every is {every!r}; use 'rollout', 'branch' or a number"
            )
        by_step: dict[int, list[Experience]] = defaultdict(list)
        for item in experience:
            by_step[item.transition.step].append(item)
        yield from by_step.values()

    def _loss(self, part: Sequence[Experience], cond: Cond, on_policy: bool, stats: UpdateStats) -> Tensor:
        """The summed loss of one pass; differentiable.

        Until the first optimizer step the old policy *is* the current one, so its log-prob is this pass's own, detached: the
        ratio is exactly 1. What the rollout recorded may differ in the last bits (another batch, another kernel); that
        difference is logged as the drift, because a large one means that rollout and training disagree.
        """
        landing, base, old_mean, dsigma = self._landings(part, cond)
        x_next = torch.cat([item.transition.x_next for item in part])
        recorded = torch.cat([item.transition.old_log_prob for item in part])
        log_prob = landing.log_prob(x_next)
        if on_policy:
            stats.drifts.append(float((log_prob.detach() - recorded).abs().max()))
        old = replace(landing, mean=landing.mean.detach() if on_policy else old_mean)
        steps = Steps(
            log_prob,
            log_prob.detach() if on_policy else recorded,
            kernel_kl(landing, old),
            torch.cat([item.advantages for item in part]).to(x_next.device),
            landing.std,
            dsigma,
            torch.tensor([item.transition.step for item in part for _ in item.advantages]).to(x_next.device),
        )
        stats.log_ratios.append(log_ratio_of(self.algorithm, steps).detach().cpu())
        counted = torch.cat([item.mask for item in part]).to(x_next.device)
        loss = torch.where(counted, loss_of(self.algorithm, steps, on_policy), 0).sum()
        if base is not None:
            kl = kernel_kl(landing, base)
            stats.kls.append(kl.detach().cpu())
            loss = loss + self.algorithm.kl_weight * torch.where(counted, kl, 0).sum()
        return loss

    def _landings(self, part: Sequence[Experience], cond: Cond) -> tuple[Normal, Normal | None, Tensor, Tensor]:
        """Member by member: where the step is bound under the current weights, under the base's if a KL term wants it, and
        (the mean) under those that took it; and |dsigma|."""
        x = torch.cat([item.transition.x for item in part])
        steps = torch.tensor([item.transition.step for item in part for _ in item.transition.x])
        prompts = [item.prompt for item in part for _ in item.transition.x]
        sigma, sigma_next = self.sigmas[steps].to(x.device), self.sigmas[steps + 1].to(x.device)
        rows, offset = [], 0
        for item in part:  # a shared latent serves every member, own latents one each
            own, members = len(item.transition.x), len(item.advantages)
            rows += [offset + (member if own > 1 else 0) for member in range(members)]
            offset += own

        def landing() -> Normal:
            velocity = self.policy.velocity(x, sigma, cond.rows(prompts)).to(self.step_dtype)
            normal = self.kernel(x, velocity, sigma, sigma_next)
            return replace(normal, mean=normal.mean[rows], std=normal.std[rows])

        base = None
        if self.algorithm.kl_weight:
            with torch.no_grad(), self.policy.base():
                base = landing()
        old_mean = torch.cat([item.transition.old_mean for item in part])[rows]
        return landing(), base, old_mean, (sigma - sigma_next)[rows]

    def _step(self, stats: UpdateStats) -> None:
        """Clips and steps; an update with a non-finite gradient is skipped and counted, never applied.

        A sum with one such term is not finite either, so all ranks skip together.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.trainable_parameters(), self.max_grad_norm))
        if math.isfinite(norm):
            self._move()
            stats.grad_norms.append(norm)
            self.skipped_in_a_row = 0
        else:
            stats.skipped += 1
            self.skipped_in_a_row += 1

    def _move(self) -> None:
        """The optimizer's step. Where memory runs out, some weights may have moved already: it cannot be made again."""
        try:
            self.optimizer.step()
        except torch.OutOfMemoryError:
            remedy = "set policy.tuning=lora, or take a device with more memory (`g2rpo plan` tells how much)"
            raise UserError(
                f"out of memory in the optimizer step: {remedy}; --resume goes on from the last checkpoint"
            ) from None


def _passes(batch: Sequence[Experience], size: int) -> Iterator[list[Experience]]:
    """`batch` in passes of at most `size` latents; members with latents of their own may be split over passes."""
    part: list[Experience] = []
    for item in batch:
        width = size if item.rows > 1 else len(item.advantages)
        for start in range(0, len(item.advantages), width):
            piece = item.members(start, start + width)
            if part and sum(other.rows for other in part) + piece.rows > size:
                yield part
                part = []
            part.append(piece)
    yield part
