"""Whether `g2rpo train --find-rate` picks a good rate: its pilots of many seeds beside whole runs
at the same rates.

    OMP_NUM_THREADS=1 python -m studies.find_rate scenes-fast words --out runs/find_rate    # two hours of a core

In each world, whole runs of `--whole` seeds at every rate give the final gain on held-out prompts,
and pilots of `--pilots` other seeds pick a rate each. Whole runs also stand for pilots as long as
the run: each seed's best rate beside the mean of the other seeds. Runs are shorter than the
recipes' (WORLDS). Every run is kept in the folder, and an interrupted command goes on. Writes
find_rate.json, of what is there; with `--whole 0 --pilots 0` it only does that.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g2rpo.app.build import Request, trainer_parts
from g2rpo.assembly.checks import check
from g2rpo.assembly.config import load_config
from g2rpo.core.errors import UserError
from g2rpo.core.files import write_whole
from g2rpo.core.statistics import interval
from g2rpo.run.rates import FACTORS, ONE_ERROR, PILOT_SEEDS, Sweep, gain_at, gains, good_rates
from g2rpo.run.run import Run
from g2rpo.training.pilots import Pilots
from g2rpo.training.trainer import Trainer

WORLDS = {
    "scenes-fast": ["trainer.iterations=60", "evaluation.rewards.scene_preference="],
    "words": ["trainer.iterations=12", "trainer.prompts_per_iteration=4"],
}
FIRST, FIRST_PILOT = 42, 52
"""The first seeds of whole runs and of pilots."""
COMMON = [
    "evaluation.num_prompts=96",
    "evaluation.every=1000",
    "evaluation.controls=false",
    "trackers=[]",
]


def config_of(recipe: str, seed: int, factor: float = 1.0) -> Any:
    own = load_config(recipe, [*WORLDS[recipe], *COMMON, f"trainer.seed={seed}"])
    optim = own.optim.model_copy(update={"learning_rate": factor * own.optim.learning_rate})
    return own.model_copy(update={"optim": optim})


def whole_run(parts: dict[str, Any], seed: int, factor: float, recipe: str) -> dict[str, Any]:
    """The gain on each held-out prompt, and the alarms."""
    trainer = Trainer(**{**parts, "config": config_of(recipe, seed, factor)})
    alarms: dict[str, str] = {}
    for row in trainer.train():
        alarms |= row.get("alarms", {})
    base, final = trainer.evaluator.baseline, trainer.final
    assert base is not None and final is not None
    weights = {name: entry.weight for name, entry in trainer.config.rewards.items()}
    before, after = (
        {name: it.scores[name].double().numpy() for name in weights} for it in (base, final)
    )
    return {
        "gains": [round(float(value), 4) for value in gains(before, after, weights)],
        "alarms": alarms,
    }


def work(recipe: str, whole: int, pilots: int, out: Path) -> None:
    """Runs what is missing, seed by seed."""
    first = config_of(recipe, FIRST)
    prompts, heldout = check(first)
    parts = {"config": first, **trainer_parts(Request(config=first), prompts, heldout)}
    start = Pilots(parts)
    for seed in range(FIRST_PILOT, FIRST_PILOT + pilots):
        run = Run(out / recipe / f"pilots_{seed + PILOT_SEEDS}")
        run.path.mkdir(parents=True, exist_ok=True)
        sweep = run.read_rates() or Sweep.around(first.optim.learning_rate)
        start.reset()
        try:
            Pilots({**parts, "config": config_of(recipe, seed)}).find(
                sweep, run, tell=lambda line: print(line, flush=True)
            )
        except UserError as error:
            print(error)
    for seed in range(FIRST, FIRST + whole):
        for factor in FACTORS:
            path = out / recipe / f"whole_{seed}_{factor:g}.json"
            if not path.is_file():
                start.reset()
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, json.dumps(whole_run(parts, seed, factor, recipe)).encode())
                print(path, flush=True)


def summary(recipe: str, out: Path) -> dict[str, Any]:
    """By rate the mean final gain of all whole seeds; each pilot seed's choice, and whether it is
    within one standard error of the best."""
    rates = [factor * config_of(recipe, FIRST).optim.learning_rate for factor in FACTORS]
    files = {
        rate: sorted((out / recipe).glob(f"whole_*_{factor:g}.json"))
        for rate, factor in zip(rates, FACTORS, strict=True)
    }
    seeds = sorted(
        set.intersection(*({path.name.split("_")[1] for path in of} for of in files.values()))
    )
    runs = {
        rate: [json.loads(path.read_text()) for path in of if path.name.split("_")[1] in seeds]
        for rate, of in files.items()
    }
    if not seeds:
        return {}
    tables = {rate: np.array([run["gains"] for run in of]) for rate, of in runs.items()}
    good = good_rates_of(tables)
    choices = []
    for folder in sorted((out / recipe).glob("pilots_*")):
        sweep = Run(folder).read_rates()
        if sweep is None or sweep.missing():
            continue
        try:
            rate = sweep.choose()
        except UserError:
            rate = None
        choices.append(
            {
                "seed": folder.name[7:],
                "rate": rate,
                "good": rate in good,
                "pilots": [asdict(it) for it in sweep.pilots],
            }
        )
    as_long = []
    for number, seed in enumerate(seeds):
        rate = max(rates, key=lambda rate: tables[rate][number].mean())
        others = (
            good_rates_of({rate: np.delete(table, number, 0) for rate, table in tables.items()})
            if len(seeds) > 2
            else []
        )
        as_long.append({"seed": seed, "rate": rate, "good": rate in others})
    return {
        "config": [*WORLDS[recipe], *COMMON],
        "whole": {
            f"{rate:g}": {
                "gain": float(tables[rate].mean()),
                "error": standard_error(tables[rate]),
                "by_seed": [round(float(value), 4) for value in tables[rate].mean(1)],
                "alarms": [sorted(run["alarms"]) for run in runs[rate]],
            }
            for rate in rates
        },
        "good_rates": good,
        "good": sum(choice["good"] for choice in choices),
        "of": len(choices),
        "as_long_as_the_run": as_long,
        "choices": choices,
    }


def standard_error(table: NDArray[np.float64]) -> float:
    """Over seeds and prompts [S, N], of the crossed bootstrap."""
    found = interval(table, level=ONE_ERROR)
    return (found.high - found.low) / 2


def good_rates_of(tables: Mapping[float, NDArray[np.float64]]) -> list[float]:
    """The rates whose mean gain over whole runs is within a standard error of the best's; alarms do
    not count."""
    return good_rates([gain_at(rate, [*table], {}) for rate, table in tables.items()])


def main() -> None:
    args = arguments()
    for world in args.worlds if args.whole or args.pilots else ():
        work(world, args.whole, args.pilots, args.out)
    found = {world: summary(world, args.out) for world in WORLDS if (args.out / world).is_dir()}
    if not found:
        raise SystemExit(f"{args.out}: holds no runs; name their --out, or make some (--whole 10)")
    write_whole(args.out / "find_rate.json", json.dumps(found, indent=1).encode())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("worlds", nargs="*", default=list(WORLDS))
    parser.add_argument("--whole", type=int, default=10)
    parser.add_argument("--pilots", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/find_rate"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
