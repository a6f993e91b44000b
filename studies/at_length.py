"""The paper's comparison at the length of the paper, or a part of it, each cell at the best of three
rates: protocols, figures and what is cut in studies/at_length.md. A command goes on where an earlier
one was stopped.

    python -m studies.at_length --gpu                        # or for 20 minutes at a time
    OMP_NUM_THREADS=1 python -m studies.at_length            # one core
    python -m studies.at_length_tables                       # tables and figures of what is stored
"""

import argparse
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from g2rpo.cli.main import main as g2rpo
from g2rpo.config.work import work
from g2rpo.data.prompts import build_prompts
from g2rpo.lab.report.history import read_runs

Row = dict[str, Any]
PUBLISHED = "algorithm.branch_schedule=all algorithm.tail=reference algorithm.update_every=branch"
CELLS = {  # settings, and rates to choose from: one is that of the pilots of studies/eight_seeds.md
    "g2rpo": (f"{PUBLISHED} algorithm.granularities=[1,2,3]", "4.4e-5 1.3e-4 4e-4"),
    "one-granularity": (f"{PUBLISHED} algorithm.granularities=[1]", "4.4e-5 1.3e-4 4e-4"),
    "mixgrpo": ("algorithm.name=mixgrpo", "6.7e-5 2e-4 6e-4"),
    "dancegrpo": ("algorithm.name=dancegrpo", "6.7e-5 2e-4 6e-4"),
    "in-turns": (
        "algorithm.branch_schedule=turns trainer.prompts_per_iteration={turns}",
        "1.3e-4 4e-4 1.2e-3",
    ),
    "flow_grpo": ("algorithm.name=flow_grpo", "3.3e-5 1e-4 3e-4"),
    "diffusion_nft": ("algorithm.name=diffusion_nft", "3.3e-5 1e-4 3e-4"),
}
UNSEEN = {"words": r"[kw]\w*'|'\w{6}'|purple", "testbed": r"\bthree\b|purple"}
"""What no training prompt has: letters, a length, a colour; a count, a colour."""
JUDGED = ("word_drawing", "word_colour")
WHOLE = "rewards.ocr.options.squeeze=1"
"""Pictures are read as they are, as they were in the first runs."""
TASKS = {  # recipe, prompts, the share of right pictures, trained rewards
    "words": ("words", "ocr_exact", [WHOLE, *(f"rewards.{name}=" for name in JUDGED)]),
    "words-two": ("words", "ocr_exact", [WHOLE, "rewards.word_colour="]),
    "scenes": ("testbed", "scene_correct", []),
    "scenes-two": ("testbed", "scene_correct", ["rewards.scene_clip.weight=1"]),
}
SWEEP = 72
"""The seed of the runs that choose a rate."""
RESULTS = Path("studies/results/at_length_tuned.jsonl")


@dataclass(frozen=True)
class Size:
    """What a machine can do."""

    tasks: tuple[str, ...]
    cells: tuple[str, ...]
    seeds: tuple[int, ...]
    iterations: int
    every: int
    steps: int
    prompts: int
    turns: int
    jobs: int


GPU = Size((*TASKS,), (*CELLS,), (*range(73, 81),), 300, 25, 16, 2, 22, 16)
CORE = Size(("words", "scenes"), (*CELLS,), (73, 74, 75), 60, 20, 10, 1, 6, 1)


def write_prompts(world: str, out: Path) -> None:
    """Of training prompts the last 48 choose rates; of held-out ones 48 are like those that are
    trained on, and 48 have something new."""
    out.mkdir(parents=True, exist_ok=True)
    parts = {}
    for split in ("train", "heldout"):
        prompts = build_prompts(f"{world}:{split}", "prompts")
        kinds = [[p for p in prompts if bool(re.search(UNSEEN[world], p)) == new] for new in (0, 1)]
        parts[split] = kinds[0] if split == "train" else kinds[0][:48] + kinds[1][:48]
    parts["train"], parts["choice"] = parts["train"][:-48], parts["train"][-48:]
    for name, asked in parts.items():
        (out / f"{world}_{name}.txt").write_text("\n".join(asked) + "\n")


def train(task: str, seed: int, size: Size, cells: dict[str, str], out: Path) -> None:
    """These cells of a task with a seed."""
    world, _, rewards = TASKS[task]
    write_prompts(world, out)
    asked, many = ("choice", 48) if seed == SWEEP else ("heldout", 96)
    words = [
        *rewards,
        *(f"evaluation.rewards.{name}={{}}" for name in JUDGED if f"rewards.{name}=" in rewards),
        f"trainer.seed={seed}",
        f"trainer.prompts_per_iteration={size.prompts}",
        f"prompts.train={out / f'{world}_train.txt'}",
        f"evaluation.prompts={out / f'{world}_{asked}.txt'}",
        f"evaluation.num_prompts={many}",
        f"trainer.iterations={size.iterations}",  # else the next is rescaled
        f"evaluation.every={size.every}",
        "optim.decay=constant",
        "policy.lora_above=0",
        f"sampling.num_steps={size.steps}",
        "sampling.tails.forecast=false",
    ]
    branches = f"algorithm.branch_steps={[*range(size.steps // 2)]}".replace(", ", ",")
    for name, cell in cells.items():
        own = "" if "algorithm.name" in cell else branches
        words += ["--cell", f"{name}: {cell} {own}".format(turns=size.turns)]
    words += ["--budget", f"iterations={size.iterations}", "--seeds", "1"]
    words += ["--jobs", str(size.jobs), "--out", str(out / f"{task}_{seed}")]
    try:
        g2rpo(["compare", task.removesuffix("-two"), *words])
    except SystemExit as end:
        if end.code:
            raise


def folders_of(out: Path) -> list[Path]:
    """The folders of the runs, beside which lie logs."""
    return [config.parent for config in sorted(out.glob("*/runs/*/seed_*/config.yaml"))]


def rows_of(out: Path) -> list[Row]:
    """Of every evaluation of every run: what was spent, and who is right."""
    rows = []
    for folder in folders_of(out):
        run = read_runs([folder])[0]
        task, cell = folder.parents[2].name.rsplit("_", 1)[0], folder.parent.name.split("+")[0]
        spent = [0]
        for row in run.iterations:
            spent.append(spent[-1] + work(run.config, row["iteration"] - 1, row["evaluations"]))
        for iteration in run.kept:
            scores = run.scores(iteration)
            means = {name: round(float(own.nanmean()), 4) for name, own in scores.items()}
            right = "".join(str(int(value)) for value in scores[TASKS[task][1]])
            at = {"task": task, "cell": cell, "seed": run.config.trainer.seed}
            at |= {"rate": run.config.optim.learning_rate, "iteration": iteration}
            rows.append(at | {"evaluations": spent[iteration], "right": right, "means": means})
    return rows


def swept(rows: list[Row], task: str, cell: str) -> dict[float, float]:
    """By rate the share of right choice prompts, a mean over the last two evaluations."""
    found: dict[float, list[int]] = {}
    for row in sorted(rows, key=lambda row: (row.get("rate", 0), row["iteration"])):
        if (row["task"], row["cell"], row["seed"]) == (task, cell, SWEEP):
            found.setdefault(row["rate"], []).append(row["right"].count("1"))
            asked = len(row["right"])
    # counts have no rounding, so equal shares are equal
    return {rate: float(np.mean(counts[-2:])) / asked for rate, counts in found.items()}


def at_rate(cell: str, rate: str | float) -> str:
    return f"optim.learning_rate={rate} {CELLS[cell][0]}"


def pilot(size: Size, out: Path) -> None:
    """Prints what three iterations of every cell say of the whole."""
    lowest = {name: at_rate(name, CELLS[name][1].split()[0]) for name in size.cells}
    for task in size.tasks:
        train(task, SWEEP, replace(size, iterations=3, every=3), lowest, out)
    evaluations = training = whole = runs = 0.0
    for folder in folders_of(out):
        run = read_runs([folder])[0]
        each = len(CELLS[folder.parent.name][1].split()) + len(size.seeds)
        runs += each
        iteration, look = run.iterations[-1], run.evaluations[-1]  # the first ones are slower
        evaluations += iteration["evaluations"]
        training += iteration["seconds"]
        looks = size.iterations // size.every + 1
        whole += each * (size.iterations * iteration["seconds"] + looks * look["seconds"])
    at_once = min(size.jobs, len(size.cells))
    hours = whole / at_once / 3600
    print(
        f"{at_once * evaluations / training:,.0f} evaluations a second; {runs:.0f} runs in {hours:.1f}"
        f" hours, {runs / hours / 3:.0f} in 20 minutes",
        flush=True,
    )


def study(size: Size, out: Path) -> None:
    """Three rates of each cell; then its best, of equal ones the lowest, with new seeds."""
    for task in size.tasks:
        every = {}
        for name in size.cells:
            for given in CELLS[name][1].split():
                every[f"{name}+{given}"] = at_rate(name, given)
        train(task, SWEEP, size, every, out)
    rows = rows_of(out)
    for seed in size.seeds:
        for task in size.tasks:
            best = {}
            for name in size.cells:
                shares = swept(rows, task, name)
                rate = max(shares, key=lambda rate: shares[rate])
                best[name] = at_rate(name, rate)
            train(task, seed, size, best, out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/at_length"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    size = GPU if given.gpu else CORE
    pilot(size, given.out.resolve() / "pilot")
    study(size, given.out.resolve())
    rows = rows_of(given.out)
    given.results.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
