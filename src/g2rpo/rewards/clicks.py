"""A person's taste as a reward: a head (`rewards.taste`) fitted to the clicks of `g2rpo teach`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from g2rpo.core.types import Reward
from g2rpo.rewards.taste import Encoder, Head, features_of


class Clicks(Reward):
    """What the person who clicked would like: the head's utility, in standard deviations within groups; 0 before there is one.

    `encoder` is set by the session, where another reward has one; heads that were fitted with it need it.
    """

    def __init__(self) -> None:
        self.head: Head | None = None
        self.encoder: Encoder | None = None

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        if self.head is None:
            return torch.zeros(len(prompts))
        return self.head(features_of(images, prompts, self.encoder))

    @property
    def state(self) -> dict[str, Any]:
        return {} if self.head is None else self.head.state

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        self.head = Head.of(state) if state else None
