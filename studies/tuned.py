"""Five algorithms, each at its best of twelve settings, in the worlds and at the budgets of the
registered study.

A pilot tries every learning rate with every group size, and each of these twelve pairs with one of
three levels of a third setting, in turn: the noise `eta`, or for DiffusionNFT the share of the
times that it trains. The pilot's seed and prompts are those of the registered study's pilots, and
so are the seeds and the held-out prompts of the five runs at the best.

    OMP_NUM_THREADS=1 python -m studies.tuned scenes words-alone --jobs 2    # three hours; goes on where it was
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from g2rpo.app.events import Line
from g2rpo.assembly.config import load_config
from g2rpo.config.schema import Config
from g2rpo.core.files import write_whole
from g2rpo.core.statistics import Interval, interval
from g2rpo.evaluation.work import iterations_within
from g2rpo.lab.compare.jobs import Job, working
from g2rpo.lab.compare.results import History, read_run
from g2rpo.lab.compare.study import StudyDirectory
from g2rpo.lab.compare.workflow import judging_job, run_overrides, training_job
from g2rpo.run.rates import PILOT_SEEDS, gains
from g2rpo.run.run import Run
from studies.registered import CELLS, COMMON, WORLDS, leads, scores_of, verdict

RATES = {"scenes": [2e-4, 5e-4, 1.2e-3, 3e-3], "words-alone": [1e-4, 2e-4, 4e-4, 8e-4]}
GROUPS = (6, 12, 24)
THIRD: dict[str, tuple[str, tuple[float, ...]]] = {
    "g2rpo": ("eta", (0.35, 0.7, 1.05)),
    "mixgrpo-1": ("eta", (0.35, 0.7, 1.05)),
    "flow_grpo": ("eta", (0.35, 0.7, 1.05)),
    "dancegrpo": ("eta", (0.15, 0.3, 0.45)),
    "diffusion_nft": ("share", (0.1, 0.2, 0.4)),
}
"""Half of the registered study's value, that value and one and a half times it; of the share half
and twice."""


def candidates(world: str, name: str) -> dict[str, tuple[float, list[str]]]:
    """By name of a setting its learning rate and the cell's changes."""
    setting, levels = THIRD[name]
    fixed = {key: str(WORLDS[world][key]).replace(" ", "") for key in ("stay", "steps")}
    changes = [change.format_map(fixed) for change in CELLS[name]]
    prompts = int(next(change for change in changes if "prompts" in change).partition("=")[2])
    found = {}
    for (number, rate), (place, group) in product(enumerate(RATES[world]), enumerate(GROUPS)):
        level = levels[(number + place) % len(levels)]
        own = [
            f"algorithm.group_size={group}",
            f"trainer.prompts_per_iteration={max(1, prompts * 12 // group)}",
        ]
        found[f"{name}-{rate:g}-{group}-{level:g}"] = (
            rate,
            [*changes, *own, f"algorithm.{setting}={level}"],
        )
    return found


def study(world: str, jobs: int, out: Path) -> dict[str, Any]:
    """Trains what is missing; by algorithm all pilots' gains, the setting taken, and the results of
    its runs."""
    setting, folder = WORLDS[world], out / world
    settings = {name: candidates(world, name) for name in THIRD}
    first = setting["first_seed"]
    overrides = {
        title: [*setting["overrides"], *COMMON, *changes, f"optim.learning_rate={rate}"]
        for tried in settings.values()
        for title, (rate, changes) in tried.items()
    }
    configs = {title: load_config(setting["recipe"], own) for title, own in overrides.items()}
    iterations = {
        title: iterations_within(config, setting["budget"]) for title, config in configs.items()
    }

    def training(title: str, name: str, seed: int, run: Path, *changes: str) -> Job | None:
        own = [*overrides[title], *run_overrides(configs[title], seed, iterations[title]), *changes]
        return training_job(name, setting["recipe"], own, Run(run))

    def do(jobs: Iterable[Job | None]) -> None:
        if workers.run(jobs):
            raise SystemExit("the same command does what is missing")

    with working(
        folder,
        jobs,
        lambda event: print(event.text, flush=True) if isinstance(event, Line) else None,
    ) as workers:
        pilots = {title: folder / "pilots" / title for title in overrides}
        do(
            training(
                title,
                f"pilot of {title}",
                first + PILOT_SEEDS,
                run,
                f"evaluation.prompts={configs[title].prompts.train}",
            )
            for title, run in pilots.items()
        )
        gain = {
            title: gain_of(read_run(Run(run)), weights_of(configs[title]))
            for title, run in pilots.items()
        }
        best = {name: max(tried, key=gain.__getitem__) for name, tried in settings.items()}
        study, seeds = StudyDirectory(folder), range(first, first + setting["seeds"])
        pairs = list(product(best.items(), seeds))
        do(
            training(title, f"{name}, seed {seed}", seed, study.run(name, seed).path)
            for (name, title), seed in pairs
        )
        do(
            [
                judging_job(
                    "judging the base",
                    study.run(next(iter(best)), first),
                    study.judged("base"),
                    [10],
                    "weights=",
                )
            ]
        )
        do(
            judging_job(
                f"judging {name}, seed {seed}",
                study.run(name, seed),
                study.judged(name, seed),
                [10],
                "base=false",
            )
            for (name, _), seed in pairs
        )
    base, ours = scores_of(world, "base", out), next(iter(THIRD))
    scores = {name: scores_of(world, name, out) for name in THIRD}
    return {
        "pilots": {
            name: {title: gain[title] for title in tried} for name, tried in settings.items()
        },
        "best": best,
        "iterations": {name: iterations[title] for name, title in best.items()},
        "base": base.mean(),
        "by_seed": {name: own.mean(1).tolist() for name, own in scores.items()},
        "change": {name: asdict(interval(own - base)) for name, own in scores.items()},
        "lead": {
            name: asdict(lead)
            for name, lead in leads(world, ours, list(THIRD)[1:], THIRD, out).items()
        },
    }


def gain_of(run: History, weights: Mapping[str, float]) -> float:
    return float(np.nanmean(gains(run.scores[0], run.scores[-1], weights)))


def weights_of(config: Config) -> dict[str, float]:
    return {name: entry.weight for name, entry in config.rewards.items()}


def table(world: str, found: dict[str, Any], registered: dict[str, Any]) -> str:
    """In Markdown: settings, gains beside those at the best of three rates alone, leads; then the
    pilots."""
    first = next(iter(THIRD))
    lines = [
        f"| | best of twelve: rate, group, third setting | iterations | `{WORLDS[world]['right']}`, from {found['base']:.3f} | "
        f"at the best of three rates alone | lead of `{first}` | |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, title in found["best"].items():
        rate, group, level = title.removeprefix(f"{name}-").rsplit("-", 2)
        before = [
            line for line in registered["judged"] if line["cell"] == name and line["steps"] == 10
        ]
        alone = next(
            Interval(**line["change"])
            for line in before
            if line["reward"] == WORLDS[world]["right"]
        )
        lead = Interval(**found["lead"][name]) if name != first else None
        ours = f"{lead:+} | {verdict(lead)}" if lead else " | "
        setting = f"{rate}, {group}, {THIRD[name][0]} {level}"
        change = Interval(**found["change"][name])
        lines.append(
            f"| `{name}` | {setting} | {found['iterations'][name]} | {change:+} | {alone:+} | {ours} |"
        )
    lines += [
        "",
        "Pilots' gains on training prompts, in standard deviations of the trained rewards:",
        "",
    ]
    for name, tried in found["pilots"].items():
        own = ", ".join(
            f"{title.removeprefix(f'{name}-')} {value:+.2f}" for title, value in tried.items()
        )
        lines.append(f"- `{name}` (rate-group-{THIRD[name][0]}): {own}")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("worlds", nargs="*", default=list(RATES))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/tuned"), help="holds the runs")
    parser.add_argument(
        "--results", type=Path, default=Path("studies/results/tuned.json"), help="is added to"
    )
    parser.add_argument(
        "--table", action="store_true", help="trains nothing: the tables of --results again"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    found = json.loads(args.results.read_text()) if args.results.is_file() else {}
    for world in () if args.table else args.worlds:
        found[world] = study(world, args.jobs, args.out)
        write_whole(args.results, json.dumps(found, indent=1).encode())
    registered = json.loads(Path("studies/results/registered.json").read_text())
    for world, own in found.items():
        print(f"## {world}\n\n{table(world, own, registered[world])}\n")


if __name__ == "__main__":
    main()
