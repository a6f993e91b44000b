"""The times that `g2rpo plan` predicts from its probe against a short run that follows at once.

    python -m benchmarks.plan --cpu-time evaluation.num_prompts=32    # the testbed on this machine's CPU

A machine that others use too is another machine a minute later. `--cpu-time` compares this process's own CPU seconds, of the
prediction and of the run; set OMP_NUM_THREADS=1 for it, because threads that wait for each other burn them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from g2rpo.app.build import Request, build
from g2rpo.assembly.config import load_config
from g2rpo.lab.plan.counting import count, settled
from g2rpo.lab.plan.probe import by_probe


def main() -> None:
    args = arguments()
    clock = time.process_time if args.cpu_time else time.perf_counter
    config = load_config(args.recipe, ["prompts.cache=off", "trainer.iterations=4", *args.overrides])
    trainer = build(Request(config=config))
    counts = count(settled(config, trainer.policy.device.type == "cuda"), len(trainer.heldout))
    predicted = by_probe(trainer, counts, distinct_prompts=0, cached=False, clock=clock)
    real: dict[str, list[float]] = {"train": [], "eval": []}
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(Request(config=config, run_dir=Path(folder)))
        began = last = clock()
        for row in trainer.train():
            now = clock()
            real[row["kind"]].append(now - last)
            last = now
        trainer.finish()
        run = clock() - began
    pairs = {
        "iteration": (sum(predicted.iteration.values()), statistics.mean(real["train"])),
        "evaluation": (predicted.evaluation, statistics.mean(real["eval"])),
        "run": (predicted.run, run),
    }
    result = {
        "recipe": args.recipe,
        "overrides": args.overrides,
        "clock": clock.__name__,
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
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds of this process, not the clock on the wall")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
