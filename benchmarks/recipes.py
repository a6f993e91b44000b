"""Plans of every recipe for a real model, as it is, on every card: memory, and the run's time where
it fits.

    OMP_NUM_THREADS=1 python -m benchmarks.recipes --out benchmarks/results/recipes.json    # ten minutes of one core

By datasheets, as `g2rpo plan`; nothing is measured. `g2rpo plan RECIPE --cards` says what to
change where a recipe does not fit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from g2rpo.cli.plan import duration
from g2rpo.config import recipes
from g2rpo.config.read import load_config
from g2rpo.lab.plan.cards import CARDS
from g2rpo.lab.plan.plan import Planner, find_target
from g2rpo.models.load import EMBEDDED

SHOWN = ("rtx4090", "rtx5090", "a100-40", "l40s", "rtx6000ada", "a100", "h100", "h200")


def planned(recipe: str) -> dict[str, Any]:
    """Bytes needed, seconds of an iteration on an H200, and of the run on every card that holds
    it."""
    plan = Planner(recipe, []).plan()
    runs = {
        key: plan.seconds(card).run for key, card in CARDS.items() if find_target(key).holds(plan)
    }
    h200 = plan.seconds(CARDS["h200"])
    return {
        "needed": plan.memory.needed,
        "iteration_h200": sum(h200.iteration.values()),
        "run_h200": h200.run,
        "runs": runs,
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """In Markdown."""
    lines = [
        f"| | needed | {' | '.join(f'`{key}`' for key in SHOWN)} |",
        "|---" * (2 + len(SHOWN)) + "|",
    ]
    for recipe, row in found.items():
        times = " | ".join(
            duration(row["runs"][key]) if key in row["runs"] else "" for key in SHOWN
        )
        lines.append(f"| `{recipe}` | {row['needed'] / 2**30:.1f} GiB | {times} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "recipes", nargs="*", metavar="RECIPE", help="all of real models unless given"
    )
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    chosen = args.recipes or [
        name for name in recipes.names() if load_config(name, []).policy.path not in EMBEDDED
    ]
    found = {}
    for recipe in chosen:
        found[recipe] = planned(recipe)
        print(recipe, json.dumps(found[recipe]), flush=True)
    print(table(found))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
