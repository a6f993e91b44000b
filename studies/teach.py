"""Simulated people teach an embedded world by clicks: taste, an independent judge and the head, by
the number of groups.

A person's utility of a picture is a taste, in standard deviations within groups of the base, and
noise of .3; one click in ten is random. Tastes are not among the rewards. `dz` is the change of the
mean taste on the held-out prompts, weighted so that all colours are asked for equally often, in the
base's standard deviations within prompts. When a session is over the person compares twelve pairs,
and goes back if it was better before. The guard,
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
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from g2rpo import api
from g2rpo.assembly.prompts import build_prompts
from g2rpo.assembly.rewards import build_rewards
from g2rpo.core.files import write_whole
from g2rpo.core.statistics import paired
from g2rpo.lab.teach.commands import UNGUARDED, opened, teach_config
from g2rpo.lab.teach.pupil import Pupil
from g2rpo.testbed.scenes import COLOURS as SCENE_COLOURS
from g2rpo.testbed.words.language import INK_COLOURS
from g2rpo.training.trainer import Trainer
from studies.teach_people import SPELT, TASTES, Chosen, Known, click, compare, values_of, within

WORLDS = {
    "scenes": (UNGUARDED["scenes"], "scene_correct"),
    "words": (UNGUARDED["words"], "ocr_exact"),
}
"""By recipe: overrides, which leave a guard that does not say what is right, and the independent
judge, which does."""
COLOURS = {*SCENE_COLOURS, *INK_COLOURS}
HELDOUT, NOISES = 96, 2
"""The held-out prompts of a session, all of them, and pictures of each."""

PEOPLE = ("clicks", "several", "random", "guard", "known", "direct", "every", "offline")
"""`clicks`: by the taste. `several`: likes all pictures that are half a deviation above a group's
mean. `random`: by chance. `guard`: nobody; the guard alone, for as long as each session of its
seed. `known`: nobody; the taste itself in the place of a head, for as long as the session of its
taste and seed. `direct`: as `clicks`, no head, no guard, an update for every four groups. `every`: a click on
every group that is trained on, without a head, with the guard and at the rate of a session.
`offline`: as `clicks`, on the base's pictures alone, and then a run on the head that is fitted to
them."""
OFFLINE = 20
"""Iterations of the run on a stored session."""


def measured(t: Trainer) -> tuple[dict[str, Tensor], Tensor]:
    """The tastes [P, J] of held-out pictures, and the independent judge [P * J]."""
    judge = next(judge for _, judge in WORLDS.values() if judge in t.judges)
    heldout = build_prompts(t.config.evaluation.prompts, "prompts")[:HELDOUT]
    prompts = [prompt for prompt in heldout for _ in range(NOISES)]
    images = t.evaluator.sampler_now(seed=7).pictures(prompts)
    known = [*TASTES, *([SPELT] if judge == WORLDS["words"][1] else [])]
    tastes = {name: values_of(name, images, prompts).view(HELDOUT, NOISES) for name in known}
    return tastes, t.judges[judge].scores(images, prompts)


def balanced(prompts: Sequence[str]) -> Tensor:
    """Weights of prompts, of mean 1, with which all colours are asked for equally often."""
    asked = [[one for one in re.findall(r"\w+", prompt) if one in COLOURS] for prompt in prompts]
    times = Counter(colour for each in asked for colour in each)
    weights = torch.tensor([mean(1 / times[colour] for colour in each) for each in asked])
    return weights / weights.mean()


Row = dict[str, Any]
Base = tuple[dict[str, Tensor], Tensor]
BASES: dict[tuple[str, ...], Base] = {}


def base_of(world: str, overrides: Sequence[str], t: Trainer) -> Base:
    """`measured` of the base model, which is the same for all sessions of a world."""
    if (key := (world, *overrides)) not in BASES:
        BASES[key] = measured(t)
    return BASES[key]


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
    base = base_of(world, overrides, trainer)
    while person.clicks < groups:
        trainer.iterate()
        if person.clicks % every == 0 or person.clicks >= groups:
            rows.append({"groups": person.clicks, **change(base, trainer)})
            print(taste, "every", seed, json.dumps(rows[-1]), flush=True)
    return rows


def without_head(
    world: str, taste: str | None, seed: int, wanted: set[int], overrides: list[str]
) -> list[Row]:
    """A row after each of the `wanted` numbers of iterations on a taste that is known and the
    guard, or on the guard alone; with the brake and the rate of a session."""
    chosen = [*WORLDS[world][0], f"trainer.seed={seed}", *overrides]
    config, rows = teach_config(world, chosen, lambda _: None), list[Row]()
    entries = {name: entry for name, entry in config.rewards.items() if name != "clicks"}
    trainer = api.trainer(config, rewards={**build_rewards(entries), "clicks": Known(taste)})
    trainer.evaluate()
    pupil, base = Pupil(trainer, lambda _: None), base_of(world, overrides, trainer)
    while trainer.iteration < max(wanted):
        pupil.iterate()
        if trainer.iteration in wanted:
            rows.append(change(base, trainer))
            print("known", taste, seed, json.dumps(rows[-1]), flush=True)
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
            base, compared = base_of(world, overrides, session.trainer), list[Row]()
            for number in range(1, groups + 1):
                group = session.group
                best = click(group.images, group.prompt, group.round, taste, person, seed)
                session.answer(best, round=group.round, skipped=not best)
                if number == groups and session.unconfirmed:  # as "Finish" does
                    session.begin_blind()
                if session.comparing:
                    claimed = session.pupil.moved
                    compared.append(compare(session, taste, base[0], seed))
                    compared[-1] |= {"claimed": claimed, **change(base, session.trainer)}
                    if number == groups and compared[-1]["verdict"] == "worse":
                        session.go_back()
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
                        "compared": list(compared),
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


def change(base: Base, trainer: Trainer) -> Row:
    """How far tastes have moved, and the judge, since `base` was measured."""
    (before, correct), (now, right) = base, measured(trainer)
    unit = {name: within(one) for name, one in before.items()}
    weights = balanced(build_prompts(trainer.config.evaluation.prompts, "prompts")[:HELDOUT])
    moved = {
        name: paired(weights * before[name].mean(1), weights * now[name].mean(1)) for name in before
    }
    judged = paired(correct, right)
    return {
        "dz": {name: round(one.change / unit[name], 4) for name, one in moved.items()},
        "dz_error": {name: round(one.error / unit[name], 4) for name, one in moved.items()},
        "correct": judged.tuned,
        "correct_base": judged.base,
        "correct_error": judged.error,
        "iterations": trainer.iteration,
    }


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
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
    return parser.parse_args(given)


def study(args: argparse.Namespace) -> dict[str, list[Row]]:
    """Runs the sessions and controls that the file lacks; returns all by name."""
    found = (
        json.loads(args.out.read_text(encoding="utf-8")) if args.out and args.out.exists() else {}
    )

    def kept(name: str, rows: list[Row]) -> None:
        found[name] = rows
        if args.out:
            write_whole(args.out, json.dumps(found, indent=1).encode())

    people = [person for person in args.people if person not in ("guard", "known")]
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
    controls = [(None, "guard")] * ("guard" in args.people)
    controls += [(taste, f"{taste}/known") for taste in args.tastes if "known" in args.people]
    for seed, (taste, control) in product(args.seeds, controls):
        sessions = [
            name
            for name in found
            if name.endswith(f"/{seed}")
            and name.startswith(f"{taste}/" if taste else "")
            and not of_nobody(name)
        ]
        lengths = {found[name][-1]["iterations"] for name in sessions}
        have = found.get(name := f"{control}/{seed}", [])
        if wanted := lengths - {0, *(row["iterations"] for row in have)}:
            kept(name, have + without_head(args.world, taste, seed, wanted, args.set))
    return found


def main() -> None:
    print(table(study(arguments())))


def of_nobody(name: str) -> bool:
    """Whether a name is that of a control."""
    return name.startswith("guard/") or "/known/" in name


def table(found: dict[str, list[Row]]) -> str:
    """The last row of every session, as means over seeds with standard errors, beside the guard
    alone."""
    head = "person, taste|seeds|dz|guard alone|beyond|correct|guard alone|agreement|iterations"
    names = [*head.split("|"), "taste known, beyond", "pairs"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    sessions = [name for name in found if not of_nobody(name)]
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
        known = [
            found[name][-1]["dz"][taste] - guard["dz"][taste]
            for seed, guard in zip(seeds, guards, strict=False)
            if (name := f"{taste}/known/{seed}") in found
        ]
        pairs = [f"{one['net']:+d}" for row in rows for one in row.get("compared", [])]
        columns += [_mean(known, "+.2f"), ", ".join(pairs)]
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
