"""Simulated people teach the embedded scenes by clicks: taste, an independent judge and the head, by the number of groups.

A person's utility of a picture is a taste, in standard deviations within groups of the base, and noise of .3; one click in ten
is random. Tastes are no built-in reward. `dz` is the change of the mean taste on held-out prompts in the base's standard
deviations within prompts.

    python -m benchmarks.teach --tastes warm large --seeds 42 43 --groups 20
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from g2rpo.core.seeding import generator_for
from g2rpo.evaluation.heldout import paired
from g2rpo.lab.teach.opening import opened
from g2rpo.lab.teach.session import Group, Session
from g2rpo.testbed.grammar import prompts as prompts_of

GUARDED = ["rewards.scene_accuracy=", "rewards.scene_preference=1", "evaluation.rewards.scene_preference="]
NOISE, WRONG = 0.3, 0.1
HELDOUT, NOISES = 36, 2


def ink(images: Tensor) -> Tensor:
    """How far each pixel is from the ground, [B, H, W]."""
    return (images - images.flatten(2).median(2).values[..., None, None]).abs().amax(1)


def compact(images: Tensor) -> Tensor:
    """Minus the extent of what is drawn."""
    mass = ink(images)
    side = torch.linspace(-1, 1, mass.shape[1])
    total = mass.sum((1, 2)) + 1e-6
    v, u = (mass.sum(2) * side).sum(1) / total, (mass.sum(1) * side).sum(1) / total
    return -(mass * ((side[None, :, None] - v[:, None, None]) ** 2 + (side - u[:, None])[:, None] ** 2)).sum((1, 2)) / total


TASTES: dict[str, Callable[[Tensor], Tensor]] = {
    "warm": lambda images: (images[:, 0] - images[:, 2]).mean((1, 2)),
    "large": lambda images: (ink(images) > 0.25).float().mean((1, 2)),
    "compact": compact,
    "dark": lambda images: -images.mean((1, 2, 3)),
    "symmetric": lambda images: -(images - images.flip(3)).abs().mean((1, 2, 3)),
}
PEOPLE = ("clicks", "random", "skips")


def click(group: Group, taste: Callable[[Tensor], Tensor], person: str, seed: int) -> tuple[int, ...]:
    """What a simulated person answers."""
    generator = generator_for(seed, "person", group.round)
    values = taste(group.images)
    utility = (values - values.mean()) / values.std().clamp(min=1e-6) + NOISE * torch.randn(len(values), generator=generator)
    wrong = person == "random" or float(torch.rand((), generator=generator)) < WRONG
    best = int(torch.randint(len(values), (), generator=generator)) if wrong else int(utility.argmax())
    return () if person == "skips" else (best,)


def measured(session: Session, taste: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The taste [P, J] of held-out pictures, and the independent judge [P * J]."""
    t = session.trainer
    prompts = [prompt for prompt in prompts_of("heldout")[60 : 60 + HELDOUT] for _ in range(NOISES)]
    images = t.evaluator.sampler_now(seed=7).pictures(prompts)
    return taste(images).view(HELDOUT, NOISES), t.judges["scene_correct"].scores(images, prompts)


def session_of(taste: str, person: str, seed: int, groups: int, every: int, overrides: list[str]) -> list[dict[str, object]]:
    """A row every `every` groups: dz, the judge, agreement."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        chosen = [*GUARDED, f"trainer.seed={seed}", *overrides]
        with opened("scenes-fast", chosen, Path(folder) / "run") as session:
            before, correct = measured(session, TASTES[taste])
            within = float((before[:, 0] - before[:, 1]).square().mean().div(2).sqrt())
            for number in range(1, groups + 1):
                liked = click(session.group, TASTES[taste], person, seed)
                session.answer(liked, round=session.next, skipped=person == "skips")
                if number % every == 0:
                    now, right = measured(session, TASTES[taste])
                    moved, judged = paired(before.mean(1), now.mean(1)), paired(correct, right)
                    head = session.head
                    rows.append(
                        {
                            "groups": number,
                            "dz": (moved.tuned - moved.base) / within,
                            "dz_error": moved.error / within,
                            "correct": judged.tuned,
                            "correct_base": judged.base,
                            "correct_error": judged.error,
                            "agreement": head.agreement.mean if head else None,
                            "block": head.block if head else None,
                            "iterations": session.trainer.iteration,
                            "undone": sum(bool(look.wrong) for look in session.looks),
                        }
                    )
                    print(
                        taste,
                        person,
                        seed,
                        json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}),
                        flush=True,
                    )
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tastes", nargs="+", default=list(TASTES), choices=TASTES)
    parser.add_argument("--people", nargs="+", default=["clicks"], choices=PEOPLE)
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the recipe")
    parser.add_argument("--out", type=Path, help="a JSON file")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    found = {
        f"{taste}/{person}/{seed}": session_of(taste, person, seed, args.groups, args.every, args.set)
        for taste in args.tastes
        for person in args.people
        for seed in args.seeds
    }
    if args.out:
        args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
