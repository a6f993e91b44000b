"""What people chose in pairs of pictures, as a reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from g2rpo.core.errors import UserError, counted, placed
from g2rpo.core.images import cut_picture
from g2rpo.core.rewards import Reward
from g2rpo.core.statistics import percent
from g2rpo.data.pairs import read_pairs
from g2rpo.rewards.clip import CLIPScore
from g2rpo.rewards.head import Choice, Head, PictureEncoder, features_of, fit


class Pairs(Reward):
    """What people chose: the utility of a head (`rewards.head`) that is fitted to pairs of pictures, in
    standard deviations within pairs.

    path: a table of pairs, or a folder of good and bad pictures (`data.pairs.read_pairs`).
    clip: a CLIP (folder or repository) whose features the head may use.

    Without `path` somebody else sets the `head`, as `g2rpo teach` does; scores are 0 until then.
    Pictures are read at the size of those that are scored first. UserError for a path with fewer
    than two pairs.
    """

    def __init__(self, path: str | None = None, clip: str | None = None) -> None:
        self.encoder: PictureEncoder | None = CLIPScore(clip) if clip is not None else None
        self.head: Head | None = None
        self.path = path

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        if (path := options["path"]) is not None:
            with placed("path: ", UserError):
                if len(read_pairs(path)) < 2:
                    raise UserError(f"{path}: has fewer than two pairs to fit a head to")

    def prepare(self, height: int, width: int) -> str | None:
        if self.path is None or self.head is not None:
            return None
        choices = []
        for one in read_pairs(self.path):
            images = torch.cat([cut_picture(picture, width, height) for picture in one.pictures])
            features = features_of(images, [one.prompt] * len(images), self.encoder)
            choices.append(Choice(features, tuple(range(one.liked)), str(one.prompt)))
        self.head = fit(choices)
        if self.head is None:
            raise UserError(f"{self.path}: has fewer than two pairs to fit a head to")
        interval = self.head.agreement
        return (
            f"the head, fitted to {counted(len(choices), 'choice')} in {self.path}, orders {percent(self.head.agreed)} "
            f"[{percent(interval.low)}, {percent(interval.high)}] of pairs that it was not fitted to as people did; "
            "50 % is chance"
        )

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        self.prepare(*images.shape[-2:])
        if self.head is None:
            return torch.zeros(len(prompts))
        return self.head(features_of(images, prompts, self.encoder))

    @property
    def state(self) -> dict[str, Any]:
        return {} if self.head is None else self.head.state

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        self.head = Head.of(state) if state else None
