"""`g2rpo plan RECIPE --cards`: what a run needs on every known card, and what to change where it does not fit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from g2rpo.app.progress import say
from g2rpo.app.train import load_config
from g2rpo.assembly import components
from g2rpo.assembly.rewards import check_rewards
from g2rpo.lab.plan.advice import what_fits
from g2rpo.lab.plan.cards import CARDS
from g2rpo.lab.plan.command import listed_prompts
from g2rpo.lab.plan.network import nodes_of
from g2rpo.lab.plan.plan import Estimate, find_target, remembering
from g2rpo.lab.plan.tables import duration, in_bytes


@dataclass(frozen=True)
class OnCard:
    """A run on a card, with the overrides by which it fits (None: none do). Bytes and seconds, those of the run as it would be
    there; of the run as it is, where it does not fit."""

    overrides: list[str] | None
    needed: int
    capacity: int
    seconds: float


def plan_cards(
    recipe: str,
    overrides: Sequence[str],
    *,
    ranks: int,
    ranks_per_node: int | None,
    utilisation: float,
    as_json: bool,
    console: Console,
) -> None:
    """Prints a row for every card: one of `ranks` alike."""
    found = on_cards(recipe, overrides, ranks, utilisation, ranks_per_node)
    if as_json:
        plain = {key: {**asdict(row), "fits": row.overrides is not None} for key, row in found.items()}
        console.print(json.dumps(plain, indent=1), markup=False, highlight=False, soft_wrap=True)
    else:
        _show(recipe, found, console)


def on_cards(
    recipe: str, overrides: Sequence[str], ranks: int, utilisation: float, ranks_per_node: int | None = None
) -> dict[str, OnCard]:
    """The run on every card that can compute it."""
    config = load_config(recipe, overrides)
    check_rewards({**config.rewards, **config.evaluation.rewards})
    components.check_plans(config.algorithm, config.sampling)
    components.check_sharding(config, ranks, nodes_of(ranks, ranks_per_node))
    heldout, distinct = listed_prompts(config, [])

    made = remembering(cuda=True, heldout=heldout, distinct_prompts=distinct, ranks=ranks, ranks_per_node=ranks_per_node)

    @cache
    def changed(*extra: str) -> Estimate:
        return made(load_config(recipe, [*overrides, *extra]))

    @cache
    def fitting(capacity: int) -> list[str] | None:
        if changed().memory.needed <= capacity:
            return []
        return what_fits(config, ranks, lambda extra: changed(*extra).memory.needed <= capacity)

    found = {}
    for key, card in CARDS.items():
        if config.policy.quantize == "fp8" and not card.float8:
            continue
        capacity = find_target(key).capacity
        extra = fitting(capacity)
        run = changed(*(extra or ()))
        found[key] = OnCard(extra, run.memory.needed, capacity, run.seconds(card, utilisation).run)
    return found


def _show(recipe: str, found: dict[str, OnCard], console: Console) -> None:
    """Prints a table; overrides, which are long, stand below it by their numbers."""
    table = Table(title=f"{escape(recipe)} on cards", title_justify="left")
    table.caption = (
        "memory as drivers give it, with 5 % for gaps and 1 GiB for CUDA; time by datasheet, rewards on the CPU aside"
    )
    table.caption_justify = "left"
    for column in ("--device", "needed", "of", "to spare", "the run", "with"):
        table.add_column(column, justify="left" if column in ("--device", "with") else "right", overflow="fold")
    numbers: dict[str, int] = {}
    for key, row in sorted(found.items(), key=lambda item: item[1].capacity):
        figures = in_bytes(row.needed), in_bytes(row.capacity)
        if row.overrides is None:
            table.add_row(key, *figures, "", "", "does not fit", style="dim")
        else:
            changed = " ".join(row.overrides)
            with_ = f"changes {numbers.setdefault(changed, len(numbers) + 1)}" if changed else "as it is"
            table.add_row(key, *figures, in_bytes(row.capacity - row.needed), duration(row.seconds), with_)
    console.print(table)
    for changed, number in numbers.items():
        say(console, f"changes {number}: {changed}")
