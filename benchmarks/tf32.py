"""How far scores move when float32 matrices are multiplied in TF32 (`rewards.NAME.tf32`).

    OMP_NUM_THREADS=1 python -m benchmarks.tf32 --out benchmarks/results/tf32.json    # half a minute of one core

TF32 is emulated on a CPU: the factors of every matrix product and of attention are rounded to 10 bits after the point, sums
stay float32. Convolutions are left alone: torch takes TF32 for them on a GPU by default. Pictures of the embedded model, 8
noises for each of some held-out prompts, scored by its learned rewards; errors stand beside the standard deviation of exact
scores within a prompt's pictures, which advantages are made of.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.fast_tails import agreement
from g2rpo.build.components import build_policy
from g2rpo.build.prompts import build_prompts
from g2rpo.build.rewards import build_rewards
from g2rpo.config.recipes import settings
from g2rpo.config.resolve import resolve
from g2rpo.config.schema import RewardConfig
from g2rpo.evaluation.heldout import sample_images
from g2rpo.flow import sigma_grid

aten = torch.ops.aten
FACTORS = {aten.mm: (0, 1), aten.bmm: (0, 1), aten.addmm: (1, 2), aten.baddbmm: (1, 2)}
"""Operations with the places of their factors; of attention they are the first three."""
GROUP = 8


def rounded(x: Tensor) -> Tensor:
    """float32 numbers to TF32's 10 bits after the point, to the nearest, ties to even."""
    bits = x.contiguous().view(torch.int32)
    return (((bits + 0xFFF + ((bits >> 13) & 1)) >> 13) << 13).view(torch.float32)


class TF32(TorchDispatchMode):
    """While entered, float32 factors of matrix products are rounded as TF32 rounds them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        places = range(3) if "scaled_dot_product" in str(func) else FACTORS.get(func.overloadpacket, ())
        given = list(args)
        for place in places:
            if isinstance(given[place], Tensor) and given[place].dtype == torch.float32:
                given[place] = rounded(given[place])
        return func(*given, **(kwargs or {}))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    names = [name for name in build_prompts("testbed:heldout", "prompts")[: args.prompts] for _ in range(GROUP)]
    policy = build_policy(resolve(settings("scenes")).policy.model_copy(update={"device": "cpu"}), tuning="frozen")
    pictures = sample_images(policy, names, sigma_grid(args.steps, 3.0), seed=0, batch_size=64, decode_batch_size=32)
    found = {}
    for kind in ("scene_clip", "scene_preference"):
        (reward,) = build_rewards({kind: RewardConfig(kind=kind)}).values()
        exact = reward(pictures, names).view(-1, GROUP)
        with TF32():
            narrow = reward(pictures, names).view(-1, GROUP)
        found[kind] = {**agreement(exact, narrow), "largest": float((narrow - exact).abs().max())}
        print(kind, json.dumps(found[kind]), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps({"prompts": args.prompts, "steps": args.steps, "scores": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
