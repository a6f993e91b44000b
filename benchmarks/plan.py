"""The times that `g2rpo plan` predicts from its probe against a short run that follows at once.

    python -m benchmarks.plan                                         # the testbed on this machine
    python -m benchmarks.plan --recipe scenes trainer.iterations=6 --out benchmarks/results/plan.json

Both see the machine as it is: on a busy one run this more than once.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from g2rpo.commands.train import build_trainer, load_config
from g2rpo.cost.counting import count
from g2rpo.cost.probe import by_probe


def main() -> None:
    args = arguments()
    config = load_config(args.recipe, ["prompts.cache=off", "trainer.iterations=4", *args.overrides])
    trainer = build_trainer(config, None)
    predicted = by_probe(trainer, count(config, len(trainer.heldout)), distinct_prompts=0, cached=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer, began = build_trainer(config, Path(folder)), time.perf_counter()
        rows = list(trainer.train())
        trainer.finish()
        run = time.perf_counter() - began
    iterations = [row for row in rows if row["kind"] == "train"]
    evaluations = [row["seconds"] for row in rows if row["kind"] == "eval"]
    real = {phase: sum(row[f"seconds/{phase}"] for row in iterations) / len(iterations) for phase in predicted.iteration}
    pairs = {
        **{phase: (seconds, real[phase]) for phase, seconds in predicted.iteration.items()},
        "iteration": (sum(predicted.iteration.values()), sum(real.values())),
        "evaluation": (predicted.evaluation, sum(evaluations) / len(evaluations)),
        "run": (predicted.run, run),
    }
    result = {
        "recipe": args.recipe,
        "overrides": args.overrides,
        "seconds": {name: {"predicted": p, "real": r, "error": p / r - 1} for name, (p, r) in pairs.items()},
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(result, indent=1))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE")
    parser.add_argument("--recipe", default="scenes")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
