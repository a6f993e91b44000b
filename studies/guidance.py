"""Training without guidance on the embedded scenes: what the tuned model does with guidance and
without.

    OMP_NUM_THREADS=1 python -m studies.guidance --out runs/guidance    # 20 minutes

Each cell of `--recipe` is trained with every seed, once with the recipe's guidance scale and once
with 1, and judged at both. The tiny FLUX takes its guidance scale as an input of the network, as
FLUX.1-dev does. Finished parts are not repeated. Writes guidance.json in the folder.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from g2rpo.cli.output import Output
from g2rpo.core.files import write_whole
from g2rpo.evaluation.sweep import EvaluationDirectory
from g2rpo.lab.compare.jobs import Workers
from g2rpo.lab.compare.results import lines, read_judged
from g2rpo.lab.compare.workflow import compare, judging_job
from g2rpo.run.run import Run

CELLS = {"guided": [], "unguided": ["sampling.guidance_scale=1"]}
SCALES = (3.5, 1.0)


def main() -> None:
    args = arguments()
    overrides = [
        "evaluation.num_prompts=96",
        f"evaluation.every={args.iterations}",
        f"optim.learning_rate={args.rate}",
    ]
    overrides += args.overrides
    asked = {"seeds": args.seeds, "out": args.out, "emit": Output()}
    folder = compare(args.recipe, overrides, CELLS, ("iterations", args.iterations), **asked)
    study = json.loads(folder.results.read_text())["study"]
    runs = {cell: sorted((args.out / "runs" / cell).glob("seed_*/")) for cell in CELLS}
    judged: dict[str, object] = {}
    for scale in SCALES:
        guided, at = f"policy.guidance_scale={scale:g}", args.out / "judged" / f"guidance_{scale:g}"
        places = {
            cell: [EvaluationDirectory(at / f"{cell}_{run.name}") for run in own]
            for cell, own in runs.items()
        }
        base = EvaluationDirectory(at / "base")
        todo = [
            judging_job(
                f"the base at {scale:g}", folder.run("guided", 42), base, [10], "weights=", guided
            )
        ]
        todo += [
            judging_job(
                f"{cell}, {run.name}, at {scale:g}", Run(run), place, [10], "base=false", guided
            )
            for cell, own in runs.items()
            for run, place in zip(own, places[cell], strict=True)
        ]
        if Workers(1, Output()).run(todo):
            raise SystemExit("a job failed; the same command does what is missing")
        untrained = read_judged(base)
        tables = {cell: [read_judged(place) for place in own] for cell, own in places.items()}
        stacked = {
            cell: {key: np.stack([one[key] for one in own]) for key in untrained}
            for cell, own in tables.items()
        }
        judged[f"{scale:g}"] = {
            "base": {name: float(values.mean()) for (_, name), values in untrained.items()},
            "cells": [asdict(line) for line in lines(dict.fromkeys(CELLS, untrained), stacked)],
        }
    found = {"study": study, "leads": "over guided, at the same scale", "judged_at": judged}
    write_whole(args.out / "guidance.json", json.dumps(found, indent=1).encode())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/guidance"))
    parser.add_argument("--recipe", default="scenes-fast")
    parser.add_argument("--iterations", type=int, default=75)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="of every run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
