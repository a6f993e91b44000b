"""Why does G2RPO with branch steps in turn lose a seed in `scenes`? Its gradient at the last of them
is ten times that at the first, and Adam's second moment is common to all. Four changes, each with
new seeds (protocol and results: studies/turns.md).

    OMP_NUM_THREADS=1 python -m studies.turns scenes --jobs 2    # an hour; goes on where it was stopped
    python -m studies.turns scenes --table
"""

import argparse
import json
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from g2rpo import api
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.algorithms.policy_gradient import TakenSteps
from g2rpo.config.read import load_config
from g2rpo.core.flow import flow_sde, sde_step, sigma_grid
from g2rpo.core.plain import hyper_parameters
from g2rpo.core.statistics import interval
from g2rpo.data.prompts import build_prompts

CELLS: dict[str, list[str]] = {
    "turns": [],
    "moments": [],  # AdamW's state of every step is its own
    "weights": [],  # a step's loss is divided by what its kernel multiplies the gradient by
    "norm": ["optim.max_grad_norm=1e-4"],  # below every norm: all gradients are equally long
    "together": ["algorithm.branch_schedule=all"],
    "mixgrpo": [
        "algorithm.name=mixgrpo",
        "algorithm.window_size=1",
        "algorithm.group_size=12",
        "algorithm.update_every=rollout",
    ],
}
TASKS: dict[str, dict[str, Any]] = {
    "scenes": {
        "recipe": "scenes-fast",
        "right": "scene_correct",
        "common": ["optim.decay=constant", "trainer.iterations=48"],
        "together": ["trainer.prompts_per_iteration=1", "trainer.iterations=26"],
        "mixgrpo": ["algorithm.window_iterations=6"],
        "rates": (3e-4, 6e-4, 1.2e-3),
    },
    "words": {
        "recipe": "words",
        "right": "ocr_exact",
        "common": [],
        "together": ["trainer.prompts_per_iteration=4"],
        "mixgrpo": ["algorithm.window_iterations=6"],
        "rates": (3e-4, 6e-4, 1.2e-3),
    },
}
PILOTS, SEEDS = (97, 98, 99), (*range(100, 108),)
ASKED = 96
RESULTS = Path("studies/results/turns.jsonl")

Row = dict[str, Any]


@hyper_parameters
class Weighted(GranularGRPO):
    """G2RPO with a weight for every step, counted from 0."""

    weights: tuple[float, ...]

    def policy_loss(self, steps: TakenSteps) -> Tensor:
        return torch.tensor(self.weights)[steps.step] * super().policy_loss(steps)


def step_weights(config: Any) -> tuple[float, ...]:
    """One over the factor by which a step's kernel turns the network's gradient into the log-prob's,
    |d mean / d velocity| / std; their mean is 1."""
    sigmas = sigma_grid(config.sampling.num_steps, config.sampling.shift)
    factors = []
    for step in config.algorithm.branch_steps:
        velocity = torch.zeros(1, 1, requires_grad=True)
        g = flow_sde(sigmas, config.algorithm.eta)(sigmas[step])
        kernel = sde_step(torch.zeros(1, 1), velocity, sigmas[step], sigmas[step + 1], g)
        (slope,) = torch.autograd.grad(kernel.mean.sum(), velocity)
        factors.append(float(slope.abs() / kernel.std))
    weights = 1 / torch.tensor(factors)
    return tuple((weights / weights.mean()).tolist())


def run(task: str, cell: str, rate: float, seed: int) -> Row:
    """One run; who is right before and after."""
    own, judged = TASKS[task], TASKS[task]["right"]
    recipe = str(own["recipe"])
    world = {"scenes": "testbed", "words": "words"}[task]
    train = build_prompts(f"{world}:train", "prompts")
    asked = train[-ASKED:] if seed in PILOTS else build_prompts(f"{world}:heldout", "p")[:ASKED]
    words = [*own["common"], f"optim.learning_rate={rate}", f"trainer.seed={seed}"]
    words += [*CELLS[cell], *own.get(cell, []), f"evaluation.num_prompts={ASKED}"]
    given: dict[str, Any] = {"prompts": train[:-ASKED], "heldout": asked, "trackers": []}
    if cell == "weights":
        config = load_config(recipe, words)
        fields = {k: v for k, v in vars(config.algorithm).items() if k != "name"}
        given["algorithm"] = Weighted(**fields, weights=step_weights(config))
    trainer = api.trainer(recipe, words, **given)
    before = trainer.score_heldout()
    moments: dict[int, Any] = defaultdict(lambda: defaultdict(dict))
    norms = []
    while trainer.iteration < trainer.config.trainer.iterations:
        if cell == "moments":
            (plan,) = trainer.plans()
            trainer.learner.optimizer.state = moments[plan.branch]
        norms.append(round(trainer.iterate()["grad_norm"], 6))
    scores = [it.scores[judged].tolist() for it in (before, trainer.score_heldout())]
    right = ["".join(str(int(value)) for value in values) for values in scores]
    return {
        "task": task,
        "cell": cell,
        "rate": rate,
        "seed": seed,
        "before": right[0],
        "after": right[1],
        "norms": norms,
    }


def gains(rows: list[Row], cell: str, rate: float, seeds: tuple[int, ...]) -> np.ndarray:
    """Changes [seed, prompt] of being right."""
    found = {}
    for row in rows:
        if (row["cell"], row["rate"]) == (cell, rate):
            pairs = zip(row["after"], row["before"], strict=True)
            found[row["seed"]] = [int(after) - int(before) for after, before in pairs]
    return np.array([found[seed] for seed in seeds])


def best_rate(rows: list[Row], task: str, cell: str) -> float:
    """By the mean gain of the pilots; of equal ones the lowest."""
    means = {rate: gains(rows, cell, rate, PILOTS).mean() for rate in TASKS[task]["rates"]}
    return max(means, key=lambda rate: (means[rate], -rate))


def stored(task: str) -> list[Row]:
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return [row for row in map(json.loads, lines) if row["task"] == task]


def run_all(task: str, asked: list[tuple[str, float, int]], jobs: int) -> None:
    """Runs what is not stored, `jobs` at a time, and stores each."""
    done = {(row["cell"], row["rate"], row["seed"]) for row in stored(task)}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        runs = [pool.submit(run, task, *one) for one in asked if one not in done]
        for finished in as_completed(runs):
            row = finished.result()
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print({name: row[name] for name in ("cell", "rate", "seed")}, flush=True)


def table(task: str) -> str:
    """Markdown: of each cell its rate, pilots, gain, seeds and lead over turns."""
    rows, level = stored(task), 1 - 0.05 / (len(CELLS) - 1)
    lines = [
        "| cell | rate | pilots at each rate | gain | by seed | less `turns` |",
        "|---" * 6 + "|",
    ]
    turns = gains(rows, "turns", best_rate(rows, task, "turns"), SEEDS)
    for cell in CELLS:
        rate = best_rate(rows, task, cell)
        every = [f"{gains(rows, cell, one, PILOTS).mean():+.3f}" for one in TASKS[task]["rates"]]
        own = gains(rows, cell, rate, SEEDS)
        seeds = ", ".join(f"{value:+.2f}" for value in own.mean(1))
        lead = "" if cell == "turns" else f"{interval(own - turns, level=level):+}"
        values = f"`{cell}`", f"{rate:g}", ", ".join(every), f"{interval(own):+}", seeds, lead
        lines.append("| " + " | ".join(values) + " |")
    return "\n".join(lines)


def main() -> None:
    args = arguments()
    if not args.table:
        rates = TASKS[args.task]["rates"]
        run_all(args.task, [(c, r, s) for s in PILOTS for c in CELLS for r in rates], args.jobs)
        rows = stored(args.task)
        chosen = {cell: best_rate(rows, args.task, cell) for cell in CELLS}
        run_all(args.task, [(c, r, s) for s in SEEDS for c, r in chosen.items()], args.jobs)
    print(table(args.task))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--table", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
