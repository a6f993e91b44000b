"""What a run needs on every known card, and what to change where it does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from g2rpo.app.train import load_config
from g2rpo.assembly import components
from g2rpo.assembly.rewards import check_rewards
from g2rpo.lab.plan.advice import what_fits
from g2rpo.lab.plan.answer import listed_prompts
from g2rpo.lab.plan.cards import CARDS
from g2rpo.lab.plan.network import nodes_of
from g2rpo.lab.plan.plan import Estimate, find_target, remembering


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
    config = load_config(recipe, overrides)
    check_rewards({**config.rewards, **config.evaluation.rewards})
    components.check_plans(config.algorithm, config.sampling)
    components.check_sharding(config, ranks, nodes_of(ranks, ranks_per_node))
    heldout, distinct = listed_prompts(config, [])

    estimate = remembering(cuda=True, heldout=heldout, distinct_prompts=distinct, ranks=ranks, ranks_per_node=ranks_per_node)

    @cache
    def changed(*extra: str) -> Estimate:
        return estimate(load_config(recipe, [*overrides, *extra]))

    @cache
    def fitting(capacity: int) -> list[str] | None:
        if changed().memory.needed <= capacity:
            return []
        return what_fits(config, ranks, lambda extra: changed(*extra).memory.needed <= capacity)

    rows = {}
    for key, card in CARDS.items():
        if config.policy.quantize == "fp8" and not card.float8:
            continue
        capacity = find_target(key).capacity
        extra = fitting(capacity)
        run = changed(*(extra or ()))
        rows[key] = OnCard(extra, run.memory.needed, capacity, run.seconds(card).run)
    return rows
