"""What a run needs on every known card, and what to change where it does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from g2rpo.lab.plan.cards import CARDS
from g2rpo.lab.plan.plan import find_target
from g2rpo.lab.plan.planner import Planner


@dataclass(frozen=True)
class OnCard:
    """A run on a card, with the overrides by which it fits (None: none do). Bytes and seconds, those of the run as it would be
    there; of the run as it is, where it does not fit."""

    overrides: list[str] | None
    needed: int
    capacity: int
    seconds: float

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.overrides is not None}


def on_cards(recipe: str, overrides: Sequence[str], ranks: int, ranks_per_node: int | None = None) -> dict[str, OnCard]:
    """The run on every card that can compute it."""
    planner = Planner(recipe, overrides, ranks, ranks_per_node)
    rows = {}
    for key, card in CARDS.items():
        if planner.config.policy.quantize == "fp8" and not card.float8:
            continue
        target = find_target(key)
        extra = planner.fitting(target)
        run = planner.plan(*(extra or ()))
        rows[key] = OnCard(extra, run.memory.needed, target.capacity, run.seconds(card).run)
    return rows
