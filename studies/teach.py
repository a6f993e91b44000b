"""Simulated people teach an embedded world by clicks: taste, an independent judge and the head, by
the number of groups.

A person's utility of a picture is a taste, in standard deviations within groups of the base, and
noise of .3; one click in ten is random. Tastes are not among the rewards. `dz` is the change of the
mean taste on the held-out prompts in the base's standard deviations within prompts. The guard,
which is trained on beside the clicks, moves tastes too: `beyond` is dz less that of the guard alone
at the same seed after as many iterations. Who clicks on the word that is spelt best skips groups
that are alike.

    python -m studies.teach --tastes green top sparse dark large --people clicks guard --seeds 42 43
    python -m studies.teach --world words --tastes spelt --people several guard --strength 2 --seeds 42 43 44 45 46
    python -m studies.teach --world words --tastes spelt --strength 0 --groups 14 --every 14    # how many are skipped
    python -m studies.teach --people every --groups 256 --every 16 --tastes dark large    # direct clicks, equal updates
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from g2rpo import api
from g2rpo.assembly.config import load_config
from g2rpo.assembly.prompts import build_prompts
from g2rpo.assembly.rewards import build_rewards
from g2rpo.core.seeding import generator_for
from g2rpo.core.statistics import paired
from g2rpo.core.types import Reward
from g2rpo.lab.teach.commands import UNGUARDED, opened, teach_config
from g2rpo.training.trainer import Trainer

WORLDS = {
    "scenes": (UNGUARDED["scenes"], "scene_correct"),
    "words": (UNGUARDED["words"], "ocr_exact"),
}
"""By recipe: overrides, which leave a guard that does not say what is right, and the independent
judge, which does."""
NOISE, WRONG = 0.3, 0.1
HELDOUT, NOISES = 96, 2
"""The held-out prompts of a session, all of them, and pictures of each."""


def ink(images: Tensor) -> Tensor:
    """How far each pixel is from the ground, [B, H, W]."""
    return (images - images.flatten(2).median(2).values[..., None, None]).abs().amax(1)


def compact(images: Tensor) -> Tensor:
    """Minus the extent of what is drawn."""
    mass = ink(images)
    y, x = (torch.linspace(-1, 1, length) for length in mass.shape[1:])
    total = mass.sum((1, 2)) + 1e-6
    v, u = (mass.sum(2) * y).sum(1) / total, (mass.sum(1) * x).sum(1) / total
    return (
        -(mass * ((y[None, :, None] - v[:, None, None]) ** 2 + (x - u[:, None])[:, None] ** 2)).sum(
            (1, 2)
        )
        / total
    )


def top(images: Tensor) -> Tensor:
    """How high up what is drawn lies, from -1 to 1."""
    rows = ink(images).sum(2)
    return -(rows * torch.linspace(-1, 1, rows.shape[1])).sum(1) / (rows.sum(1) + 1e-6)


TASTES: dict[str, Callable[[Tensor], Tensor]] = {
    "warm": lambda images: (images[:, 0] - images[:, 2]).mean((1, 2)),
    "large": lambda images: (ink(images) > 0.25).float().mean((1, 2)),
    "compact": compact,
    "dark": lambda images: -images.mean((1, 2, 3)),
    "green": lambda images: (images[:, 1] - images[:, [0, 2]].mean(1)).mean((1, 2)),
    "top": top,
    "sparse": lambda images: -ink(images).mean((1, 2)),
    "symmetric": lambda images: -(images - images.flip(3)).abs().mean((1, 2, 3)),
}
SPELT = "spelt"
"""The taste of who reads: the word that is spelt best. In words."""
PEOPLE = ("clicks", "several", "random", "guard", "direct", "every", "offline")
"""`clicks`: by the taste. `several`: likes all pictures that are half a deviation above a group's
mean. `random`: by chance. `guard`: nobody; the guard alone, for as long as each session of its
seed. `direct`: as `clicks`, no head, no guard, an update for every four groups. `every`: a click on
every group that is trained on, without a head, with the guard and at the rate of a session.
`offline`: as `clicks`, on the base's pictures alone, and then a run on the head that is fitted to
them."""
OFFLINE = 20
"""Iterations of the run on a stored session."""


@cache
def reader() -> Reward:
    """The reward `ocr` of words."""
    return build_rewards({"ocr": load_config("words", []).rewards["ocr"]})["ocr"]


def values_of(taste: str, images: Tensor, prompts: Sequence[str]) -> Tensor:
    """What a taste says of pictures."""
    return (
        reader().scores(images, list(prompts)).float() if taste == SPELT else TASTES[taste](images)
    )


def click(
    images: Tensor, prompt: str, round: int, taste: str, person: str, seed: int
) -> tuple[int, ...]:
    """The pictures of a round's group that a simulated person chooses; none: skipped."""
    generator = generator_for(seed, "person", round)
    values = values_of(taste, images, [prompt] * len(images))
    if taste == SPELT and values.max() == values.min():
        return ()
    utility = (values - values.mean()) / values.std().clamp(min=1e-6) + NOISE * torch.randn(
        len(values), generator=generator
    )
    wrong = person == "random" or float(torch.rand((), generator=generator)) < WRONG
    if wrong:
        return (int(torch.randint(len(values), (), generator=generator)),)
    return (
        tuple(torch.nonzero(utility > 0.5).flatten().tolist())
        if person == "several"
        else (int(utility.argmax()),)
    )


class Chosen(Reward):
    """1 for the picture of each group that a simulated person clicks, 0 for the others: clicks
    without a head."""

    group = True
    batch_size = 2**31  # a group is never divided

    def __init__(self, taste: str, seed: int) -> None:
        self.taste, self.seed, self.clicks = taste, seed, 0

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        scores = torch.zeros(len(images))
        scores[list(click(images, prompts[0], self.clicks, self.taste, "every", self.seed))] = 1
        self.clicks += 1
        return scores


def measured(t: Trainer) -> tuple[dict[str, Tensor], Tensor]:
    """The tastes [P, J] of held-out pictures, and the independent judge [P * J]."""
    judge = next(judge for _, judge in WORLDS.values() if judge in t.judges)
    heldout = build_prompts(t.config.evaluation.prompts, "prompts")[:HELDOUT]
    prompts = [prompt for prompt in heldout for _ in range(NOISES)]
    images = t.evaluator.sampler_now(seed=7).pictures(prompts)
    known = [*TASTES, *([SPELT] if judge == WORLDS["words"][1] else [])]
    tastes = {name: values_of(name, images, prompts).view(HELDOUT, NOISES) for name in known}
    return tastes, t.judges[judge].scores(images, prompts)


Row = dict[str, Any]


def clicked_directly(
    world: str, taste: str, seed: int, groups: int, every: int, overrides: list[str]
) -> list[Row]:
    """A row whenever `every` more groups were clicked on: G2RPO with `Chosen` in the place of the
    head, without a brake."""
    config = teach_config(
        world, [*WORLDS[world][0], f"trainer.seed={seed}", *overrides], lambda _: None
    )
    guards = build_rewards(
        {name: entry for name, entry in config.rewards.items() if name != "clicks"}
    )
    person, rows = Chosen(taste, seed), list[Row]()
    trainer = api.trainer(config, rewards={**guards, "clicks": person})
    person.clicks = 0  # it was tried on random pictures
    base = measured(trainer)
    while person.clicks < groups:
        trainer.iterate()
        if person.clicks % every == 0 or person.clicks >= groups:
            rows.append({"groups": person.clicks, **change(base, trainer)})
            print(taste, "every", seed, json.dumps(rows[-1]), flush=True)
    return rows


def guard_alone(world: str, seed: int, wanted: set[int], overrides: list[str]) -> list[Row]:
    """A row after each of the `wanted` numbers of iterations on the guard alone, with the brake and
    the rate of a session."""
    rows: list[Row] = []
    chosen = [*WORLDS[world][0], f"trainer.seed={seed}", "rewards.clicks=1e-9", *overrides]
    with (
        tempfile.TemporaryDirectory() as folder,
        opened(world, chosen, Path(folder) / "run") as session,
    ):
        base = measured(session.trainer)
        while session.trainer.iteration < max(wanted):
            session.pupil.iterate()
            if session.trainer.iteration in wanted:
                rows.append(change(base, session.trainer))
                print("guard", seed, json.dumps(rows[-1]), flush=True)
    return rows


def session_of(
    world: str,
    taste: str,
    person: str,
    seed: int,
    groups: int,
    every: int,
    overrides: list[str],
    strength: float = 1,
) -> list[Row]:
    """A row every `every` groups: dz of every taste, the judge, agreement. Of a run on stored
    answers, every `every` iterations."""
    if person == "every":
        return clicked_directly(world, taste, seed, groups, every, overrides)
    rows: list[Row] = []
    guarded = WORLDS[world][0]
    chosen = [*guarded, f"trainer.seed={seed}", *overrides]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with opened(world, chosen, run) as session:
            if person == "direct":
                session.learn_directly()
            # at 0 it asks and learns nothing
            session.set_strength(0 if person == "offline" else strength)
            base = measured(session.trainer)
            for number in range(1, groups + 1):
                group = session.group
                best = click(group.images, group.prompt, group.round, taste, person, seed)
                session.answer(best, round=group.round, skipped=not best)
                if number == groups:
                    session.pupil.settle()  # as "Finish" does
                if number % every == 0 and person != "offline":
                    pupil = session.pupil
                    head = pupil.learnt.head
                    of_head = (
                        {"agreement": head.agreement.mean, "block": head.block} if head else {}
                    )
                    undone = sum(bool(look.wrong) for look in pupil.learnt.looks)
                    about = {
                        "groups": number,
                        "skipped": number - pupil.answered,
                        "moved": pupil.moved,
                        "undone": undone,
                    }
                    rows.append({**about, **of_head, **change(base, session.trainer)})
                    print(taste, person, seed, json.dumps(rows[-1]), flush=True)
        if person == "offline":
            stored = [
                "rewards.clicks=0.5",
                f"rewards.clicks.options.run={run}",
                f"trainer.iterations={OFFLINE}",
            ]
            trainer = api.trainer(
                world, [*stored, "evaluation.num_prompts=2", *chosen], Path(folder) / "trained"
            )
            for row in trainer.train():
                if row["kind"] == "train" and row["iteration"] % every == 0:
                    rows.append({"groups": groups, **change(base, trainer)})
                    print(taste, person, seed, json.dumps(rows[-1]), flush=True)
    return rows


def change(base: tuple[dict[str, Tensor], Tensor], trainer: Trainer) -> Row:
    """How far tastes have moved, and the judge, since `base` was measured."""
    (before, correct), (now, right) = base, measured(trainer)
    within = {
        name: float((one[:, 0] - one[:, 1]).square().mean().div(2).sqrt())
        for name, one in before.items()
    }
    moved = {name: paired(before[name].mean(1), now[name].mean(1)) for name in before}
    judged = paired(correct, right)
    return {
        "dz": {name: round(one.change / within[name], 4) for name, one in moved.items()},
        "dz_error": {name: round(one.error / within[name], 4) for name, one in moved.items()},
        "correct": judged.tuned,
        "correct_base": judged.base,
        "correct_error": judged.error,
        "iterations": trainer.iteration,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", choices=WORLDS, default="scenes")
    parser.add_argument("--tastes", nargs="+", default=list(TASTES), choices=[*TASTES, SPELT])
    parser.add_argument("--people", nargs="+", default=["clicks"], choices=PEOPLE)
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--strength", type=float, default=1, help="how far to go")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the recipe"
    )
    parser.add_argument(
        "--out", type=Path, help="a JSON file, to which sessions are added that it lacks"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    found = (
        json.loads(args.out.read_text(encoding="utf-8")) if args.out and args.out.exists() else {}
    )

    def kept(name: str, rows: list[Row]) -> None:
        found[name] = rows
        if args.out:
            args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")

    people = [person for person in args.people if person != "guard"]
    for seed, person, taste in product(args.seeds, people, args.tastes):
        if (name := f"{taste}/{person}/{seed}") not in found:
            kept(
                name,
                session_of(
                    args.world,
                    taste,
                    person,
                    seed,
                    args.groups,
                    args.every,
                    args.set,
                    args.strength,
                ),
            )
    for seed in args.seeds if "guard" in args.people else ():
        lengths = {
            rows[-1]["iterations"] for name, rows in found.items() if name.endswith(f"/{seed}")
        }
        wanted = lengths - {0, *(row["iterations"] for row in found.get(f"guard/{seed}", []))}
        if wanted:
            kept(
                f"guard/{seed}",
                found.get(f"guard/{seed}", []) + guard_alone(args.world, seed, wanted, args.set),
            )
    print(table(found))


def table(found: dict[str, list[Row]]) -> str:
    """The last row of every session, as means over seeds with standard errors, beside the guard
    alone."""
    lines = [
        "| person, taste | seeds | dz | guard alone | beyond | correct | guard alone | agreement | iterations |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    sessions = [name for name in found if not name.startswith("guard/")]
    for cell in dict.fromkeys(name.rpartition("/")[0] for name in sessions):
        taste = cell.partition("/")[0]
        seeds = [name.rpartition("/")[2] for name in sessions if name.rpartition("/")[0] == cell]
        rows = [found[f"{cell}/{seed}"][-1] for seed in seeds]
        guards = [
            row
            for seed, own in zip(seeds, rows, strict=True)
            if (row := guard_after(found.get(f"guard/{seed}", []), own))
        ]
        own, control = ([row["dz"][taste] for row in side] for side in (rows, guards))
        beyond = (
            [one - other for one, other in zip(own, control, strict=True)]
            if len(guards) == len(rows)
            else []
        )
        agreed = [row["agreement"] for row in rows if row.get("agreement") is not None]
        columns = [_mean(values, "+.2f") for values in (own, control, beyond)]
        columns += [_mean([row["correct"] for row in side], ".2f") for side in (rows, guards)]
        columns += [_mean(agreed, ".2f"), ", ".join(str(row["iterations"]) for row in rows)]
        lines.append(f"| {cell} | {len(rows)} | {' | '.join(columns)} |")
    return "\n".join(lines)


def guard_after(guard: list[Row], session: Row) -> Row | None:
    """The row of the guard alone after as many iterations as a session's; before any it is the
    base's."""
    if not session["iterations"]:
        return {"dz": dict.fromkeys(session["dz"], 0.0), "correct": session["correct_base"]}
    return next((row for row in guard if row["iterations"] == session["iterations"]), None)


def _mean(values: list[float], form: str) -> str:
    error = f" ± {stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{mean(values):{form}}{error}" if values else ""


if __name__ == "__main__":
    main()
