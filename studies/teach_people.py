"""Simulated people: what they like, and how they click and compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from g2rpo.assembly.config import load_config
from g2rpo.assembly.rewards import build_rewards
from g2rpo.core.seeding import generator_for
from g2rpo.core.types import Reward
from g2rpo.lab.teach.session import Session
from g2rpo.rewards.taste import Clicks

NOISE, WRONG, ALIKE = 0.3, 0.1, 0.3
"""Deviations within groups of the noise of a utility; the share of answers at random; utilities of
a pair that differ by less are no difference."""


def ink(images: Tensor) -> Tensor:
    """How far each pixel is from the ground, [B, H, W]."""
    return (images - images.flatten(2).median(2).values[..., None, None]).abs().amax(1)


def compact(images: Tensor) -> Tensor:
    """Minus the extent of what is drawn."""
    mass = ink(images)
    y, x = (torch.linspace(-1, 1, length) for length in mass.shape[1:])
    total = mass.sum((1, 2)) + 1e-6
    v, u = (mass.sum(2) * y).sum(1) / total, (mass.sum(1) * x).sum(1) / total
    return (
        -(mass * ((y[None, :, None] - v[:, None, None]) ** 2 + (x - u[:, None])[:, None] ** 2)).sum(
            (1, 2)
        )
        / total
    )


def top(images: Tensor) -> Tensor:
    """How high up what is drawn lies, from -1 to 1."""
    rows = ink(images).sum(2)
    return -(rows * torch.linspace(-1, 1, rows.shape[1])).sum(1) / (rows.sum(1) + 1e-6)


TASTES: dict[str, Callable[[Tensor], Tensor]] = {
    "warm": lambda images: (images[:, 0] - images[:, 2]).mean((1, 2)),
    "large": lambda images: (ink(images) > 0.25).float().mean((1, 2)),
    "compact": compact,
    "dark": lambda images: -images.mean((1, 2, 3)),
    "green": lambda images: (images[:, 1] - images[:, [0, 2]].mean(1)).mean((1, 2)),
    "top": top,
    "sparse": lambda images: -ink(images).mean((1, 2)),
    "symmetric": lambda images: -(images - images.flip(3)).abs().mean((1, 2, 3)),
}
SPELT = "spelt"
"""The taste of who reads: the word that is spelt best. In words."""


@cache
def reader() -> Reward:
    """The reward `ocr` of words."""
    return build_rewards({"ocr": load_config("words", []).rewards["ocr"]})["ocr"]


def values_of(taste: str, images: Tensor, prompts: Sequence[str]) -> Tensor:
    """What a taste says of pictures."""
    return (
        reader().scores(images, list(prompts)).float() if taste == SPELT else TASTES[taste](images)
    )


def click(
    images: Tensor, prompt: str, round: int, taste: str, person: str, seed: int
) -> tuple[int, ...]:
    """The pictures of a round's group that a simulated person chooses; none: skipped."""
    values = values_of(taste, images, [prompt] * len(images))
    return chosen(values, round, taste, person, seed)


def chosen(values: Tensor, round: int, taste: str, person: str, seed: int) -> tuple[int, ...]:
    """`click` of pictures of which the taste says these values."""
    generator = generator_for(seed, "person", round)
    if taste == SPELT and values.max() == values.min():
        return ()
    utility = (values - values.mean()) / values.std().clamp(min=1e-6) + NOISE * torch.randn(
        len(values), generator=generator
    )
    wrong = person == "random" or float(torch.rand((), generator=generator)) < WRONG
    if wrong:
        return (int(torch.randint(len(values), (), generator=generator)),)
    return (
        tuple(torch.nonzero(utility > 0.5).flatten().tolist())
        if person == "several"
        else (int(utility.argmax()),)
    )


def within(values: Tensor) -> float:
    """The standard deviation within prompts of values [P, 2]."""
    return float((values[:, 0] - values[:, 1]).square().mean().div(2).sqrt())


class Chosen(Reward):
    """1 for the picture of each group that a simulated person clicks, 0 for the others: clicks
    without a head."""

    group = True
    batch_size = 2**31  # a group is never divided

    def __init__(self, taste: str, seed: int) -> None:
        self.taste, self.seed, self.clicks = taste, seed, 0

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        scores = torch.zeros(len(images))
        scores[list(click(images, prompts[0], self.clicks, self.taste, "every", self.seed))] = 1
        self.clicks += 1
        return scores


class Known(Clicks):
    """In the place of the head a taste itself, in standard deviations within groups; or nothing:
    the guard alone."""

    group = True
    batch_size = 2**31  # a group is never divided

    def __init__(self, taste: str | None) -> None:
        super().__init__()
        self.taste = taste

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        if self.taste is None:
            return torch.zeros(len(prompts))
        return values_of(self.taste, images, prompts)


def compare(session: Session, taste: str, base: dict[str, Tensor], seed: int) -> dict[str, Any]:
    """Answers the comparison that is asked as the person sees it; returns what came of it."""
    generator = generator_for(seed, "person", "pairs", session.asked)
    while (test := session.comparing) is not None:
        pair = len(test.answers)
        values = values_of(taste, torch.stack(test.pair()) / 255, [test.prompts[pair]] * 2)
        utility = values / within(base[taste]) + NOISE * torch.randn(2, generator=generator)
        side = int(utility.argmax())
        if float(torch.rand((), generator=generator)) < WRONG:
            side = int(torch.randint(2, (), generator=generator))
        alike = float(utility.diff().abs()) < ALIKE
        session.compare(() if alike else (side,), pair=pair)
    blind = session.blind
    assert blind is not None
    net = blind.answers.count((1,)) - blind.answers.count((0,))
    return {"groups": session.asked, "verdict": blind.verdict, "net": net}
