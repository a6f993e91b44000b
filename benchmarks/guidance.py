"""Training without guidance on the embedded scenes: what the tuned model does with guidance and without.

    OMP_NUM_THREADS=1 python -m benchmarks.guidance --out runs/guidance    # 20 minutes

Each cell of `--recipe` is trained with every seed, once with the recipe's guidance scale and once with 1, and judged at both.
The tiny FLUX takes its guidance scale as an input of the network, as FLUX.1-dev does. Finished parts are not repeated.
Writes guidance.json in the folder.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from g2rpo.cli.output import Output
from g2rpo.core.files import write_whole
from g2rpo.core.plain import parse_json
from g2rpo.lab.compare.jobs import Workers, locked
from g2rpo.lab.compare.outcomes import Judged, judged_scores, lines
from g2rpo.lab.compare.study import Study
from g2rpo.lab.compare.workflow import Workspace

CELLS = {"guided": [], "unguided": ["sampling.guidance_scale=1"]}
SCALES = (3.5, 1.0)


def scores(folder: Path) -> Judged:
    return judged_scores([parse_json(row) for row in (folder / "pictures.jsonl").read_text().splitlines()])


def main() -> None:
    args = arguments()
    study = Study(
        recipe=args.recipe,
        overrides=["evaluation.num_prompts=96", f"evaluation.every={args.iterations}", *args.overrides],
        cells=CELLS,
        budget=args.iterations,
        unit="iterations",
        rates=[args.rate],
        seeds=args.seeds,
        pilots=1,
        steps=[10],
    )
    with locked(args.out) as lock:
        workers, work = Workers(1, lock, Output()), Workspace(study, args.out)
        runs = {cell: work.runs(cell, args.rate, args.iterations) for cell in CELLS}
        workers.run(work.training(runs[cell][seed]) for seed in next(iter(runs.values())) for cell in CELLS)  # seed by seed
        judged: dict[str, object] = {}
        for scale in SCALES:
            guided, at = f"policy.guidance_scale={scale:g}", args.out / "judged" / f"guidance_{scale:g}"
            some = next(iter(runs["guided"].values())).folder
            todo = [work.judging(f"the base at {scale:g}", some, at / "base", "weights=", guided)]
            todo += [
                work.judging(f"{cell}, seed {seed}, at {scale:g}", run.folder, at / f"{cell}_{seed}", "base=false", guided)
                for cell, own in runs.items()
                for seed, run in own.items()
            ]
            workers.run(todo)
            base, tables = scores(at / "base"), {}
            for cell, own in runs.items():
                of_runs = [scores(at / f"{cell}_{seed}") for seed in own]
                tables[cell] = {key: np.stack([table[key] for table in of_runs]) for key in base}
            judged[f"{scale:g}"] = {
                "base": {name: float(values.mean()) for (_, name), values in base.items()},
                "cells": [asdict(line) for line in lines(base, tables)],
            }
        found = {"study": study.model_dump(mode="json"), "leads": "over guided, at the same scale", "judged_at": judged}
        write_whole(args.out / "guidance.json", json.dumps(found, indent=1).encode())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/guidance"))
    parser.add_argument("--recipe", default="scenes-fast")
    parser.add_argument("--iterations", type=int, default=75)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="of every run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
