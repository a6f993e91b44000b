"""Whether the model prefers what people do, on pairs or marks that are not learnt from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from g2rpo.core.data import Judged, Row
from g2rpo.core.seeding import generator_for
from g2rpo.core.statistics import half_width
from g2rpo.core.types import Example, Rollout
from g2rpo.core.updates import passes
from g2rpo.rollout.guidance import in_training
from g2rpo.training.collector import latents_of
from g2rpo.training.loop import Loop

TIMES = 4
"""Times at which each is noised, the same in every evaluation; implicit rewards are their means."""
MOST = 128
"""Held-out pairs or marks that are looked at, at most: each takes 16 or 8 evaluations."""


@dataclass
class HeldOutPairs:
    """The implicit rewards of `judged`, by the weights of a moment."""

    loop: Loop
    judged: Sequence[Judged]

    def row(self) -> Row:
        """`pairs/accuracy`: the share of pairs whose chosen picture has the higher implicit reward;
        of marks the share of a good and a bad one that are ordered so (the area under the ROC
        curve). Ties count one half. `pairs/margin` is half its 95 % interval, {} without any."""
        world = self.loop.world
        judged = list(self.judged[:MOST])
        if not judged:
            return {}
        own: list[Judged] = list(world.shard_or_all(judged))  # type: ignore[arg-type]
        with self.loop.learner.averaged(), self.loop.collector.shards.training():
            found = self.loop.sizes.fit(partial(self._implicit, own))
        implicit = world.gather(found)[: len(judged)]
        good = torch.tensor([one.good[0] for one in judged])
        pairs = len(judged[0].good) == 2
        share, error = share_right(implicit) if pairs else area(implicit[good], implicit[~good])
        return {
            "pairs/accuracy": share,
            "pairs/margin": half_width(error, len(judged)),
            "pairs/count": len(judged),
        }

    @torch.no_grad()
    def _implicit(self, judged: list[Judged]) -> Tensor:
        """The implicit rewards [B] of marks; of pairs the chosen picture's less the other's."""
        loop = self.loop
        policy, algorithm = loop.policy, loop.algorithm
        more: Any = dataclasses.replace(algorithm, times=TIMES)  # type: ignore[type-var]
        (plan,) = loop.collector.plans(algorithm, 0)
        examples: list[Example] = []
        for place, one in enumerate(judged):
            latents = latents_of(policy, one.pictures)
            draw = partial(generator_for, loop.config.trainer.seed, "held-out pairs", place)
            rollout = Rollout(place, plan, (), latents[None])
            own = more.examples(rollout, torch.ones(len(latents)), draw)
            examples += [example.with_group_sum(torch.zeros(())) for example in own]
        cond = policy.encode(judged)
        with in_training(policy, loop.config.sampling.guidance_scale):
            parts = [
                loop.updater.loss(part, cond, True).log["implicit"].cpu()
                for part in passes(examples, loop.sizes.micro)
            ]
        return torch.cat(parts).unflatten(0, (len(judged), TIMES)).mean(1)


def share_right(margins: Tensor) -> tuple[float, float]:
    """The share of margins [N] above 0, ties one half, and its standard error."""
    right = (margins > 0).double() + 0.5 * (margins == 0)
    error = float(right.std() / len(right) ** 0.5) if len(right) > 1 else float("nan")
    return float(right.mean()), error


def area(good: Tensor, bad: Tensor) -> tuple[float, float]:
    """The share of pairs of a good and a bad mark whose implicit rewards are ordered so, and its
    standard error by the variances over either (DeLong et al. 1988). NaN without both."""
    won = (good[:, None] > bad).double() + 0.5 * (good[:, None] == bad)
    if min(won.shape) < 2:
        return float(won.mean()), float("nan")
    error = (won.mean(1).var() / len(good) + won.mean(0).var() / len(bad)) ** 0.5
    return float(won.mean()), float(error)
