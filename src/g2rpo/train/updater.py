"""The training pass: the algorithm's loss over examples, gradients, and optimizer steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from g2rpo.core.data import Batch, Cond, Example, Loss
from g2rpo.core.distributed import World
from g2rpo.core.errors import UserError, out_of_device_memory
from g2rpo.core.objectives import passes, updates_of, without_broken, without_zero_advantages
from g2rpo.core.types import Algorithm, Policy, unguided
from g2rpo.models.sharding import WHOLE, Replicated
from g2rpo.rollout.memory import BatchSizes, bounded_by


@dataclass
class UpdateStats:
    """Statistics of an update: the losses' logs (by name, one tensor per pass), gradient norms and
    skips."""

    loss: float = 0.0
    log: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    grad_norms: list[float] = field(default_factory=list)
    skipped: int = 0

    def add(self, passes: UpdateStats, share: float) -> None:
        """Adds the statistics of one update, weighted by its `share` of all members."""
        self.loss += passes.loss * share
        for name, values in passes.log.items():
            self.log[name] += values

    def of_all(self, world: World) -> UpdateStats:
        """The statistics of all ranks; norms and skips are equal on each."""
        loss = float(world.gather(torch.tensor([self.loss], dtype=torch.float64)).sum())
        return replace(
            self,
            loss=loss,
            log={name: [world.gather(torch.cat(self.log[name]))] for name in sorted(self.log)},
        )

    def summary(self, algorithm: Algorithm) -> dict[str, float]:
        """The numbers to log, including `Algorithm.metrics`."""
        norms = self.grad_norms
        return {
            "loss": self.loss,
            **algorithm.metrics({name: torch.cat(values) for name, values in self.log.items()}),
            "grad_norm": sum(norms) / len(norms) if norms else math.nan,
            "skipped_updates": float(self.skipped),
        }


def no_reward(x: Tensor, prompts: Sequence[int]) -> Tensor:
    """The `Network.reward` of algorithms that do not differentiate rewards."""
    raise NotImplementedError(
        "the algorithm's loss calls network.reward, but it has no uses_rewards = True"
    )


@dataclass(frozen=True)
class Trained:
    """The `types.Network` of a training pass: `policy` with the conditioning `cond`, and velocities
    in `dtype`.

    While `old()` is entered, the policy has the old weights. `reward(latents, rows of cond)` is
    `Network.reward`.
    """

    policy: Policy
    cond: Cond
    dtype: torch.dtype = torch.float32
    old: Callable[[], AbstractContextManager[None]] = nullcontext
    reward: Callable[[Tensor, Sequence[int]], Tensor] = no_reward

    def velocity(self, x: Tensor, sigma: Tensor, prompts: Sequence[int]) -> Tensor:
        with getattr(self.policy, "in_loss", nullcontext)():
            return self.policy.velocity(x, sigma, self.cond.rows(prompts)).to(self.dtype)

    @torch.no_grad()
    def base_velocity(self, x: Tensor, sigma: Tensor, prompts: Sequence[int]) -> Tensor:
        with self.policy.base():
            return self.velocity(x, sigma, prompts)

    @torch.no_grad()
    def old_velocity(self, x: Tensor, sigma: Tensor, prompts: Sequence[int]) -> Tensor:
        with self.old():
            return self.velocity(x, sigma, prompts)

    def unguided(self) -> AbstractContextManager[None]:
        return unguided(self.policy)


@dataclass(kw_only=True)
class Updater:
    """Turns examples into optimizer steps: one for all, or one per part (`Algorithm.update_every`).

    The loss is a mean over the members and steps that `without_broken` keeps, with
    `Algorithm.drop_zero_advantages` over those that `without_zero_advantages` keeps as well. Passes
    of at most `sizes.micro` latents accumulate gradients; an update is the same whatever that size is. When memory runs out in a
    pass, the update is repeated with smaller passes. All ranks have equally many members; `shards`
    sums their gradients, once per update or, with sharded weights, in every pass. `step_dtype` is
    the engine's.
    """

    policy: Policy
    algorithm: Algorithm
    optimizer: torch.optim.Optimizer
    sigmas: Tensor
    sizes: BatchSizes
    max_grad_norm: float
    shards: Replicated = WHOLE
    step_dtype: torch.dtype = torch.float32
    old: Callable[[], AbstractContextManager[None]] = nullcontext
    """While entered, the policy has the old weights, for algorithms that use them."""
    reward: Callable[[Tensor, Sequence[int]], Tensor] = no_reward
    """`Network.reward` for the prompts of the iteration."""
    skipped_in_a_row: int = 0

    def update(self, examples: Sequence[Example], cond: Cond) -> UpdateStats:
        stats = UpdateStats()
        if self.algorithm.drop_zero_advantages:
            examples = without_zero_advantages(examples)
        examples = without_broken(examples)
        if self.algorithm.sums_groups:
            with self.shards.training():
                examples = self.sizes.fit(partial(self._with_group_sums, examples, cond))
        batches = list(updates_of(self.algorithm, examples))
        members = sum(len(item.advantages) for batch in batches for item in batch)
        for number, batch in enumerate(batches):
            members_that_count = self.shards.world.total(
                sum(int(item.mask.sum()) for item in batch)
            )[0]
            with self.shards.training():
                passes = self.sizes.fit(
                    partial(self._accumulate, batch, cond, members_that_count, first=number == 0)
                )
            stats.add(passes, sum(len(item.advantages) for item in batch) / members)
            self.shards.reduce(self.policy.trainable_parameters())
            self._step(stats)
            # before the next rollout, which needs their memory
            self.optimizer.zero_grad(set_to_none=True)
        return stats.of_all(self.shards.world)

    @torch.no_grad()
    def _with_group_sums(self, examples: Sequence[Example], cond: Cond) -> list[Example]:
        """`examples` with `data["group_sum"]`, the sum of `Algorithm.group_term` over the members
        of each."""
        terms = []
        for part in passes(examples, self.sizes.micro):
            with bounded_by("micro"):
                terms.append(
                    self.algorithm.group_term(
                        Batch.of(part, self.sigmas, True), self._network(cond)
                    )
                )
        groups = torch.cat(terms).split([len(item.advantages) for item in examples])
        return [item.with_group_sum(own.sum()) for item, own in zip(examples, groups, strict=True)]

    def _accumulate(
        self, batch: Sequence[Example], cond: Cond, members_that_count: int, first: bool
    ) -> UpdateStats:
        """Computes the gradients of one update, replacing those of an attempt that ran out of
        memory; `members_that_count` is the number of members on all ranks."""
        stats = UpdateStats()
        self.optimizer.zero_grad(set_to_none=True)
        parts = list(passes(batch, self.sizes.micro))
        for number, part in enumerate(parts, 1):
            self.shards.begin_pass(last=number == len(parts))
            with bounded_by("micro"):
                loss = self.loss(part, cond, first)
                counts = torch.cat([item.mask for item in part]).to(loss.values.device)
                # not a product with the mask: 0 * inf is NaN
                mean = torch.where(counts, loss.values, 0).sum() / max(1, members_that_count)
                mean.backward()
            stats.loss += float(mean.detach())
            for name, values in loss.log.items():
                stats.log[name].append(values.detach().cpu())
        return stats

    def loss(self, examples: Sequence[Example], cond: Cond, first: bool) -> Loss:
        """The algorithm's loss of one pass."""
        return self.algorithm.loss(Batch.of(examples, self.sigmas, first), self._network(cond))

    def _network(self, cond: Cond) -> Trained:
        return Trained(self.policy, cond, self.step_dtype, self.old, self.reward)

    def _step(self, stats: UpdateStats) -> None:
        """Clips and steps; an update with a non-finite gradient is skipped and counted, never
        applied.

        A sum with one such term is not finite either, so all ranks skip together.
        """
        norm = float(
            torch.nn.utils.clip_grad_norm_(self.policy.trainable_parameters(), self.max_grad_norm)
        )
        if math.isfinite(norm):
            self._optimizer_step()
            stats.grad_norms.append(norm)
            self.skipped_in_a_row = 0
        else:
            stats.skipped += 1
            self.skipped_in_a_row += 1

    def _optimizer_step(self) -> None:
        """The optimizer's step. It cannot be repeated when memory runs out, because some weights
        may have changed."""
        try:
            self.optimizer.step()
        except RuntimeError as error:
            if not out_of_device_memory(error):
                raise
            remedy = "set policy.tuning=lora, or take a device with more memory (`g2rpo plan` tells how much)"
            raise UserError(
                f"out of memory in the optimizer step: {remedy}; `g2rpo resume RUN` continues from the last checkpoint"
            ) from None
