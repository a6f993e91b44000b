"""What a head has learnt and what has changed, in words, by statistics that have a name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from g2rpo.lab.teach.pupil import Learnt
from g2rpo.rewards.picture_features import WORDS, named_statistics

LIKED, NOT_LIKED = 0.4, 0.3
"""The correlation of a statistic with the head's utility within groups from which on it is told as
the person's taste; and that below which nobody asked for it."""
TOLD = 2
"""Statistics of a taste that are told, at most."""
SEEN = 0.25
"""Standard deviations within groups from which on a change is told."""
LEAST = 1 / 255
"""The least such deviation, a step of 8 bit: of grey pictures that of saturation is rounding."""


@dataclass(frozen=True)
class Told:
    """By named statistic, in the order of `WORDS`: its correlation with the head's utility within
    the groups that were shown, and the change of held-out pictures in standard deviations within
    these groups."""

    correlation: Tensor
    change: Tensor
    trusted: bool
    """Whether the head agrees with the person more than by chance."""

    @classmethod
    def of(cls, learnt: Learnt) -> Told | None:
        """None without a head."""
        head, groups = learnt.head, [choice.features for choice in learnt.choices.values()]
        if head is None:
            return None
        statistics = torch.cat([_centred(named_statistics(one)) for one in groups])
        utilities = torch.cat([_centred(head(one).double()) for one in groups])
        lengths = statistics.norm(dim=0).clamp(min=1e-12)
        correlation = statistics.T @ utilities / (lengths * utilities.norm().clamp(min=1e-12))
        change = torch.zeros_like(correlation)
        if learnt.heldout is not None:
            before, now = (named_statistics(one).mean(0) for one in learnt.heldout)
            change = (now - before) / (lengths / len(statistics) ** 0.5).clamp(min=LEAST)
        return cls(correlation, change, head.trust > 0)

    @property
    def taste(self) -> str:
        """What the person seems to like; "" if no named statistic tells it, or if the head is no
        guide."""
        if not self.trusted:
            return ""
        order = self.correlation.abs().argsort(descending=True)[:TOLD]
        return ", ".join(
            _word(place, float(self.correlation[place]))
            for place in order.tolist()
            if self.correlation[place].abs() >= LIKED
        )

    @property
    def unasked(self) -> str:
        """The largest change of held-out pictures that the person did not ask for, with its size;
        "" for none that can be seen."""
        asked = (self.correlation * self.change.sign()) >= NOT_LIKED
        change = torch.where(asked, 0, self.change)
        place = int(change.abs().argmax())
        size = float(change[place])
        return f"{_word(place, size)} by {abs(size):.1f} deviations" if abs(size) >= SEEN else ""


def _centred(values: Tensor) -> Tensor:
    return values - values.mean(0)


def _word(place: int, sign: float) -> str:
    return list(WORDS.values())[place][sign < 0]
