"""What one optimizer step a rollout does in the place of the published eight: how far the weights
go, and what they learn.

    python -m studies.cadence

The testbed's model under the recipe `reference` (16 steps, groups of 12 at steps 0 to 7,
granularities 1 and 2, its rate and clip), in float32 and with one prompt an iteration. Trained on
random rewards and on one that every update serves, the brightness of pictures: how far the weights
are from their start after every iteration, and by how much held-out pictures of the same noise have
become brighter. Shares are `update_every=rollout` over `update_every=branch`, seed by seed.

Writes studies/results/cadence.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from g2rpo.assembly.components import build_policy
from g2rpo.assembly.config import load_config
from g2rpo.assembly.prompts import build_prompts
from g2rpo.core.seeding import generator_for
from g2rpo.core.types import as_reward
from g2rpo.training.trainer import Trainer
from studies.credit import save

TESTBED = (
    "policy.path=testbed", "policy.height=64", "policy.width=64", "policy.max_sequence_length=16", "policy.dtype=float32",
    "policy.gradient_checkpointing=false", "policy.device=cpu", "prompts.cache=off", "trainer.prompts_per_iteration=1",
    "sampling.batch_size=96", "sampling.decode_batch_size=8", "sampling.precision=float32",
    "evaluation.num_steps=16",
)  # fmt: skip
Score = Callable[[Tensor, Sequence[str]], Tensor]


def at_random(seed: int) -> Score:
    """A reward that knows nothing of the pictures."""
    generator = generator_for("random rewards", seed)
    return lambda images, prompts: torch.randn(len(images), generator=generator)


def brightness(images: Tensor, prompts: Sequence[str]) -> Tensor:
    return images.flatten(1).mean(1)


def run(reward: Score, every: str, seed: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Distance of the weights and gain in brightness after every iteration."""
    overrides = [
        *TESTBED,
        f"trainer.seed={seed}",
        f"algorithm.update_every={every}",
        *args.overrides,
    ]
    config = load_config("reference", overrides)
    prompts = build_prompts("testbed:train", "prompts.train")
    heldout = build_prompts("testbed:heldout", "evaluation.prompts")[: args.heldout]
    policy = build_policy(config.policy)
    trainer = Trainer(
        config=config,
        policy=policy,
        rewards={"hpsv2": as_reward(reward)},
        prompts=prompts,
        heldout=heldout,
        judges={"brightness": as_reward(brightness)},
        notify=lambda _: None,
    )
    start = [p.detach().clone() for p in trainer.learner.parameters]
    before = trainer.score_heldout().means()["brightness"]
    seen: dict[str, list[float]] = {"distance": [], "gain": []}
    for _ in range(args.iterations):
        trainer.iterate()
        squares = sum(
            float((p.detach() - q).square().sum())
            for p, q in zip(trainer.learner.parameters, start, strict=True)
        )
        seen["distance"].append(squares**0.5)
        seen["gain"].append(trainer.score_heldout().means()["brightness"] - before)
    return seen


def main() -> None:
    args, began = arguments(), time.perf_counter()
    rows: list[dict[str, Any]] = []
    for name, reward in {"random": at_random, "brightness": lambda seed: brightness}.items():
        for seed in range(args.seeds):
            eight, one = (run(reward(seed), every, seed, args) for every in ("branch", "rollout"))
            for iteration in range(args.iterations):
                row = {"reward": name, "seed": seed, "iteration": iteration + 1}
                for what in ("distance", "gain"):
                    row[f"{what} with eight steps"], row[f"{what} with one"] = (
                        eight[what][iteration],
                        one[what][iteration],
                    )
                rows.append(row)
    for name, what in (("random", "distance"), ("brightness", "distance"), ("brightness", "gain")):
        print(
            f"{name}, {what} with one step as a share of that with eight, by iteration, mean and range over seeds:"
        )
        for iteration in range(1, args.iterations + 1):
            alike = [row for row in rows if (row["reward"], row["iteration"]) == (name, iteration)]
            shares = [row[f"{what} with one"] / row[f"{what} with eight steps"] for row in alike]
            print(
                f"  {iteration}: {statistics.mean(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})"
            )
    print(save("cadence", args, began, rows))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE")
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--heldout", type=int, default=16, help="pictures that show the gain")
    return parser.parse_args()


if __name__ == "__main__":
    main()
