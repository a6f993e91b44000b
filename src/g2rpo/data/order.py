"""The order of prompts: a function of the iteration."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from g2rpo.core.seeding import generator_for


class PromptOrder:
    """Every epoch is its own shuffle of all prompts; the prompts of an iteration depend only on its
    number."""

    def __init__(self, prompts: Sequence[str], seed: int) -> None:
        self.prompts = list(prompts)
        self.seed = seed
        self._shuffle = lru_cache(maxsize=2)(self._shuffled)

    def batch(self, iteration: int, size: int) -> list[str]:
        """The prompts of an iteration that takes `size` of them; an epoch's end may fall inside."""
        places = range(iteration * size, (iteration + 1) * size)
        return [
            self.prompts[self._shuffle(place // len(self.prompts))[place % len(self.prompts)]]
            for place in places
        ]

    def _shuffled(self, epoch: int) -> list[int]:
        return torch.randperm(
            len(self.prompts), generator=generator_for(self.seed, "prompts", epoch)
        ).tolist()
