"""A person's taste as a reward: a head (`rewards.taste`) fitted to the clicks of `g2rpo teach`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from g2rpo.core.errors import UserError
from g2rpo.core.files import local
from g2rpo.core.types import Reward
from g2rpo.rewards import votes
from g2rpo.rewards.clip import CLIPScore
from g2rpo.rewards.taste import Choice, Encoder, Head, features_of, fit


class Clicks(Reward):
    """What the person who clicked would like: the head's utility, in standard deviations within groups; 0 before there is one.

    run: the directory of a session of `g2rpo teach`, to whose answers the head is fitted.
    clip: a CLIP (folder or repository) whose features the head may use.

    A session fits the head itself, and sets `encoder` to another reward that has features. UserError for a run with too few
    answers.
    """

    files: ClassVar[Mapping[str, tuple[str, ...]]] = {"run": (votes.FILE,)}

    def __init__(self, run: str | None = None, clip: str | None = None) -> None:
        self.encoder: Encoder | None = CLIPScore(clip) if clip is not None else None
        self.head: Head | None = None
        if run is not None:
            answered = votes.answered(local(run))
            choices = [
                Choice(features_of(images, [vote.prompt] * len(images), self.encoder), vote.liked) for vote, images in answered
            ]
            self.head = fit(choices)
            if self.head is None:
                raise UserError(f"reward clicks: {run} has fewer than two answers to fit a head to")

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
