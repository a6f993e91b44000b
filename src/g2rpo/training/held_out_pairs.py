"""Whether the model prefers what people do, on pairs or marks that are not learnt from."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
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
"""Held-out pairs or marks that are looked at, at most: each takes 16 or 8 evaluations. The first of
every prompt, then the second, ..."""


def rows_of(judged: int, group_size: int, ranks: int = 1) -> int:
    """The network evaluations of one of `ranks` in `HeldOutPairs.row`, of so many pairs or
    marks."""
    looked = min(judged, MOST)
    own = looked // ranks if looked >= ranks else looked
    return 2 * TIMES * group_size * own


@dataclass
class HeldOutPairs:
    """The implicit rewards of `judged`, by the weights of a moment."""

    loop: Loop
    judged: Sequence[Judged]

    def row(self) -> Row:
        """`pairs/accuracy`: the share of pairs whose chosen picture has the higher implicit reward;
        of marks the share of a good and a bad one that are ordered so (the area under the ROC
        curve). Ties count one half. `pairs/margin` is half its 95 % interval over prompts, {}
        without any."""
        world = self.loop.world
        judged = spread_over_prompts(self.judged)[:MOST]
        if len(judged) >= world.size:  # as many passes on every rank
            judged = judged[: len(judged) - len(judged) % world.size]
        if not judged:
            return {}
        places = world.shard_or_all(torch.arange(len(judged))).tolist()
        own = {place: judged[place] for place in places}
        with self.loop.learner.averaged(), self.loop.collector.shards.training():
            found = self.loop.sizes.fit(partial(self._implicit, own))
        implicit = world.gather(found)[: len(judged)]
        good = torch.tensor([one.good[0] for one in judged])
        prompts = [str(one) for one in judged]
        pairs = len(judged[0].good) == 2
        share, error = (share_right if pairs else partial(area, good))(implicit, prompts)
        return {
            "pairs/accuracy": share,
            "pairs/margin": half_width(error, len(set(prompts))),
            "pairs/count": len(judged),
        }

    @torch.no_grad()
    def _implicit(self, judged: Mapping[int, Judged]) -> Tensor:
        """The implicit rewards [B] of marks by their places; of pairs the chosen picture's less the
        other's."""
        loop = self.loop
        policy, algorithm = loop.policy, loop.algorithm
        more: Any = dataclasses.replace(algorithm, times=TIMES)  # type: ignore[type-var]
        (plan,) = loop.collector.plans(algorithm, 0)
        examples: list[Example] = []
        for row, (place, one) in enumerate(judged.items()):
            latents = latents_of(policy, one.pictures)
            draw = partial(generator_for, loop.config.trainer.seed, "held-out pairs", place)
            rollout = Rollout(row, plan, (), latents[None])
            own = more.examples(rollout, torch.ones(len(latents)), draw)
            examples += [example.with_group_sum(torch.zeros(())) for example in own]
        cond = policy.encode(list(judged.values()))
        with in_training(policy, loop.config.sampling.guidance_scale):
            parts = [
                loop.updater.loss(part, cond, True).log["implicit"].cpu()
                for part in passes(examples, loop.sizes.micro)
            ]
        return torch.cat(parts).unflatten(0, (len(judged), TIMES)).mean(1)


def spread_over_prompts(judged: Sequence[Judged]) -> list[Judged]:
    """The first pair or mark of every prompt, then the second, ..."""
    turns, seen = [], Counter[str]()
    for one in judged:
        turns.append(seen[str(one)])
        seen[str(one)] += 1
    return [judged[place] for place in sorted(range(len(judged)), key=turns.__getitem__)]


def share_right(margins: Tensor, prompts: Sequence[str]) -> tuple[float, float]:
    """The share of margins [N] above 0, ties one half, and its standard error. Those of one prompt
    depend on each other: they may be of the same pictures."""
    right = (margins > 0).double() + 0.5 * (margins == 0)
    return float(right.mean()), _error(_parts(right, prompts), prompts)


def area(good: Tensor, implicit: Tensor, prompts: Sequence[str]) -> tuple[float, float]:
    """The share of pairs of a `good` mark [N] and another whose implicit rewards are ordered so,
    and its standard error (DeLong et al. 1988; of prompts with several marks Obuchowski 1997). NaN
    without both."""
    above, below = implicit[good], implicit[~good]
    won = (above[:, None] > below).double() + 0.5 * (above[:, None] == below)
    if not won.numel():
        return float("nan"), float("nan")
    parts = torch.zeros(len(good)).double()
    for side, here in ((1, good), (0, ~good)):
        own = [prompt for prompt, inside in zip(prompts, here.tolist(), strict=True) if inside]
        parts[here] = _parts(won.mean(side), own)
    return float(won.mean()), _error(parts, prompts)


def _parts(values: Tensor, prompts: Sequence[str]) -> Tensor:
    """What each of `values` [N] adds to the error of their mean: the squares of the sums by prompt
    add up to its variance. NaN for one prompt."""
    count = len(set(prompts))
    factor = (count / (count - 1)) ** 0.5 if count > 1 else float("nan")
    return (values - values.mean()) / len(values) * factor


def _error(parts: Tensor, prompts: Sequence[str]) -> float:
    places = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
    at = torch.tensor([places[prompt] for prompt in prompts])
    sums = torch.zeros(len(places), dtype=parts.dtype).index_add(0, at, parts)
    return float(sums.square().sum()) ** 0.5
