"""Simulated people teach an embedded world by clicks: taste, an independent judge and the head, by the number of groups.

A person's utility of a picture is a taste, in standard deviations within groups of the base, and noise of .3; one click in ten
is random. Tastes are not among the rewards. `dz` is the change of the mean taste on held-out prompts in the base's standard
deviations within prompts. Who clicks on the word that is spelt best skips groups that are alike.

    python -m benchmarks.teach --tastes warm large dark compact --seeds 42 43 44 45 46 --out teach.json
    python -m benchmarks.teach --people every --groups 256 --every 16 --tastes dark large    # direct clicks, equal updates
    python -m benchmarks.teach --world words --tastes spelt --people clicks several guard random --seeds 42 43 44 45 46
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
from g2rpo.core.types import Reward
from g2rpo.evaluation.heldout import paired
from g2rpo.lab.teach.opening import opened, teach_config
from g2rpo.training.trainer import Trainer

GUARDED = ["rewards.scene_accuracy=", "rewards.scene_preference=1", "evaluation.rewards.scene_preference="]
WORLDS = {"scenes": (GUARDED, "scene_correct"), "words": (["rewards.ocr="], "ocr_exact")}
"""By recipe: overrides, which leave a guard that does not say what is right, and the independent judge, which does."""
NOISE, WRONG = 0.3, 0.1
HELDOUT, NOISES = 36, 2


def ink(images: Tensor) -> Tensor:
    """How far each pixel is from the ground, [B, H, W]."""
    return (images - images.flatten(2).median(2).values[..., None, None]).abs().amax(1)


def compact(images: Tensor) -> Tensor:
    """Minus the extent of what is drawn."""
    mass = ink(images)
    y, x = (torch.linspace(-1, 1, length) for length in mass.shape[1:])
    total = mass.sum((1, 2)) + 1e-6
    v, u = (mass.sum(2) * y).sum(1) / total, (mass.sum(1) * x).sum(1) / total
    return -(mass * ((y[None, :, None] - v[:, None, None]) ** 2 + (x - u[:, None])[:, None] ** 2)).sum((1, 2)) / total


TASTES: dict[str, Callable[[Tensor], Tensor]] = {
    "warm": lambda images: (images[:, 0] - images[:, 2]).mean((1, 2)),
    "large": lambda images: (ink(images) > 0.25).float().mean((1, 2)),
    "compact": compact,
    "dark": lambda images: -images.mean((1, 2, 3)),
    "symmetric": lambda images: -(images - images.flip(3)).abs().mean((1, 2, 3)),
}
SPELT = "spelt"
"""The taste of who reads: the word that is spelt best. In words."""
PEOPLE = ("clicks", "several", "random", "guard", "direct", "every", "offline")
"""`clicks`: by the taste. `several`: likes all pictures that are half a deviation above a group's mean. `random`: by chance.
`guard`: as `clicks`, but clicks have no weight. `direct`: as `clicks`, no head, no guard, an update for every four groups.
`every`: a click on every group that is trained on, without a head, with the guard and at the rate of a session. `offline`: as
`clicks`, on the base's pictures alone, and then a run on the head that is fitted to them."""
OFFLINE = 20
"""Iterations of the run on a stored session."""


@cache
def reader() -> Reward:
    """The reward `ocr` of words."""
    return build_rewards({"ocr": load_config("words", []).rewards["ocr"]})["ocr"]


def values_of(taste: str, images: Tensor, prompts: Sequence[str]) -> Tensor:
    """What a taste says of pictures."""
    return reader().scores(images, list(prompts)).float() if taste == SPELT else TASTES[taste](images)


def click(images: Tensor, prompt: str, round: int, taste: str, person: str, seed: int) -> tuple[int, ...]:
    """The pictures of a round's group that a simulated person chooses; none: skipped."""
    generator = generator_for(seed, "person", round)
    values = values_of(taste, images, [prompt] * len(images))
    if taste == SPELT and values.max() == values.min():
        return ()
    utility = (values - values.mean()) / values.std().clamp(min=1e-6) + NOISE * torch.randn(len(values), generator=generator)
    wrong = person == "random" or float(torch.rand((), generator=generator)) < WRONG
    if wrong:
        return (int(torch.randint(len(values), (), generator=generator)),)
    return tuple(torch.nonzero(utility > 0.5).flatten().tolist()) if person == "several" else (int(utility.argmax()),)


class Chosen(Reward):
    """1 for the picture of each group that a simulated person clicks, 0 for the others: clicks without a head."""

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
    heldout = build_prompts(t.config.evaluation.prompts, "prompts")[60 : 60 + HELDOUT]
    prompts = [prompt for prompt in heldout for _ in range(NOISES)]
    images = t.evaluator.sampler_now(seed=7).pictures(prompts)
    known = [*TASTES, *([SPELT] if judge == WORLDS["words"][1] else [])]
    tastes = {name: values_of(name, images, prompts).view(HELDOUT, NOISES) for name in known}
    return tastes, t.judges[judge].scores(images, prompts)


Row = dict[str, Any]


def clicked_directly(world: str, taste: str, seed: int, groups: int, every: int, overrides: list[str]) -> list[Row]:
    """A row whenever `every` more groups were clicked on: G2RPO with `Chosen` in the place of the head, without a brake."""
    config = teach_config(world, [*WORLDS[world][0], f"trainer.seed={seed}", *overrides], lambda _: None)
    guards = build_rewards({name: entry for name, entry in config.rewards.items() if name != "clicks"})
    person, rows = Chosen(taste, seed), list[Row]()
    trainer = api.trainer(config, rewards={**guards, "clicks": person})
    person.clicks = 0  # it was tried on random pictures
    base = measured(trainer)
    while person.clicks < groups:
        trainer.iterate()
        if person.clicks % every == 0 or person.clicks >= groups:
            rows.append({"groups": person.clicks, **change(base, trainer, taste)})
            print(taste, "every", seed, json.dumps(rows[-1]), flush=True)
    return rows


def session_of(
    world: str, taste: str, person: str, seed: int, groups: int, every: int, overrides: list[str], strength: float = 1
) -> list[Row]:
    """A row every `every` groups: dz of every taste, the judge, agreement. Of a run on stored answers, every `every`
    iterations."""
    if person == "every":
        return clicked_directly(world, taste, seed, groups, every, overrides)
    rows: list[Row] = []
    guarded = WORLDS[world][0]
    chosen = [*guarded, f"trainer.seed={seed}", *(["rewards.clicks=1e-9"] if person == "guard" else []), *overrides]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with opened(world, chosen, run) as session:
            if person == "direct":
                session.learn_directly()
            session.set_strength(0 if person == "offline" else strength)  # at 0 it asks and learns nothing
            base = measured(session.trainer)
            for number in range(1, groups + 1):
                group = session.group
                best = click(group.images, group.prompt, group.round, taste, person, seed)
                session.answer(best, round=group.round, skipped=not best)
                if number == groups:
                    session.settle()  # as "Finish" does
                if number % every == 0 and person != "offline":
                    head = session.head
                    of_head = {"agreement": head.agreement.mean, "block": head.block} if head else {}
                    undone = sum(bool(look.wrong) for look in session.brake.looks)
                    about = {"groups": number, "moved": session.moved, "undone": undone, **of_head}
                    rows.append({**about, **change(base, session.trainer, taste)})
                    print(taste, person, seed, json.dumps(rows[-1]), flush=True)
        if person == "offline":
            stored = ["rewards.clicks=0.5", f"rewards.clicks.options.run={run}", f"trainer.iterations={OFFLINE}"]
            trainer = api.trainer(world, [*stored, "evaluation.num_prompts=2", *chosen], Path(folder) / "trained")
            for row in trainer.train():
                if row["kind"] == "train" and row["iteration"] % every == 0:
                    rows.append({"groups": groups, **change(base, trainer, taste)})
                    print(taste, person, seed, json.dumps(rows[-1]), flush=True)
    return rows


def change(base: tuple[dict[str, Tensor], Tensor], trainer: Trainer, taste: str) -> Row:
    """How far tastes have moved, and the judge, since `base` was measured."""
    (before, correct), (now, right) = base, measured(trainer)
    within = {name: float((one[:, 0] - one[:, 1]).square().mean().div(2).sqrt()) for name, one in before.items()}
    moved = {name: paired(before[name].mean(1), now[name].mean(1)) for name in before}
    judged = paired(correct, right)
    return {
        "dz": {name: (one.tuned - one.base) / within[name] for name, one in moved.items()},
        "dz_error": moved[taste].error / within[taste],
        "correct": judged.tuned,
        "correct_base": judged.base,
        "correct_error": judged.error,
        "iterations": trainer.iteration,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=WORLDS, default="scenes")
    parser.add_argument("--tastes", nargs="+", default=list(TASTES), choices=[*TASTES, SPELT])
    parser.add_argument("--people", nargs="+", default=["clicks"], choices=PEOPLE)
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--strength", type=float, default=1, help="how far to go")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the recipe")
    parser.add_argument("--out", type=Path, help="a JSON file, to which sessions are added that it lacks")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    found = json.loads(args.out.read_text(encoding="utf-8")) if args.out and args.out.exists() else {}
    for seed, person, taste in product(args.seeds, args.people, args.tastes):
        if (name := f"{taste}/{person}/{seed}") not in found:
            found[name] = session_of(args.world, taste, person, seed, args.groups, args.every, args.set, args.strength)
            if args.out:
                args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(table(found))


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """The last row of every session, as means over seeds with standard errors."""
    lines = ["| person, taste | seeds | dz | correct | base | agreement |", "|---|---|---|---|---|---|"]
    for cell in dict.fromkeys(name.rpartition("/")[0] for name in found):
        taste = cell.partition("/")[0]
        rows = [rows[-1] for name, rows in found.items() if name.rpartition("/")[0] == cell]
        columns = [[row["dz"][taste] for row in rows], *([row[key] for row in rows] for key in ("correct", "correct_base"))]
        columns.append([row["agreement"] for row in rows if row.get("agreement") is not None])
        shown = [_mean(values, form) for values, form in zip(columns, ("+.2f", ".2f", ".2f", ".2f"), strict=True)]
        lines.append(f"| {cell} | {len(rows)} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _mean(values: list[float], form: str) -> str:
    error = f" ± {stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{mean(values):{form}}{error}" if values else ""


if __name__ == "__main__":
    main()
