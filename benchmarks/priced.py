"""What each cut of the evening recipes costs in worth: one change at a time, at equal priced cost, in the embedded worlds.

A run costs what the plan says that it would take with FLUX.1-dev at 512 pixels on an H100: its rollouts, decodes, rewards and
training passes, not the seconds of the tiny model. Every cell is the evening setting but for one change, has as many
iterations as the evening's price buys, and its own best rate of RATES (`g2rpo compare`).

    OMP_NUM_THREADS=1 python -m benchmarks.priced scenes words --out runs/priced    # hours of one core; goes on where it was
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from g2rpo.app.events import Line
from g2rpo.core.files import write_whole
from g2rpo.lab.compare.workflow import compare
from g2rpo.lab.plan.cards import CARDS
from g2rpo.lab.plan.planner import Planner

EVENING = [
    "sampling.num_steps=8",
    "sampling.tails.forecast=true",
    "algorithm.branch_steps=[0,1,2,3]",
    "algorithm.branch_schedule=turns",
    "algorithm.granularities=[1]",
    "algorithm.tail=closed",
    "algorithm.group_size=12",
]
STEPS_16 = ["sampling.num_steps=16", "algorithm.branch_steps=[0,1,2,3,4,5,6,7]"]
CELLS = {
    "evening": [],
    "all-steps": ["algorithm.branch_schedule=all"],
    "granularities-1-2-3": ["algorithm.granularities=[1,2,3]"],
    "granularity-2": ["algorithm.granularities=[2]", "algorithm.tail=reference", "sampling.tails.forecast=false"],
    "steps-16": STEPS_16,
    "exact-tails": ["sampling.tails.forecast=false"],
    "group-6": ["algorithm.group_size=6"],
    "group-24": ["algorithm.group_size=24"],
    "paper": [
        *STEPS_16,
        "algorithm.branch_schedule=all",
        "algorithm.granularities=[1,2,3]",
        "algorithm.tail=reference",
        "sampling.tails.forecast=false",
    ],
}
"""Changes of the evening setting. {2} has published tails and no forecast, as where it was best (docs/studies.md)."""

COMMON = ["policy.tuning=lora", "trainer.prompts_per_iteration=4", "evaluation.num_prompts=96", "evaluation.every=1000"]
RATES = {"scenes": [3e-4, 6e-4, 1.2e-3], "words": [2e-4, 4e-4, 8e-4]}
ITERATIONS = {"scenes": 60, "words": 40}
"""Of the evening cell."""


def priced() -> dict[str, float]:
    """Seconds of an iteration of every cell, planned for FLUX.1-dev at 512 pixels with a LoRA on an H100."""
    planner = Planner("flux1-dev-evening", EVENING)
    return {cell: sum(planner.plan(*changes).seconds(CARDS["h100"]).iteration.values()) for cell, changes in CELLS.items()}


def study(world: str, prices: dict[str, float], seeds: int, out: Path) -> dict[str, Any]:
    iterations = {cell: max(1, round(ITERATIONS[world] * prices["evening"] / price)) for cell, price in prices.items()}
    cells = {cell: [*changes, f"budget={iterations[cell]}"] for cell, changes in CELLS.items()}
    compare(
        world,
        [*EVENING, *COMMON],
        cells,
        ("iterations", ITERATIONS[world]),
        RATES[world],
        seeds,
        pilots=1,
        steps=[10],
        jobs=1,
        out=out / world,
        controls=True,
        emit=lambda event: print(event.text, flush=True) if isinstance(event, Line) else None,
    )
    results = json.loads((out / world / "results.json").read_text())
    return {"prices": prices, **{key: value for key, value in results.items() if key != "curves"}}


def table(results: dict[str, Any]) -> str:
    """In Markdown: what an iteration costs, how many the budget buys, and the change of every reward."""
    spent, prices = results["spent"], results["prices"]
    judged = {(line["cell"], line["reward"]): line for line in results["judged"]}
    rewards = list(dict.fromkeys(line["reward"] for line in results["judged"]))
    lines = [
        f"| cell | price of an iteration | iterations | rate | {' | '.join(f'`{name}`' for name in rewards)} |",
        "|---" * (4 + len(rewards)) + "|",
    ]
    for cell, cost in spent.items():
        changes = (judged[cell, name]["change"] for name in rewards)
        texts = [f"{it['mean']:+.3f} [{it['low']:+.3f}, {it['high']:+.3f}]" for it in changes]
        price = prices[cell] / prices["evening"]
        lines.append(f"| `{cell}` | {price:.2f} | {cost['iterations']} | {cost['learning_rate']:g} | {' | '.join(texts)} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("worlds", nargs="*", default=list(RATES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/priced"))
    return parser.parse_args()


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    kept = args.out / "prices.json"
    if not kept.is_file():
        write_whole(kept, json.dumps(priced()).encode())
    prices = json.loads(kept.read_text())
    print(json.dumps(prices))
    for world in args.worlds:
        results = study(world, prices, args.seeds, args.out)
        write_whole(args.out / f"priced_{world}.json", json.dumps(results, indent=1).encode())
        print(table(results))


if __name__ == "__main__":
    main()
