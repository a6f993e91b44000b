"""Prompts from a source named in a config, and their order in a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from g2rpo.core.data import spelling_apart
from g2rpo.core.errors import UserError, counted, did_you_mean, placed
from g2rpo.core.images import images_of
from g2rpo.core.noise import generator_for
from g2rpo.core.plugins import refuse_object
from g2rpo.data.sources import STARTER, read_prompts
from g2rpo.data.testbed import prompts

TESTBED_LISTS = ("testbed:train", "testbed:heldout", "words:train", "words:heldout")
LISTS = (*TESTBED_LISTS, *STARTER)
"""Prompts that come with the package."""


def build_prompts(source: str, key: str) -> list[str]:
    """The prompts of a list that comes with the package, or of a source for `read_prompts`. `key` names
    the config entry."""
    refuse_object(key, source)
    named = source == "testbed" or source.startswith(("testbed:", "words:", "starter:"))
    if named and source not in LISTS:
        raise UserError(f"{key}={source}: unknown list.{did_you_mean(source, LISTS)}")
    if source not in TESTBED_LISTS:
        with placed(f"{key}={source}: ", UserError):
            return list[str](read_prompts(source))
    world, _, split = source.partition(":")
    return list(prompts("train" if split == "train" else "heldout", world))


def starter_caution(train: str, heldout: str) -> str | None:
    """A caution about one's own training prompts that are evaluated on the starter set."""
    if train in LISTS or not heldout.startswith("starter:"):
        return None
    return (
        f"prompts.train={train}, but held-out pictures are of {heldout}, which comes with the package; "
        "evaluation.prompts=FILE takes prompts like your own that are not trained on"
    )


def trained_on(prompts: Sequence[str], heldout: Sequence[str]) -> str | None:
    """A caution about held-out prompts that are training prompts too, with the same input
    pictures."""
    known, held = (
        [(spelling_apart(prompt), *images_of(prompt)) for prompt in each]
        for each in (prompts, heldout)
    )
    if not (shared := sum(map({*known}.__contains__, held))):
        return None
    are = "is a training prompt" if shared == 1 else "are training prompts"
    return (
        f"{shared} of {counted(len(heldout), 'held-out prompt')} {are} too: their scores do not tell how the model does on "
        "others; evaluation.prompts=FILE takes prompts that are not trained on"
    )


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
