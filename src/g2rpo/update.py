"""The training pass: log-probs of stored transitions under the current weights, the loss, and optimizer steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from g2rpo.flow import Normal, sde_step
from g2rpo.memory import BatchSizes, bounded_by
from g2rpo.objectives import kernel_kl
from g2rpo.types import Algorithm, Cond, Diffusion, Policy, Transition


@dataclass(frozen=True)
class Experience:
    """One stochastic step of one group with what the rewards said about it: one forward pass teaches G members."""

    prompt: int  # row of the conditioning batch
    transition: Transition
    advantages: Tensor  # [G]


@dataclass
class UpdateStats:
    """What an update saw, member by member; `summary` condenses it for the log."""

    loss: float = 0.0
    kl: float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    log_ratios: list[Tensor] = field(default_factory=list)
    drifts: list[float] = field(default_factory=list)
    skipped: int = 0

    def add(self, passes: UpdateStats, share: float) -> None:
        """Takes over what the passes of one update saw, which is `share` of all."""
        self.loss += passes.loss * share
        self.kl += passes.kl * share
        self.log_ratios += passes.log_ratios
        self.drifts += passes.drifts

    def summary(self, clip_range: float) -> dict[str, float]:
        log_ratio = torch.cat(self.log_ratios)
        ratio = log_ratio.exp()
        return {
            "loss": self.loss,
            "kl": self.kl,
            "grad_norm": sum(self.grad_norms) / max(1, len(self.grad_norms)),
            "ratio_deviation": float((ratio - 1).abs().max()),
            "clip_fraction": float(((ratio - 1).abs() > clip_range).float().mean()),
            "log_prob_drift": max(self.drifts, default=0.0),
            "skipped_updates": float(self.skipped),
        }


@dataclass
class Updater:
    """Turns experience into optimizer steps: one for all of it, or one per branch step, as the algorithm asks.

    Passes of `sizes.micro` transitions accumulate gradients; an update is the same whatever that size is. When memory runs out
    in a pass, the update's gradients are dropped and it begins again with smaller passes.
    """

    policy: Policy
    algorithm: Algorithm
    optimizer: torch.optim.Optimizer
    sigmas: Tensor
    diffusion: Diffusion
    sizes: BatchSizes
    max_grad_norm: float

    def update(self, experience: Sequence[Experience], cond: Cond) -> UpdateStats:
        stats = UpdateStats()
        batches = list(self._batches(experience))
        for number, batch in enumerate(batches):
            passes = self.sizes.fit(partial(self._accumulate, batch, cond, on_policy=number == 0))
            stats.add(passes, 1 / len(batches))
            self._step(stats)
        return stats

    def _accumulate(self, batch: Sequence[Experience], cond: Cond, on_policy: bool) -> UpdateStats:
        """Leaves the gradients of one update, and nothing else, whatever was there before."""
        stats = UpdateStats()
        members = sum(len(item.advantages) for item in batch)
        self.optimizer.zero_grad(set_to_none=True)
        size = self.sizes.micro
        for start in range(0, len(batch), size):
            with bounded_by("micro"):
                loss = self._loss(batch[start : start + size], cond, on_policy, stats) / members
                loss.backward()
            stats.loss += float(loss.detach())
        stats.kl /= members
        return stats

    def _batches(self, experience: Sequence[Experience]) -> Iterator[list[Experience]]:
        if self.algorithm.update_every == "rollout":
            yield list(experience)
            return
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
        kernel, base = self._kernels(part, cond)
        x_next = torch.cat([item.transition.x_next for item in part])
        advantages = torch.cat([item.advantages for item in part]).to(x_next.device)
        recorded = torch.cat([item.transition.old_log_prob for item in part])
        log_prob = kernel.log_prob(x_next)
        if on_policy:
            stats.drifts.append(float((log_prob.detach() - recorded).abs().max()))
        old_log_prob = log_prob.detach() if on_policy else recorded
        stats.log_ratios.append((log_prob.detach() - old_log_prob).cpu())
        loss = self.algorithm.loss(log_prob, old_log_prob, advantages).sum()
        if base is not None:
            kl = kernel_kl(kernel, base).sum()
            stats.kl += float(kl.detach())
            loss = loss + self.algorithm.kl_weight * kl
        return loss

    def _kernels(self, part: Sequence[Experience], cond: Cond) -> tuple[Normal, Normal | None]:
        """The step kernels of every member, under the current weights and, if a KL term wants it, under the base's."""
        x = torch.cat([item.transition.x for item in part])
        steps = torch.tensor([item.transition.step for item in part for _ in item.transition.x])
        prompts = [item.prompt for item in part for _ in item.transition.x]
        sigma, sigma_next = self.sigmas[steps].to(x.device), self.sigmas[steps + 1].to(x.device)
        rows, offset = [], 0
        for item in part:  # a shared latent serves every member, own latents one each
            own, members = len(item.transition.x), len(item.advantages)
            rows += [offset + (member if own > 1 else 0) for member in range(members)]
            offset += own

        def kernel() -> Normal:
            velocity = self.policy.velocity(x, sigma, cond.rows(prompts))
            normal = sde_step(x, velocity, sigma, sigma_next, self.diffusion(sigma))
            return Normal(normal.mean[rows], normal.std[rows])

        if not self.algorithm.kl_weight:
            return kernel(), None
        with torch.no_grad(), self.policy.base():
            base = kernel()
        return kernel(), base

    def _step(self, stats: UpdateStats) -> None:
        """Clips and steps; an update with a non-finite gradient is skipped and counted, never applied."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.trainable_parameters(), self.max_grad_norm))
        if math.isfinite(norm):
            self.optimizer.step()
            stats.grad_norms.append(norm)
        else:
            stats.skipped += 1
