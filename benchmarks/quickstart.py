"""The quickstart over several seeds: base against tuned on held-out prompts, for the README's table.

    python -m benchmarks.quickstart                                   # trains on the recipe's rewards
    python -m benchmarks.quickstart 'algorithm.granularities=[1,2]' --name granular   # the same with overrides

A seed changes everything random: prompts' order, exploration, adapters, and the noise of the evaluation. Runs that are
finished already are read, not repeated. Writes benchmarks/results/NAME.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from rich.console import Console

from g2rpo.commands.train import train
from g2rpo.monitor.metrics import read_metrics


def main() -> None:
    args = arguments()
    runs = []
    for seed in args.seeds:
        folder = args.runs / f"{args.name}-{seed}"
        if not (folder / "results.json").is_file():
            overrides = [*args.overrides, f"trainer.seed={seed}"]
            train("scenes", overrides, folder, resume=(folder / "config.yaml").is_file(), console=Console())
        rows = read_metrics(folder)
        results = json.loads((folder / "results.json").read_text())
        seconds = sum(row["seconds"] for row in rows)
        runs.append({"seed": seed, "seconds": seconds, "iterations": rows[-1]["iteration"], **results})
    rewards = list(runs[0]["rewards"])
    print(f"{'':20} {'base':>9} {'tuned':>9}   change, mean over {len(runs)} seeds (their range)")
    for name in rewards:
        of = {side: [run["rewards"][name][side] for run in runs] for side in ("base", "tuned")}
        changes = [tuned - base for base, tuned in zip(of["base"], of["tuned"], strict=True)]
        base, tuned, change = (statistics.mean(values) for values in (of["base"], of["tuned"], changes))
        print(f"{name:20} {base:9.4g} {tuned:9.4g}   {change:+.4g} ({min(changes):+.4g} to {max(changes):+.4g})")
    print("seconds:", ", ".join(f"{run['seconds']:.0f}" for run in runs))
    out = Path("benchmarks/results") / f"{args.name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"overrides": args.overrides, "runs": runs}, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--name", default="quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
