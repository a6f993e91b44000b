"""The groups that a person is asked about: which prompt, and pictures that differ by the noise of
one step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from g2rpo.core.images import to_uint8
from g2rpo.core.seeding import generator_for
from g2rpo.monitor.clips import stills
from g2rpo.prompts.order import PromptOrder
from g2rpo.rewards import votes
from g2rpo.runtime.distributed import World
from g2rpo.training.collector import Groups
from g2rpo.training.trainer import Trainer

SHOWN_STEPS = (0, 1)
"""Steps whose noise the groups that are shown differ by, by turns: that of later steps changes
little that a person can see."""
CANDIDATES, PREVIEWED = 6, 3
"""Prompts that a round considers, and pictures that are drawn of each to find the one to ask about:
where twelve pictures are alike there is nothing to choose, and three tell it nearly as well as
twelve (studies/LOG.md)."""
MOST_PROMPTS_ASKED = 64
"""Training prompts, at most, that groups are drawn from."""


@dataclass(frozen=True)
class AskedGroup:
    """Pictures [G, 3, H, W] in [0, 1], or clips, of one prompt, on which a person is asked."""

    round: int
    prompt: str
    step: int
    images: Tensor
    sampled: Groups
    digest: str
    changes: int
    """How often the weights had changed when it was sampled."""

    def advantages(self, liked: Sequence[int], largest: float) -> Tensor:
        """The choice [1, G] as advantages, normalised within the group."""
        values = torch.zeros(len(self.images))
        values[list(liked)] = 1
        return ((values - values.mean()) / values.std()).clamp(-largest, largest)[None]


@dataclass
class Asker:
    """Samples the groups of a session from the first training prompts; of a round the same on all
    ranks."""

    trainer: Trainer
    order: PromptOrder = field(init=False)

    def __post_init__(self) -> None:
        t, seed = self.trainer, self.trainer.config.trainer.seed
        # training begins with them: they are encoded
        first = PromptOrder(t.prompts, seed).batch(0, MOST_PROMPTS_ASKED)
        self.order = PromptOrder(list(dict.fromkeys(first)), seed + 1)

    def group(self, round: int, changes: int) -> AskedGroup:
        """The group of the candidate whose pictures differ most, by the first `PREVIEWED` of
        each."""
        t, step = self.trainer, SHOWN_STEPS[round % len(SHOWN_STEPS)]
        candidates = list(dict.fromkeys(self.order.batch(round, CANDIDATES)))
        size = t.algorithm.group_size
        previews = t.pictures(self._sampled(round, step, candidates, min(PREVIEWED, size)))
        # one that is not finite has none
        spreads = [float(images[0].var(0).mean().nan_to_num(0, 0, 0)) for images in previews]
        chosen = of_main(t.world, lambda: spreads.index(max(spreads)))
        sampled = self._sampled(round, step, candidates[chosen : chosen + 1], size, first=chosen)
        ((images,),) = t.pictures(sampled)
        # rank 0's, which are shown
        images = t.world.gather(images if t.world.is_main else images[:0])
        images = images.nan_to_num(0, 0, 0)  # black, as it is shown and stored
        digest = votes.digest_of_answer(candidates[chosen], to_uint8(stills(images)))
        return AskedGroup(round, candidates[chosen], step, images, sampled, digest, changes)

    def _sampled(
        self, round: int, step: int, prompts: Sequence[str], size: int, first: int = 0
    ) -> Groups:
        """Unscored groups of `prompts`, which are the candidates from the `first` on."""
        plan = {"branch_steps": (step,), "granularities": (1,), "branch_schedule": "all"}
        algorithm = replace(self.trainer.algorithm, group_size=size, **plan)  # type: ignore[type-var]

        def noise(place: int, *purpose: Any) -> torch.Generator:
            return generator_for(
                self.trainer.config.trainer.seed, "teach", round, first + place, *purpose
            )

        return self.trainer.sample_groups(prompts, algorithm, noise, rewards={})


def of_main(world: World, decide: Callable[[], Any]) -> Any:
    """What rank 0 finds, on all ranks."""
    return json.loads(world.broadcast_text(json.dumps(decide() if world.is_main else None)))
