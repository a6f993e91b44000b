"""Flow-DPO on a person's clicks, as a baseline of the head: at equal clicks and network evaluations.

A simulated person answers 20 groups (`studies.teach_people`), and each click makes eleven pairs of
the liked picture and another one of its group. `stored`: of the base's groups; then Flow-DPO on all
pairs. `refreshed`: after every five groups Flow-DPO learns from all pairs so far, and the next
groups are the taught model's. `head`: a session of `g2rpo teach`. Flow-DPO has no guard but its
reference, the base; and in all as many evaluations as `ITERATIONS` of a session.

    python -m studies.teach_dpo
"""

from __future__ import annotations

import argparse
import json
import tempfile
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

GROUPS, FRESH, ITERATIONS = 20, 5, 40
"""Groups of a person, between two refreshments, and iterations of a session of usual length."""
ARMS = ("stored", "refreshed", "head")
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


def taught(world: str, taste: str, arm: str, seed: int, scale: float) -> Row:
    """What 20 groups changed by Flow-DPO at `scale` times the rate of a session."""
    chosen = [*WORLDS[world][0], f"trainer.seed={seed}"]
    config, weights, spent = teach_config(world, chosen, lambda _: None), None, 0
    rate = scale * config.optim.learning_rate
    stages = GROUPS // FRESH if arm == "refreshed" else 1
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with opened(world, chosen, run) as session:
            session.set_strength(0)  # it asks, and learns nothing itself
            base = base_of(world, [], session.trainer)
            for number in range(1, GROUPS + 1):
                group = session.group
                liked = click(group.images, group.prompt, group.round, taste, "clicks", seed)
                session.answer(liked, round=group.round, skipped=not liked)
                if number % (GROUPS // stages):
                    continue
                write_pairs(run)
                overrides = of_dpo(world, seed, run / PAIRS, rate)
                each = work(load_config(world, overrides), 0)
                iterations = round(ITERATIONS * work(config, 0) / each / stages)
                weights = learnt(world, overrides, weights, iterations)
                session.trainer.restore(weights)
                spent += iterations
            return {**change(base, session.trainer), "iterations": spent, "rate": rate}


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
            found[name] = session_of(given.world, taste, "clicks", seed, GROUPS, GROUPS, [])[-1]
        else:
            found[name] = taught(given.world, taste, arm, seed, given.scale)
        write_whole(given.out, json.dumps(found, indent=1).encode())
        row = found[name]
        moved, error = row["dz"][taste], row["dz_error"][taste]
        right = f"right {row['correct']:.2f} ({row['correct_base']:.2f})"
        print(f"{name}: {moved:+.2f} ± {error:.2f}, {right}, {row['iterations']}", flush=True)


if __name__ == "__main__":
    main()
