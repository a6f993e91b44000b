"""Flow-DPO on a person's clicks, as a baseline of the head: at equal clicks and network evaluations.

A simulated person answers 20 groups (`studies.teach_people`), and each click makes eleven pairs of
the liked picture and another one of its group. `stored`: of the base's groups; then Flow-DPO on all
pairs. `refreshed`: after every five groups Flow-DPO learns from all pairs so far, and the next
groups are the taught model's. `random`: the same, by a person who clicks at random. `head`: a
session of `g2rpo teach`. Flow-DPO has no guard but its reference, the base; and in all as many
evaluations as `ITERATIONS` of a session. All are measured after each quarter.

    python -m studies.teach_dpo
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

from g2rpo import api
from g2rpo.assembly.config import load_config
from g2rpo.core.files import write_whole
from g2rpo.evaluation.work import work
from g2rpo.lab.teach.commands import opened, teach_config
from g2rpo.rewards.votes import PAIRS, write_pairs
from g2rpo.training.learner import Snapshot
from studies.teach import WORLDS, Row, base_of, change, session_of
from studies.teach_people import TASTES, click

GROUPS, STAGES, ITERATIONS = 20, 4, 40
"""Groups of a person, parts of a run, and iterations of a session of usual length."""
ARMS = ("stored", "refreshed", "random", "head")
RESULTS = Path(__file__).parent / "results" / "teach_dpo.json"


def of_dpo(world: str, seed: int, pairs: Path, rate: float) -> list[str]:
    """The overrides of Flow-DPO, with the adapter of a session."""
    own = ["algorithm.name=flow_dpo", f"prompts.train={pairs}", "algorithm.held_out=0"]
    own += ["policy.tuning=lora", "trainer.prompts_per_iteration=16", f"trainer.seed={seed}"]
    own += ["optim.decay=constant", "optim.ema_decay=0", "evaluation.controls=false"]
    return [*WORLDS[world][0], *own, f"optim.learning_rate={rate:g}"]


def learnt(world: str, overrides: list[str], start: Snapshot | None, iterations: int) -> Snapshot:
    """The weights after so many iterations of Flow-DPO."""
    trainer = api.trainer(world, overrides, run_dir=None, trackers=[])
    if start is not None:
        trainer.restore(start)
    for _ in range(iterations):
        trainer.iterate()
    return trainer.snapshot()


def taught(world: str, taste: str, arm: str, seed: int, scale: float) -> list[Row]:
    """What changed after each of `STAGES` by Flow-DPO at `scale` times the rate of a session."""
    chosen = [*WORLDS[world][0], f"trainer.seed={seed}"]
    config = teach_config(world, chosen, lambda _: None)
    rate, rows, weights = scale * config.optim.learning_rate, list[Row](), None
    with ExitStack() as stack:
        run = Path(stack.enter_context(tempfile.TemporaryDirectory()), "run")
        session = stack.enter_context(opened(world, chosen, run))
        session.set_strength(0)  # it asks, and learns nothing itself
        base = base_of(world, [], session.trainer)
        for stage in range(STAGES):
            wanted = GROUPS if arm == "stored" else GROUPS * (stage + 1) // STAGES
            while session.asked < wanted:
                group = session.group
                person = "random" if arm == "random" else "clicks"
                liked = click(group.images, group.prompt, group.round, taste, person, seed)
                session.answer(liked, round=group.round, skipped=not liked)
            write_pairs(run)
            overrides = of_dpo(world, seed + 1000 * stage, run / PAIRS, rate)
            each = work(load_config(world, overrides), 0)
            iterations = round(ITERATIONS * work(config, 0) / each / STAGES)
            weights = learnt(world, overrides, weights, iterations)
            session.trainer.restore(weights)
            done = {"groups": session.asked, "iterations": iterations * (stage + 1), "rate": rate}
            rows.append({**change(base, session.trainer), **done})
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", choices=WORLDS, default="scenes")
    parser.add_argument("--tastes", nargs="+", choices=TASTES, default=["dark", "large"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[42, 43])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--scale", type=float, default=1, help="of Flow-DPO's learning rate")
    parser.add_argument("--out", type=Path, default=RESULTS, help="sessions are added to it")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    found: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    for seed, taste, arm in product(given.seeds, given.tastes, given.arms):
        name = f"{given.world}/{taste}/{arm}/{given.scale:g}/{seed}"
        if name in found:
            continue
        if arm == "head":
            rows = session_of(given.world, taste, "clicks", seed, GROUPS, GROUPS // STAGES, [])
        else:
            rows = taught(given.world, taste, arm, seed, given.scale)
        found[name] = rows
        write_whole(given.out, json.dumps(found, indent=1).encode())
        for row in rows:
            moved = f"{row['dz'][taste]:+.2f} ± {row['dz_error'][taste]:.2f}"
            right = f"right {row['correct']:.2f} ({row['correct_base']:.2f})"
            print(f"{name}: {row['groups']} groups, {row['iterations']}: {moved}, {right}")


if __name__ == "__main__":
    main()
