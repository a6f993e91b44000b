"""A blind comparison by the person, which confirms what was learnt: which of two pictures is better,
where one is the base model's and nobody says which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from g2rpo.core.seeding import fair_sides
from g2rpo.core.statistics import proportion, sign_test

PAIRS = 12
"""Held-out prompts, at most, that are compared."""
BETTER, WORSE = 6, -4
"""Pairs in which the new picture is better less those in which it is worse, of twelve: from `BETTER`
on the person likes the model better, down from `WORSE` it is offered to go back. Twelve answers by
chance are that good with probability .07."""
Verdict = Literal["better", "worse", "no clear difference"]


@dataclass(frozen=True)
class BlindTest:
    """Pictures [N, 3, H, W], or clips, of `prompts`: by the base model and, from the same noise, by
    the weights as they were when it began, of this `version` (`Pupil`). `seed` decides which of a
    pair is on the left."""

    prompts: Sequence[str]
    before: Tensor
    now: Tensor
    seed: int
    answers: tuple[tuple[int, ...], ...] = ()
    """By pair (0,) if the base's picture is better, (1,) if the new one is; empty without a
    difference."""
    version: int = 0

    @property
    def done(self) -> bool:
        return len(self.answers) == len(self.prompts)

    def sides(self) -> tuple[int, int]:
        """Of the pair that is asked what is on the left and on the right: 0 is the base's picture,
        1 the new one."""
        turned = fair_sides(len(self.prompts), self.seed, "blind")[len(self.answers)]
        return (1, 0) if turned else (0, 1)

    def pair(self) -> list[Tensor]:
        """The pictures of the pair that is asked, from left to right."""
        return [(self.before, self.now)[side][len(self.answers)] for side in self.sides()]

    @property
    def verdict(self) -> Verdict:
        """What the answers say together, as for twelve pairs."""
        net = self.answers.count((1,)) - self.answers.count((0,))
        share = net * PAIRS / len(self.prompts)
        if share >= BETTER:
            return "better"
        return "worse" if share <= WORSE else "no clear difference"

    def __str__(self) -> str:
        """The counts, with the exact sign test and the exact interval (Clopper and Pearson) of the
        new ones' share."""
        now, before = self.answers.count((1,)), self.answers.count((0,))
        same = len(self.answers) - now - before
        said = f"Blind comparison of {len(self.answers)} pairs: now better {now}, before better {before}, no difference {same}."
        if not now + before:
            return said
        share = proportion(now / (now + before), now + before)
        ends = f"{share.mean:.0%} [{share.low:.0%}, {share.high:.0%}]"
        return f"{said} Of those that differ {ends} are better now; exact sign test p = {sign_test(now, before):.2g}."
