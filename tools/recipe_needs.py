"""Computes what each recipe needs, for the list of `g2rpo recipes`, by `g2rpo plan`.

    python -m tools.recipe_needs [RECIPE ...]

Writes src/g2rpo/config/recipes/needs.json; run it after a recipe or the planner has changed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from g2rpo.config import recipes
from g2rpo.config.read import load_config
from g2rpo.lab.plan.cards import CARDS
from g2rpo.lab.plan.plan import Planner
from g2rpo.models.load import EMBEDDED

CARD = CARDS["h100"]


def needs_of(recipe: str) -> dict[str, Any]:
    """GiB on each card, hours on H100s, and GiB of rewards to download: on one card, or where that
    is too small on eight that share the weights."""
    cards, plan = 1, Planner(recipe, []).plan(cuda=True)
    if plan.memory.needed > CARD.memory_gib * 2**30:
        cards, plan = 8, Planner(recipe, ["trainer.sharding=full"], 8).plan(cuda=True)
    gib, hours = 2**30, plan.seconds(CARD).run / 3600
    return {
        "cards": cards,
        "gib": round(plan.memory.needed / gib, 1),
        "hours": float(f"{hours:.2g}"),
        "rewards_gib": round(plan.memory.files.get("the rewards", 0) / gib, 1),
    }


def main() -> None:
    file = recipes.NEEDS
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    names = sys.argv[1:] or recipes.names()
    for name in names:
        if load_config(name, []).policy.path not in EMBEDDED:
            known[name] = needs_of(name)
            print(name, known[name], flush=True)
    file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
