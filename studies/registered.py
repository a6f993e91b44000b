"""The registered study: singular sampling, granularities and the evening settings at one budget, in
both embedded worlds.

Its questions, tests and what counts as an answer were written down before it ran
(studies/registered_protocol.md). Every cell is the recipe of its world but for one change, and is
trained at its own rate (`g2rpo compare --find-rate`; the tables of 2026-11-24 and 25 have the best
of three) for the world's number of network evaluations, training passes included, at a constant
rate, so that a curve can be read at any smaller budget. What an iteration costs with FLUX.1-dev at
512 pixels on an H100 is by the plan: rollouts, decodes, rewards and training passes.

    OMP_NUM_THREADS=1 python -m studies.registered scenes --questions 1 2    # hours; goes on where it was
    python -m studies.registered --table                                    # its tables and figure again
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from g2rpo import api
from g2rpo.app.events import Line
from g2rpo.assembly.config import load_config
from g2rpo.assembly.prompts import build_prompts
from g2rpo.assembly.rewards import build_rewards
from g2rpo.core.errors import UserError
from g2rpo.core.files import write_whole
from g2rpo.core.statistics import Interval, interval
from g2rpo.evaluation.untrained import Controls
from g2rpo.evaluation.work import work
from g2rpo.lab.compare.jobs import Workers
from g2rpo.lab.compare.results import read_judged
from g2rpo.lab.compare.study import OWN_BUDGET, StudyDirectory
from g2rpo.lab.compare.workflow import compare, training_job
from g2rpo.lab.plan.cards import CARDS
from g2rpo.lab.plan.plan import Planner
from g2rpo.monitor.curves import LINE_COLOURS
from g2rpo.monitor.image_statistics import spread
from g2rpo.run.rates import Values
from g2rpo.run.run import Run

EXACT = "sampling.tails.forecast=false"
LOOK = "evaluation.num_steps=10"
"""Cells that train on another grid are evaluated on that of the others."""
TURNS = [
    "algorithm.branch_steps={steps}",
    "algorithm.branch_schedule=turns",
    "algorithm.tail=closed",
]


def ours(prompts: int, *changes: str) -> list[str]:
    return [f"trainer.prompts_per_iteration={prompts}", *changes]


def other(name: str, prompts: int, *changes: str) -> list[str]:
    """Published defaults, but groups of 12 and one update an iteration, as `g2rpo` has."""
    return ours(
        prompts,
        f"algorithm.name={name}",
        "algorithm.group_size=12",
        "algorithm.update_every=rollout",
        *changes,
    )


def mixgrpo(prompts: int, window: int) -> list[str]:
    return other(
        "mixgrpo", prompts, f"algorithm.window_size={window}", "algorithm.window_iterations={stay}"
    )


CELLS: dict[str, list[str]] = {
    "g2rpo": ours(4),
    "all-steps": ours(1, "algorithm.branch_schedule=all"),
    "exact": ours(3, EXACT),
    "2": ours(4, EXACT, "algorithm.granularities=[2]"),
    "3": ours(5, EXACT, "algorithm.granularities=[3]"),
    "1-2": ours(2, EXACT, "algorithm.granularities=[1,2]"),
    "1-2-3": ours(2, EXACT, "algorithm.granularities=[1,2,3]"),
    "mixgrpo-1": mixgrpo(4, 1),
    "mixgrpo-2": mixgrpo(2, 2),
    "mixgrpo-4": mixgrpo(1, 4),
    "flow_grpo": other("flow_grpo", 1, "algorithm.kl_weight=0"),
    "dancegrpo": other("dancegrpo", 1),
    "group-6": ours(7, "algorithm.group_size=6"),
    "group-24": ours(2, "algorithm.group_size=24"),
    "steps-16": ours(3, "sampling.num_steps=16", LOOK, "algorithm.branch_steps={steps_16}"),
    "tempflow_grpo": other("tempflow_grpo", 1),
    "pave_grpo": ours(
        3, "algorithm.name=pave_grpo", "algorithm.eta=0.7", "algorithm.group_size=12", *TURNS
    ),
    "adagrpo": ours(
        3, "algorithm.name=adagrpo", "algorithm.candidates=4", "algorithm.group_size=12", *TURNS
    ),
    "e_grpo": other("e_grpo", 4, *TURNS, "algorithm.merged_steps={merged}"),
    "fdfo": ours(3, "algorithm.name=fdfo"),
    "diffusion_nft": ours(
        1, "algorithm.name=diffusion_nft", "algorithm.group_size=12", "algorithm.share=0.2"
    ),
    "awm": ours(1, "algorithm.name=awm", "algorithm.group_size=12", "algorithm.times=2"),
    "dgpo": ours(1, "algorithm.name=dgpo", "algorithm.group_size=12", "algorithm.times=2"),
}
"""Changes of `g2rpo`: branch steps in turn, {1}, forecast tails, groups of 12, 4 prompts an
iteration. The number of prompts is such that the budget buys about as many updates in every
cell."""


SAME_STEPS: dict[str, list[str]] = {
    "eight-steps": ours(4, "algorithm.branch_steps=[0,1,2,3,4,5,6,7]"),
    "three-at-once": [*mixgrpo(2, 3), "algorithm.schedule=frozen"],
    "eight-at-once": [*mixgrpo(1, 8), "algorithm.schedule=frozen"],
}
"""In words: noise at one step at a time or at all of them at once, each at steps 0 to 2 (`g2rpo`)
and 0 to 7."""


def published(name: str, steps: int, *changes: str) -> list[str]:
    """An algorithm's published defaults on a grid of `steps`, two prompts an iteration, at several
    times the budget."""
    grid = [f"sampling.num_steps={steps}", LOOK, EXACT]
    return ours(2, f"algorithm.name={name}", *grid, *changes, "budget={published}")


PAPER = [
    f"algorithm.branch_steps={list(range(8))}",
    "algorithm.branch_schedule=all",
    "algorithm.granularities=[1,2,3]",
]
PAPER.append("algorithm.tail=reference")
PUBLISHED: dict[str, list[str]] = {
    "published-g2rpo": published("g2rpo", 16, *PAPER, "algorithm.update_every=branch"),
    "published-averaged": published("g2rpo", 16, *PAPER),
    "published-mixgrpo": published(
        "mixgrpo", 16, "algorithm.window_size=3", "algorithm.window_iterations={published_stay}"
    ),
    "published-flow_grpo": published("flow_grpo", 6, "algorithm.eta=0.9", "algorithm.kl_weight=0"),
    "published-dancegrpo": published("dancegrpo", 16),
    "published-tempflow_grpo": published(
        "tempflow_grpo", 10, "algorithm.eta=0.9", "algorithm.noise_weight=1.73"
    ),
    "published-e_grpo": published("e_grpo", 16),
}
"""As published for FLUX.1-dev: grid, groups, noise, trained steps, updates. MixGRPO's 25
steps become 16, its window and stay such that a run passes over the same share of the steps,
.52."""

SAME_ITERATIONS: dict[str, list[str]] = {
    f"same-{name}": ours(
        4, EXACT, f"algorithm.granularities=[{name.replace('-', ',')}]", f"budget={budget}"
    )
    for name, budget in {"1": 14600, "2": 9800, "3": 8300, "1-2": 18200, "1-2-3": 20300}.items()
}
"""In scenes: budgets that buy 49 iterations of 4 prompts, as many as `g2rpo` has."""

REGRESSIONS: dict[str, list[str]] = {
    "priced-self_opd": other("self_opd", 2, "budget={self_opd}"),
    "priced-epg": ours(
        1,
        "algorithm.name=epg",
        "algorithm.group_size=12",
        "algorithm.share=0.2",
        "budget={forward}",
    ),
    "priced-diffusion_nft": [*CELLS["diffusion_nft"], "budget={forward}"],
    "priced-awm": [*CELLS["awm"], "budget={forward}"],
    "priced-opsd": ours(
        1, "algorithm.name=opsd", "algorithm.group_size=12", "budget={reward_gradient}"
    ),
    "priced-refl": ours(3, "algorithm.name=refl", "algorithm.group_size=12", "budget={refl}"),
}
"""Algorithms of 2026 beside their neighbours, for what `g2rpo` costs with FLUX.1-dev by plan: their
budgets are evaluations that take as many seconds (`prices`)."""

WEIGHTINGS: dict[str, list[str]] = {
    "g2rpo-averaged": ours(1, "algorithm.branch_schedule=all"),
    "g2rpo-branch": ours(1, "algorithm.branch_schedule=all", "algorithm.update_every=branch"),
    **{
        f"self_opd-{name}": ours(
            1,
            "algorithm.name=self_opd",
            "algorithm.group_size=12",
            "algorithm.step_weights={ones}",
            "algorithm.steps_drawn={many}",
            f"algorithm.update_every={update}",
        )
        for name, update in {"averaged": "rollout", "branch": "branch"}.items()
    },
}
"""The samples of `g2rpo` with all branch steps, learnt from by its clipped surrogate or by
Self-OPD's regression. With one averaged update these differ in the samples' weights alone; with an
update after every step in the loss too."""

WHY_TEMPFLOW: dict[str, list[str]] = {
    "tempflow-without-kl": other("tempflow_grpo", 1, "algorithm.kl_weight=0"),
    "nine-steps-all": ours(
        1, "algorithm.branch_steps=[0,1,2,3,4,5,6,7,8]", "algorithm.branch_schedule=all"
    ),
    "nine-steps": ours(4, "algorithm.branch_steps=[0,1,2,3,4,5,6,7,8]"),
}
"""In words: what TempFlow-GRPO has that `g2rpo` has not, one at a time. KL; then its weights of
steps, with all nine steps of one prompt in both; then one prompt an iteration in place of four."""

WORLDS: dict[str, dict[str, Any]] = {
    "scenes": {
        "recipe": "scenes-fast",
        "right": "scene_correct",
        "overrides": [],
        "questions": (1, 2, 3, 4, 5, 8),
        "first_seed": 42,
        "seeds": 5,
        "budget": 10000,
        "rate": 1.2e-3,
        "stay": 6,
        "steps": list(range(8)),
        "steps_16": list(range(12)),
        "merged": [1, 1, 2, 2, 2, 3, 3, 2],
        "ones": [1] * 8,
        "many": 8,
        "self_opd": 9900,
        "forward": 9080,
        "reward_gradient": 8130,
        "refl": 9410,
        "published": 60000,
        "published_stay": 18,
    },
    "words": {
        "recipe": "words",
        "right": "ocr_exact",
        "overrides": ["sampling.tails.forecast=true", "policy.lora_above=0"],
        "questions": (1, 2, 3, 4),
        "first_seed": 42,
        "seeds": 5,
        "budget": 12000,
        "rate": 4e-4,
        "stay": 16,
        "steps": [0, 1, 2],
        "steps_16": list(range(5)),
        "merged": [1, 1, 2],
        "ones": [1] * 3,
        "many": 3,
        "self_opd": 11750,
        "forward": 10850,
        "reward_gradient": 9710,
        "refl": 11250,
        "published": 24000,
        "published_stay": 7,
    },
}
"""`stay`: iterations of MixGRPO's window at a step, so that it passes once over the steps at which
`g2rpo` branches; `merged`: E-GRPO's lengths of these steps (`g2rpo_variants.merges`); `rate`: the one
around which pilots choose."""
WORLDS["scenes-again"] = WORLDS["scenes"] | {"questions": (6,), "first_seed": 52, "seeds": 8}
WORLDS["words-alone"] = WORLDS["words"] | {
    "overrides": [*WORLDS["words"]["overrides"], "rewards.word_drawing="],
    "questions": (7, 9, 10),
}

NEW = {"first_seed": 60, "seeds": 8}
WORLDS["scenes-priced"] = WORLDS["scenes"] | NEW | {"questions": (12, 14, 15)}
WORLDS["words-priced"] = WORLDS["words-alone"] | NEW | {"questions": (12, 14, 15, 16)}
WORLDS["words-published"] = WORLDS["words-alone"] | {"first_seed": 60, "questions": (17,)}
WORLDS["scenes-learned"] = (
    WORLDS["scenes"]
    | NEW
    | {
        "questions": (13,),
        "overrides": [
            "rewards.scene_accuracy=",
            "rewards.scene_clip=1",
            "evaluation.rewards.scene_clip=",
        ],
    }
)
"""Trained on a learned reward with a gradient, judged by the rule `scene_correct`."""

COMMON = [
    "optim.decay=constant",
    "evaluation.num_prompts=96",
    "trainer.iterations=100",
    "evaluation.every=34",
]
QUESTIONS = {
    "noise at one step against several": (
        "g2rpo",
        ["mixgrpo-1", "mixgrpo-2", "mixgrpo-4", "flow_grpo", "dancegrpo"],
    ),
    "several granularities against one": ("1-2-3", ["exact", "2", "3", "1-2"]),
    "the evening setting, one change at a time": (
        "g2rpo",
        ["all-steps", "exact", "group-6", "group-24", "steps-16"],
    ),
    "other algorithms": (
        "g2rpo",
        ["tempflow_grpo", "pave_grpo", "adagrpo", "e_grpo", "fdfo", "diffusion_nft", "awm", "dgpo"],
    ),
    "as published, in scenes": (
        "published-g2rpo",
        [cell for cell in PUBLISHED if cell != "published-g2rpo"],
    ),
    "the best of scenes once more, eight new seeds": (
        "g2rpo",
        ["diffusion_nft", "awm", "all-steps", "e_grpo"],
    ),
    "words without the reward of drawing": (
        "g2rpo",
        ["mixgrpo-1", "flow_grpo", "dancegrpo", "tempflow_grpo", "diffusion_nft", "awm", "dgpo"],
    ),
    "several granularities against one, equal iterations": (
        "same-1-2-3",
        ["same-1", "same-2", "same-3", "same-1-2"],
    ),
    "words: the same steps, noise at one or at all of them": (
        "g2rpo",
        ["three-at-once", "eight-steps", "eight-at-once"],
    ),
    "words: eight steps, noise at one or at all of them": ("eight-steps", ["eight-at-once"]),
    "algorithms of 2026 at equal price": (
        "g2rpo",
        ["priced-self_opd", "priced-epg", "priced-diffusion_nft", "priced-awm"],
    ),
    "the same on a reward with a gradient": (
        "g2rpo",
        ["priced-opsd", "priced-refl", "priced-diffusion_nft", "priced-self_opd"],
    ),
    "Self-OPD's regression on the samples of the clipped surrogate": (
        "self_opd-averaged",
        ["g2rpo-averaged", "self_opd-branch", "g2rpo-branch"],
    ),
    "eight seeds, rates by the one rule": (
        "g2rpo",
        ["mixgrpo-1", "flow_grpo", "dancegrpo", "tempflow_grpo", "adagrpo", "dgpo"],
    ),
    "words: why TempFlow-GRPO learns less": ("tempflow_grpo", list(WHY_TEMPFLOW)),
    "as published, in words": (
        "published-g2rpo",
        [f"published-{name}" for name in ("mixgrpo", "flow_grpo", "dancegrpo", "tempflow_grpo")],
    ),
}
"""By question a cell, and those over which its lead is asked for. Intervals are at Bonferroni's
level within a question. All but the first five were registered after the answers to the first four
(studies/registered_protocol.md)."""
CLOSE = 0.05
"""A lead is practically nothing if its interval lies within this."""
DIVERSE, NOISES = 24, 4
"""Prompts whose pictures are compared with each other, and pictures of each."""


NUMBERS = (*range(1, 11), 12, 13, 14, 15, 16, 17)
"""Of `QUESTIONS`, in the protocol; 11 is `studies.tuned`'s."""
FIXED = ["stay", "steps", "steps_16", "merged", "ones", "many", "self_opd", "forward"]
FIXED += ["reward_gradient", "refl", "published", "published_stay"]
"""Settings of a world that its cells name."""


def asked(world: str, numbers: Sequence[int]) -> dict[str, tuple[str, list[str]]]:
    """The questions with these numbers, from 1, that are asked of a world."""
    chosen = set(numbers) & set(WORLDS[world]["questions"])
    return {
        question: cells
        for number, (question, cells) in zip(NUMBERS, QUESTIONS.items(), strict=True)
        if number in chosen
    }


def cells(world: str, numbers: Sequence[int]) -> dict[str, list[str]]:
    """The changes of every cell that these questions need."""
    fixed = {key: str(WORLDS[world][key]).replace(" ", "") for key in FIXED}
    needed = {name for cell, others in asked(world, numbers).values() for name in (cell, *others)}
    known = CELLS | SAME_STEPS | PUBLISHED | SAME_ITERATIONS
    known |= REGRESSIONS | WEIGHTINGS | WHY_TEMPFLOW
    return {
        name: [change.format_map(fixed) for change in changes]
        for name, changes in known.items()
        if name in needed
    }


def prices(world: str, numbers: Sequence[int]) -> dict[str, float]:
    """Seconds of an iteration of these questions' cells, by plan with FLUX.1-dev at 512 pixels and
    a LoRA on an H100."""
    ours = [
        f"algorithm.branch_steps={WORLDS[world]['steps']}",
        "algorithm.granularities=[1]",
        "algorithm.tail=closed",
    ]
    ours += ["algorithm.branch_schedule=turns", "algorithm.group_size=12"]
    planner = Planner(
        "flux1-dev-evening", ["sampling.num_steps=10", "sampling.tails.forecast=true"]
    )
    found = {}
    for cell, changes in cells(world, numbers).items():
        # whose defaults replace ours
        other = any(change.startswith("algorithm.name=") for change in changes)
        changes = [change for change in changes if not change.startswith("budget=")]
        seconds = planner.plan(*([] if other else ours), *changes).seconds(CARDS["h100"])
        found[cell] = sum(seconds.iteration.values())
    return found


def study(world: str, numbers: Sequence[int], jobs: int, out: Path) -> dict[str, Any]:
    """Trains what is missing; what `g2rpo compare` found, and of cells none of whose rates learns
    in the pilots, which are not trained, the pilots."""
    setting, folder = WORLDS[world], StudyDirectory(out / world)
    wanted, before = cells(world, numbers), stamp(folder.results)
    try:
        compare(
            setting["recipe"],
            [
                *setting["overrides"],
                *COMMON,
                f"trainer.seed={setting['first_seed']}",
                f"optim.learning_rate={setting['rate']}",
            ],
            wanted,
            ("evaluations", setting["budget"]),
            find_rate=True,
            seeds=setting["seeds"],
            steps=[10, 20],
            jobs=jobs,
            out=folder.path,
            controls=True,
            emit=lambda event: print(event.text, flush=True) if isinstance(event, Line) else None,
        )
    except UserError:
        if stamp(folder.results) == before:  # refused, and not at the end
            raise
        trained = json.loads(folder.results.read_text())["spent"]
        if {*wanted} - {*trained} - {*without_rate(wanted, folder, setting["first_seed"])}:
            raise
    results: dict[str, Any] = json.loads(folder.results.read_text())
    results["without_rate"] = without_rate(wanted, folder, setting["first_seed"])
    free = Controls.model_validate(results["controls"])
    results["controls"] = [
        {
            "reward": reward,
            "control": way.name,
            "mean": way.means[reward],
            "change": asdict(way.changes[reward]),
        }
        for best in (free.best, free.best_of)
        for reward, way in best.items()
    ]
    return results


def stamp(file: Path) -> int | None:
    """When it was written; None if there is none."""
    return file.stat().st_mtime_ns if file.is_file() else None


def without_rate(wanted: Iterable[str], folder: StudyDirectory, seed: int) -> dict[str, list[str]]:
    """By cell none of whose rates learns, its pilots."""
    found = {}
    for cell in wanted:
        sweep = folder.run(cell, seed).read_rates()
        if sweep and sweep.rate is None and not sweep.missing():
            found[cell] = [str(pilot) for pilot in sweep.pilots]
    return found


def quiet_seconds(
    world: str, numbers: Sequence[int], spent: dict[str, Any], out: Path
) -> dict[str, float]:
    """Seconds of training of a run of each cell, alone on the machine: nine iterations of each, one
    cell after another."""
    setting, folder = WORLDS[world], out / world / "alone"
    wanted = {cell: changes for cell, changes in cells(world, numbers).items() if cell in spent}
    overrides, found = [*setting["overrides"], *COMMON], dict[str, float]()
    workers = Workers(
        1, lambda event: print(event.text, flush=True) if isinstance(event, Line) else None
    )
    for cell, changes in wanted.items():
        own = [*overrides, *(change for change in changes if not change.startswith(OWN_BUDGET))]
        run, short = Run(folder / cell), ["trainer.iterations=9", "evaluation.num_prompts=1"]
        if workers.run([training_job(f"{cell} alone", setting["recipe"], [*own, *short], run)]):
            raise SystemExit("the same command does what is missing")
        config = load_config(setting["recipe"], own)
        # the first is a warm-up
        rows = [row for row in run.read_log() if row["kind"] == "train" and row["iteration"] > 1]
        price = sum(row["seconds"] for row in rows) / sum(
            work(config, row["iteration"] - 1) for row in rows
        )
        found[cell] = price * spent[cell]["evaluations"]
    return found


def seeds_of(world: str) -> range:
    first = WORLDS[world]["first_seed"]
    return range(first, first + WORLDS[world]["seeds"])


def scores_of(world: str, cell: str, out: Path) -> Values:
    """By seed and held-out prompt, the share of right ones at 10 steps; of the base one row."""
    study, right = StudyDirectory(out / world), WORLDS[world]["right"]
    folders = (
        [study.judged("base")]
        if cell == "base"
        else [study.judged(cell, seed) for seed in seeds_of(world)]
    )
    return np.stack([read_judged(folder)[10, right] for folder in folders])


def leads(
    world: str, first: str, others: Sequence[str], trained: Collection[str], out: Path
) -> dict[str, Interval]:
    """Of a cell over others, paired by seed and prompt, crossed bootstrap; of those that were
    trained."""
    if first not in trained:
        return {}
    level, ours = 1 - 0.05 / len(others), scores_of(world, first, out)
    return {
        other: interval(ours - scores_of(world, other, out), level=level, resamples=20000)
        for other in others
        if other in trained
    }


def diversity(world: str, found: dict[str, Any], out: Path) -> dict[str, list[float | None]]:
    """How much right pictures of one prompt differ, of each of a cell's runs
    (`image_statistics.spread`), and of the base; None where no prompt has two."""
    right, spreads = WORLDS[world]["right"], dict[str, list[float | None]]()
    runs = [
        (cell, out / world / "runs" / cell / f"seed_{seed}")
        for cell in found["spent"]
        for seed in seeds_of(world)
    ]
    for cell, run in [("base", runs[0][1]), *runs]:
        config = Run(run).read_config()
        prompts = [
            it
            for it in build_prompts(config.evaluation.prompts, "prompts")[:DIVERSE]
            for _ in range(NOISES)
        ]
        judge = build_rewards({right: (config.rewards | config.evaluation.rewards)[right]})
        made = api.sampler(run, base=cell == "base", seed=1).evaluate(prompts, judge)
        verdicts = (made.scores[right] == 1).view(-1, NOISES)
        found_spread = spread(made.images.unflatten(0, (-1, NOISES)), verdicts)
        spreads.setdefault(cell, []).append(None if np.isnan(found_spread) else found_spread)
    return spreads


def verdict(lead: Interval) -> str:
    if lead.low > 0 or lead.high < 0:
        return "leads" if lead.low > 0 else "is behind"
    return "even" if lead.low > -CLOSE and lead.high < CLOSE else "open"


def table(results: dict[str, Any], reward: str) -> str:
    """In Markdown: cells with their costs and changes; then every question's leads."""
    spent, price = results["spent"], results["prices"]
    change = {
        (line["cell"], line["steps"]): line["change"]
        for line in results["judged"]
        if line["reward"] == reward
    }
    lines = [
        f"| cell | rate | iterations | s alone | min with FLUX.1-dev | `{reward}`, 10 steps | 20 steps |",
        "|---|---|---|---|---|---|---|",
    ]
    alone = results.get("alone", {})
    for cell, cost in spent.items():
        texts = [Interval(**change[cell, steps]) for steps in (10, 20)]
        rate = f"{cost['learning_rate']:g}" + (" (edge)" if cost["at_edge"] else "")
        minutes = price[cell] * cost["iterations"] / 60
        seconds = f"{alone[cell]:.0f}" if cell in alone else ""
        lines.append(
            f"| `{cell}` | {rate} | {cost['iterations']} | {seconds} | {minutes:.0f} | {texts[0]:+} | {texts[1]:+} |"
        )
    lines += [
        f"| `{cell}`: no rate learns in the pilots | | | | | | |"
        for cell in results.get("without_rate", {})
    ]
    lines += [
        f"| no training: {knob['control']} | | | | | {Interval(**knob['change']):+} | |"
        for knob in results["controls"]
        if knob["reward"] == reward
    ]
    shown, held, means = list(change_of(results, reward)), results["diversity"], results["by_seed"]
    lines += [
        "",
        f"| cell | by seed | {' | '.join(shown)} | diversity of right ones |",
        "|---" * (len(shown) + 3) + "|",
    ]
    lines.append(
        f"| base | {means['base'][0]:.3f} | {' | '.join('' for _ in shown)} | {held['base'][0]:.3f} |"
    )
    for cell in spent:
        gains = " | ".join(
            f"{Interval(**own[cell]):+}" for own in change_of(results, reward).values()
        )
        seeds = ", ".join(f"{value - means['base'][0]:+.2f}" for value in means[cell])
        known = [value for value in held[cell] if value is not None]
        of = "" if len(known) == len(held[cell]) else f", {len(known)} seeds"
        lines.append(f"| `{cell}` | {seeds} | {gains} | {np.mean(known):.3f}{of} |")
    for question, own in results["questions"].items():
        lines += [
            "",
            f"{question}: lead of `{QUESTIONS[question][0]}`",
            "",
            "| over | lead | |",
            "|---|---|---|",
        ]
        for name, found in own.items():
            lead = Interval(**found)
            lines.append(f"| `{name}` | {lead:+} | {verdict(lead)} |")
    return "\n".join(lines)


def change_of(results: dict[str, Any], reward: str) -> dict[str, dict[str, Any]]:
    """By reward, but for `reward`, the changes of the cells at 10 steps."""
    found: dict[str, dict[str, Any]] = {}
    for line in results["judged"]:
        if line["steps"] == 10 and line["reward"] != reward:
            found.setdefault(f"`{line['reward']}`", {})[line["cell"]] = line["change"]
    return found


def label(cell: str) -> str:
    """A cell's name in the figures: "{1, 2, 3}" of "same-1-2-3"."""
    name = cell.removeprefix("published-").removeprefix("same-").removeprefix("priced-")
    return {"exact": "{1}, exact tails"}.get(
        name, f"{{{name.replace('-', ', ')}}}" if name[0].isdigit() else name
    )


def draw(path: Path, found: dict[str, dict[str, Any]], questions: Sequence[str]) -> None:
    """Every lead with its interval, a panel for each of these questions, a colour for each world;
    the band is `CLOSE`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = {
        world: own
        for world, own in found.items()
        if any(question in own["questions"] for question in questions)
    }
    answered = {
        it: QUESTIONS[it]
        for it in questions
        if any(it in own["questions"] for own in found.values())
    }
    if not answered:
        return
    heights = [len(others) for _, others in answered.values()]
    figure = Figure(figsize=(7.6, 0.34 * sum(heights) + 0.9 * len(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[
        :, 0
    ]
    colours = dict(zip(found, LINE_COLOURS, strict=False))
    for panel, (question, (first, others)) in zip(panels, answered.items(), strict=True):
        panel.axvspan(-CLOSE, CLOSE, color="#e8e8ea", linewidth=0)
        panel.axvline(0, color="#888", linewidth=0.8)
        worlds = [world for world in found if question in found[world]["questions"]]
        for number, world in enumerate(worlds):
            for name, lead in found[world]["questions"][question].items():
                height = others.index(name) + 0.2 * (number - (len(worlds) - 1) / 2)
                panel.plot(
                    [lead["low"], lead["high"]], [height, height], color=colours[world], linewidth=2
                )
                panel.plot(lead["mean"], height, "o", color=colours[world])
        panel.set_yticks(range(len(others)), [f"over {label(name)}" for name in others], fontsize=9)
        panel.set_ylim(len(others) - 0.5, -0.5)
        panel.set_title(f"{question}:\nlead of {label(first)}", fontsize=10, loc="left")
    for world, colour in colours.items():
        panels[0].plot(
            [], [], "o-", color=colour, linewidth=2, label=f"{world}: {WORLDS[world]['right']}"
        )
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        fontsize=9,
        ncols=2,
        loc="outside upper left",
        frameon=False,
    )
    panels[-1].set_xlabel(
        "lead; bars: intervals at the corrected level; grey: practically nothing", fontsize=9
    )
    figure.savefig(path, dpi=120)


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The results of a world's earlier questions and of new ones."""
    kept = [line for line in old.get("judged", []) if line["cell"] not in new["spent"]]
    by_cell = {
        key: old.get(key, {}) | new.get(key, {})
        for key in (
            "alone",
            "spent",
            "without_rate",
            "prices",
            "pilots",
            "questions",
            "diversity",
            "by_seed",
        )
    }
    return {**new, **by_cell, "judged": kept + new["judged"]}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("worlds", nargs="*", default=list(WORLDS))
    parser.add_argument(
        "--questions",
        type=int,
        nargs="+",
        choices=NUMBERS,
        default=NUMBERS,
        help="by number; all by default",
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/registered"), help="holds the runs")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("studies/results/registered.json"),
        help="is added to",
    )
    parser.add_argument(
        "--seconds",
        action="store_true",
        help="only measures, one run at a time, what runs of --results take",
    )
    parser.add_argument(
        "--table", action="store_true", help="trains nothing: tables and figure of --results again"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    found = json.loads(args.results.read_text()) if args.results.is_file() else {}
    for world in args.worlds if args.seconds else ():
        alone = quiet_seconds(world, args.questions, found[world]["spent"], args.out)
        found[world]["alone"] = found[world].get("alone", {}) | alone
        write_whole(args.results, json.dumps(found, indent=1).encode())
    for world in () if args.table or args.seconds else args.worlds:
        if not asked(world, args.questions):
            continue
        price = prices(world, args.questions)
        new = study(world, args.questions, args.jobs, args.out)
        new["questions"] = {
            question: {
                name: asdict(lead)
                for name, lead in leads(world, first, others, new["spent"], args.out).items()
            }
            for question, (first, others) in asked(world, args.questions).items()
        }
        means = {
            cell: scores_of(world, cell, args.out).mean(1).tolist()
            for cell in ("base", *new["spent"])
        }
        new |= {"diversity": diversity(world, new, args.out), "prices": price, "by_seed": means}
        del new["curves"]
        found[world] = merged(found.get(world, {}), new)
        write_whole(args.results, json.dumps(found, indent=1).encode())
    first, later, newest = list(QUESTIONS)[:4], list(QUESTIONS)[4:10], list(QUESTIONS)[10:]
    draw(args.results.with_suffix(".png"), found, first)
    draw(args.results.with_name(f"{args.results.stem}_later.png"), found, later)
    draw(args.results.with_name(f"{args.results.stem}_newest.png"), found, newest)
    for world, results in found.items():
        print(f"## {world}\n\n{table(results, WORLDS[world]['right'])}\n", flush=True)


if __name__ == "__main__":
    main()
