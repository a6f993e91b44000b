"""Five algorithms, each at its best of twelve settings, in the worlds and at the budgets of the registered study.

A pilot tries every learning rate with every group size, and each of these twelve pairs with one of three levels of a third
setting, in turn: the noise `eta`, or for DiffusionNFT the share of the times that it trains. The pilot's seed and
prompts are those of the registered study's pilots, and so are the seeds and the held-out prompts of the five runs at the best.

    OMP_NUM_THREADS=1 python -m benchmarks.tuned scenes words-alone --jobs 2    # 80 minutes; goes on where it was
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.registered import CELLS, COMMON, WORLDS, leads, scores_of, verdict
from g2rpo.app.events import Line
from g2rpo.config.schema import Config
from g2rpo.core.files import write_whole
from g2rpo.core.statistics import Interval, interval
from g2rpo.evaluation.work import iterations_within
from g2rpo.lab.compare.jobs import Workers, locked
from g2rpo.lab.compare.outcomes import gain_of
from g2rpo.lab.compare.study import Study
from g2rpo.lab.compare.workflow import Workspace

RATES = {"scenes": [2e-4, 5e-4, 1.2e-3, 3e-3], "words-alone": [1e-4, 2e-4, 4e-4, 8e-4]}
GROUPS = (6, 12, 24)
THIRD: dict[str, tuple[str, tuple[float, ...]]] = {
    "g2rpo": ("eta", (0.35, 0.7, 1.05)),
    "mixgrpo-1": ("eta", (0.35, 0.7, 1.05)),
    "flow_grpo": ("eta", (0.35, 0.7, 1.05)),
    "dancegrpo": ("eta", (0.15, 0.3, 0.45)),
    "diffusion_nft": ("share", (0.1, 0.2, 0.4)),
}
"""Half of the registered study's value, that value and one and a half times it; of the share half and twice."""


def candidates(world: str, name: str) -> dict[str, tuple[float, list[str]]]:
    """By name of a setting its learning rate and the cell's changes."""
    setting, levels = THIRD[name]
    fixed = {key: str(WORLDS[world][key]).replace(" ", "") for key in ("stay", "steps")}
    changes = [change.format_map(fixed) for change in CELLS[name]]
    prompts = int(next(change for change in changes if "prompts" in change).partition("=")[2])
    found = {}
    for (number, rate), (place, group) in product(enumerate(RATES[world]), enumerate(GROUPS)):
        level = levels[(number + place) % len(levels)]
        own = [f"algorithm.group_size={group}", f"trainer.prompts_per_iteration={max(1, prompts * 12 // group)}"]
        found[f"{name}-{rate:g}-{group}-{level:g}"] = rate, [*changes, *own, f"algorithm.{setting}={level}"]
    return found


def study(world: str, jobs: int, out: Path) -> dict[str, Any]:
    """Trains what is missing; by algorithm all pilots' gains, the setting taken, and the results of its runs."""
    setting, folder = WORLDS[world], out / world
    settings = {name: candidates(world, name) for name in THIRD}
    workspace = Workspace(
        Study(
            recipe=setting["recipe"],
            overrides=[*setting["overrides"], *COMMON, f"trainer.seed={setting['first_seed']}"],
            cells={title: changes for tried in settings.values() for title, (_, changes) in tried.items()},
            budget=setting["budget"],
            unit="evaluations",
            rates=RATES[world],
            seeds=setting["seeds"],
            pilots=1,
            steps=[10],
        ),
        folder,
    )
    configs = {title: workspace.config(workspace.study.overrides_of(title)) for title in workspace.study.cells}
    iterations = {title: iterations_within(config, setting["budget"]) for title, config in configs.items()}
    rates = {title: rate for tried in settings.values() for title, (rate, _) in tried.items()}
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder) as lock:
        workers = Workers(jobs, lock, lambda event: print(event.text, flush=True) if isinstance(event, Line) else None)
        pilots = {
            title: replace(workspace.pilots(title, iterations[title])[rate][0], title=f"pilot of {title}")
            for title, rate in rates.items()
        }
        workers.run(map(workspace.training, pilots.values()))
        gains = {
            title: gain_of(rates[title], [workspace.history(pilot)], weights_of(configs[title])).gain
            for title, pilot in pilots.items()
        }
        best = {name: max(tried, key=gains.__getitem__) for name, tried in settings.items()}
        runs = {
            (name, seed): replace(run, title=f"{name}, seed {seed}", folder=folder / "runs" / name / f"seed_{seed}")
            for name, title in best.items()
            for seed, run in workspace.runs(title, rates[title], iterations[title]).items()
        }
        workers.run(map(workspace.training, runs.values()))
        judged = folder / "judged"
        some_run = next(iter(runs.values())).folder
        workers.run(
            [
                workspace.judging("judging the base", some_run, judged / "base", "weights="),
                *(
                    workspace.judging(f"judging {name}, seed {seed}", run.folder, judged / name / f"seed_{seed}", "base=false")
                    for (name, seed), run in runs.items()
                ),
            ]
        )
    base, first = scores_of(world, "base", out), next(iter(THIRD))
    scores = {name: scores_of(world, name, out) for name in THIRD}
    return {
        "pilots": {name: {title: gains[title] for title in tried} for name, tried in settings.items()},
        "best": best,
        "iterations": {name: iterations[title] for name, title in best.items()},
        "base": base.mean(),
        "by_seed": {name: own.mean(1).tolist() for name, own in scores.items()},
        "change": {name: asdict(interval(own - base)) for name, own in scores.items()},
        "lead": {name: asdict(lead) for name, lead in leads(world, first, list(THIRD)[1:], out).items()},
    }


def weights_of(config: Config) -> dict[str, float]:
    return {name: entry.weight for name, entry in config.rewards.items()}


def table(world: str, found: dict[str, Any], registered: dict[str, Any]) -> str:
    """In Markdown: settings, gains beside those at the best of three rates alone, leads; then the pilots."""
    first = next(iter(THIRD))
    lines = [
        f"| | best of twelve: rate, group, third setting | iterations | `{WORLDS[world]['right']}`, from {found['base']:.3f} | "
        f"at the best of three rates alone | lead of `{first}` | |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, title in found["best"].items():
        rate, group, level = title.removeprefix(f"{name}-").rsplit("-", 2)
        before = [line for line in registered["judged"] if line["cell"] == name and line["steps"] == 10]
        alone = next(Interval(**line["change"]) for line in before if line["reward"] == WORLDS[world]["right"])
        lead = Interval(**found["lead"][name]) if name != first else None
        ours = f"{lead:+} | {verdict(lead)}" if lead else " | "
        setting = f"{rate}, {group}, {THIRD[name][0]} {level}"
        change = Interval(**found["change"][name])
        lines.append(f"| `{name}` | {setting} | {found['iterations'][name]} | {change:+} | {alone:+} | {ours} |")
    lines += ["", "Pilots' gains on training prompts, in standard deviations of the trained rewards:", ""]
    for name, tried in found["pilots"].items():
        own = ", ".join(f"{title.removeprefix(f'{name}-')} {value:+.2f}" for title, value in tried.items())
        lines.append(f"- `{name}` (rate-group-{THIRD[name][0]}): {own}")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("worlds", nargs="*", default=list(RATES))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/tuned"), help="holds the runs")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/tuned.json"), help="is added to")
    parser.add_argument("--table", action="store_true", help="trains nothing: the tables of --results again")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    found = json.loads(args.results.read_text()) if args.results.is_file() else {}
    for world in () if args.table else args.worlds:
        found[world] = study(world, args.jobs, args.out)
        write_whole(args.results, json.dumps(found, indent=1).encode())
    registered = json.loads(Path("benchmarks/results/registered.json").read_text())
    for world, own in found.items():
        print(f"## {world}\n\n{table(world, own, registered[world])}\n")


if __name__ == "__main__":
    main()
