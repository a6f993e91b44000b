"""The common part of algorithms that learn from stochastic steps: log-probs, the ratio, the KL term
and their metrics.

log p_theta(x_next | x) is the log density of the sampled step under the kernel of the current
weights ratio = p_theta / p_old; loss = policy_loss(ratio, A) + kl_weight * KL(kernel || kernel of
the untrained model)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from g2rpo.core.data import Batch, Example, Loss
from g2rpo.core.noise import Normal
from g2rpo.core.objectives import kernel_kl, updates_once
from g2rpo.core.plans import Rollout
from g2rpo.core.types import Algorithm, Draw, Network


@dataclass(frozen=True, kw_only=True)
class TakenSteps:
    """The quantities of B stochastic steps in a training pass: every field is [B], one entry per
    member and step; float32 except the last."""

    log_prob: Tensor  # of the sampled step, under the current weights; carries the gradient
    old_log_prob: Tensor  # under the weights that sampled it
    # KL of the two kernels, as a mean over entries; carries a gradient, and is 0 at the old weights
    old_kl: Tensor
    advantages: Tensor
    std: Tensor  # the std of the step's noise
    dsigma: Tensor  # |sigma_next - sigma|
    step: Tensor  # its index on the sigma grid, int64


class PolicyGradient(Algorithm):
    """The part of an `Algorithm` that turns transitions into a loss. Subclasses define the
    stochastic step (`kernel`) and the loss (`log_ratio`, `policy_loss`), and have fields
    `clip_range` and `kl_weight`."""

    clip_range: float
    kl_weight: float

    @property
    def uses_base(self) -> bool:
        return self.kl_weight > 0

    def landing_step(self, step: int) -> int:
        """The grid index at which the stochastic step `step` ends (`Plan.after`)."""
        return step + 1

    def log_ratio(self, steps: TakenSteps) -> Tensor:
        """The log of the ratio that the loss clips, [B]; 0 if the weights are those of the
        rollout."""
        return steps.log_prob - steps.old_log_prob

    def policy_loss(self, steps: TakenSteps) -> Tensor:
        """The loss [B] without the KL term."""
        raise NotImplementedError

    def kl_penalty(self, kl: Tensor, steps: TakenSteps) -> Tensor:
        """The penalty that `kl_weight` multiplies, [B]; `kl` is each step's KL to the untrained
        model's kernel."""
        return kl

    def examples(self, rollout: Rollout, advantages: Tensor, draw: Draw) -> list[Example]:
        return [
            Example(
                rollout.prompt,
                t.step,
                t.x,
                advantages,
                {"x_next": t.x_next, "old_mean": t.old_mean, "old_log_prob": t.old_log_prob},
            )
            for t in rollout.transitions
        ]

    def loss(self, batch: Batch, network: Network) -> Loss:
        """policy_loss + kl_weight * KL, member by member.

        Until the first optimizer step the old policy *is* the current one, so its log-prob is this
        pass's own, detached: the ratio is exactly 1. The rollout's log-prob may differ in the last
        bits (other batch shapes and kernels). The difference is logged as drift; a large one means
        that rollout and training use different models.
        """
        sigma = batch.sigma()
        base = network.base_velocity(batch.x, sigma, batch.prompts) if self.uses_base else None
        return self.loss_of(batch, network.velocity(batch.x, sigma, batch.prompts), base)

    def loss_of(self, batch: Batch, velocity: Tensor, base: Tensor | None) -> Loss:
        """The loss, given the velocities [rows, ...] at the latents of the batch, `base` those of
        the untrained model."""
        new = self.landing(batch, batch.x, velocity, batch.sigma())
        of_base = None if base is None else self.landing(batch, batch.x, base, batch.sigma())
        return self.loss_between(batch, new, of_base)

    def loss_between(self, batch: Batch, new: Normal, base: Normal | None) -> Loss:
        """The loss, given the distributions of the batch's steps, `base` those under the untrained
        model."""
        recorded = batch.data["old_log_prob"]
        old = () if batch.first else (batch.data["old_mean"], recorded)
        steps = self.taken(batch, new, batch.sigma(), *old)
        values, log = self.policy_loss(steps), {"log_ratio": self.log_ratio(steps)}
        if batch.first:
            log["drift"] = (steps.log_prob - recorded).abs()
        if base is not None:
            log["kl"] = kernel_kl(new, base)
            values = values + self.kl_weight * self.kl_penalty(log["kl"], steps)
        return Loss(values, log)

    def landing(self, batch: Batch, x: Tensor, velocity: Tensor, sigma: Tensor) -> Normal:
        """The distribution of the step to `sigma_after` from x [rows, ...] at sigma [rows], one row
        per member."""
        each = batch.by_member
        return self.kernel(batch.sigmas)(
            each(x), each(velocity), each(sigma), each(self.sigma_after(batch))
        )

    def sigma_after(self, batch: Batch) -> Tensor:
        """The sigmas at which the batch's steps end, [rows]."""
        return batch.sigma(ahead=1)

    def taken(
        self,
        batch: Batch,
        new: Normal,
        sigma: Tensor,
        old_mean: Tensor | None = None,
        old_log_prob: Tensor | None = None,
    ) -> TakenSteps:
        """The batch's steps from sigma [rows] under the kernel `new`; the old policy is the current
        one unless given."""
        log_prob = new.log_prob(batch.data["x_next"])
        old = replace(new, mean=new.mean.detach() if old_mean is None else old_mean)
        return TakenSteps(
            log_prob=log_prob,
            old_log_prob=log_prob.detach() if old_log_prob is None else old_log_prob,
            old_kl=kernel_kl(new, old),
            advantages=batch.advantages,
            std=new.std,
            dsigma=batch.by_member(sigma - self.sigma_after(batch)),
            step=batch.by_member(batch.steps).to(batch.x.device),
        )

    def metrics(self, log: Mapping[str, Tensor]) -> dict[str, float]:
        off = (log["log_ratio"].exp() - 1).abs()
        return {
            **({"kl": float(log["kl"].mean())} if "kl" in log else {}),
            "ratio_deviation": float(off.max()),
            "clip_fraction": float((off > self.clip_range).float().mean()),
            "log_prob_drift": float(log["drift"].max()),
        }

    def drift_limit(
        self, sigmas: Tensor, steps: Sequence[int], entries: int, rounding: float
    ) -> float:
        """The largest acceptable difference of a log-prob between rollout and training pass.

        Later updates of a rollout compare with its stored log-prob: drift beyond half the clip
        range would clip ratios although nothing was learnt. With one update per rollout no ratio
        contains the drift, so rounding is accepted too: a velocity (of size sqrt 2) with a relative
        error of `rounding` moves a step's mean by e standard deviations. The drawn noise is
        independent of it, so the log-prob moves by N(0, e^2 / entries) - e^2 / 2, which for a
        thousand members stays within 4 e / sqrt(entries) + e^2 / 2. The limit is that of the
        largest step, in the units of the kernel's log-prob.
        """
        one, nothing = torch.ones(1, 1), torch.zeros(1)
        kernel = self.kernel(sigmas)
        allowed, unit = 0.0, 0.0
        for step in steps:
            sigma, sigma_next = sigmas[step], sigmas[self.landing_step(step)]
            still, moved = (
                kernel(0 * one, velocity * one, sigma, sigma_next) for velocity in (0, 1)
            )
            std = still.std.reshape(1)
            e = rounding * math.sqrt(2) * float((moved.mean - still.mean).abs()) / float(std)
            # the scale of log-probs: 1, or 2 std^2 without the density's constants
            scale = 2 * float(still.log_prob(still.mean) - still.log_prob(still.mean + std))
            allowed = max(allowed, scale * (4 * e / math.sqrt(entries) + e**2 / 2))
            off_by_one = TakenSteps(
                log_prob=torch.ones(1),
                old_log_prob=nothing,
                old_kl=nothing,
                advantages=nothing,
                std=std,
                dsigma=(sigma - sigma_next).reshape(1),
                step=torch.tensor([step]),
            )
            unit = max(unit, float(self.log_ratio(off_by_one)))
        half = self.clip_range / 2 / unit
        return max(half, allowed) if updates_once(self) else half
