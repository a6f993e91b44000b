"""Costs and errors of every way to store and compute frozen weights: on one double and one single
block of FLUX.1-dev's width (3072, random weights), and in pictures of the embedded model.

    OMP_NUM_THREADS=1 python -m benchmarks.true_width --out benchmarks/results/true_width.json    # minutes of one core
    python -m benchmarks.true_width --tokens 4608 --device cuda  # a GPU, at the true length

Errors are relative: of a velocity, and of its mean square's gradient by the adapters (1 - cosine),
against bfloat16 without autocast ("float32": that itself, against float32). "batch" is how far a
velocity moves when another row is computed with it: rollout and training pass differ by so much.
"adapters off" is the size of what adapters do.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import describe
from benchmarks.random_models import RandomText, random_pipeline, shape_of
from g2rpo.config.recipes import recipe_settings
from g2rpo.config.resolve import resolve
from g2rpo.core.data import Cond
from g2rpo.core.noise import generator_for
from g2rpo.data.prompts import build_prompts
from g2rpo.models.anyflow import DiffusersPolicy
from g2rpo.models.blueprint import size_of
from g2rpo.models.catalogue import flux
from g2rpo.models.load import build_policy
from g2rpo.models.options import Dtype, PolicyConfig
from g2rpo.rewards.catalogue import RewardConfig, build_rewards
from g2rpo.train.evaluation.sampler import Sampler

WAYS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "autocast=false": {"autocast": False},
    "quantize=int8": {"quantize": "int8", "autocast": False},
    "quantize=nf4": {"quantize": "nf4", "autocast": False},
    "adapters merged": {"autocast": False},
    "adapters off": {"autocast": False},
}


def blocks(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Seconds and errors of every way, on the true width."""
    device = torch.device(args.device)
    # three quarters of the tokens are the picture's, as at 1024 pixels
    side = 16 * round((args.tokens * 0.75) ** 0.5)
    size = {
        "height": side,
        "width": side,
        "max_sequence_length": args.tokens // 4,
        "lora_rank": args.rank,
    }
    shape = shape_of("black-forest-labs/FLUX.1-dev", args.tiny, blocks=1)
    pipeline = random_pipeline(shape, device, torch.bfloat16)

    def policy(dtype: Dtype = "bfloat16", **options: Any) -> DiffusersPolicy:
        config = PolicyConfig(path="", dtype=dtype, **size, **options)
        made = DiffusersPolicy.of(flux)(copy.deepcopy(pipeline), config, device=device)
        for number, parameter in enumerate(made.trainable_parameters()):
            parameter.data = 0.02 * torch.randn(
                parameter.shape, generator=generator_for(number)
            ).to(device)
        return made

    wide, exact = answers(policy("float32"), 1), answers(policy(autocast=False), 1)
    found = {
        "float32": {"error": relative(exact[0], wide[0]), "gradient": 1 - cosine(exact[1], wide[1])}
    }
    for name in args.ways:
        made = policy(**WAYS[name])
        if name == "adapters merged":
            made.pipeline.transformer.fuse_lora()
        if name == "adapters off":
            made.pipeline.transformer.disable_adapters()
        found[name] = compared(made, exact, args.repeats, trained=not name.startswith("adapters"))
        print(name, json.dumps(found[name]), flush=True)
    return found


def question(policy: DiffusersPolicy, rows: int) -> tuple[Tensor, Tensor, Cond]:
    cond = RandomText(policy).encode([f"prompt {row}" for row in range(rows)])
    sigma = torch.full((rows,), 0.6, device=policy.device)
    return policy.noise([generator_for("noise", row) for row in range(rows)]), sigma, cond


def answers(policy: DiffusersPolicy, rows: int) -> tuple[Tensor, Tensor]:
    """The first row's velocity, and the gradient of its squared norm by the adapters."""
    velocity = policy.velocity(*question(policy, rows)).float()[:1]
    gradient = torch.autograd.grad(velocity.square().mean(), policy.trainable_parameters())
    return velocity.detach(), torch.cat([part.flatten() for part in gradient])


@torch.no_grad()
def seconds(policy: DiffusersPolicy, repeats: int) -> float:
    """Of one call with one row: the least of several; processor seconds on a CPU."""
    asked, least = question(policy, 1), float("inf")
    for _ in range(repeats):
        began = time.process_time() if policy.device.type == "cpu" else time.perf_counter()
        policy.velocity(*asked)
        if policy.device.type == "cuda":
            torch.cuda.synchronize()
        least = min(
            least,
            (time.process_time() if policy.device.type == "cpu" else time.perf_counter()) - began,
        )
    return least


def compared(
    policy: DiffusersPolicy, exact: tuple[Tensor, Tensor], repeats: int, trained: bool
) -> dict[str, float]:
    with torch.no_grad():
        alone, among = (policy.velocity(*question(policy, rows)).float()[:1] for rows in (1, 2))
    found = {
        "seconds": seconds(policy, repeats),
        "error": relative(alone, exact[0]),
        "batch": relative(among, alone),
        "weights_mib": size_of(policy.pipeline.transformer) / 2**20,
    }
    if trained:
        found["gradient"] = 1 - cosine(answers(policy, 1)[1], exact[1])
    return found


def cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=0))


def relative(got: Tensor, exact: Tensor) -> float:
    return float((got - exact).norm() / exact.norm())


def embedded(ways: list[str], prompts: int, steps: int = 10) -> dict[str, dict[str, float]]:
    """Pictures of the embedded model by every way against float32: mean absolute error of [0, 1],
    and rewards."""
    names = build_prompts("testbed:heldout", "prompts")[:prompts]
    rewards = build_rewards(
        {name: RewardConfig(kind=name) for name in ("scene_accuracy", "scene_preference")}
    )
    found: dict[str, dict[str, float]] = {}
    exact = None
    for name, options in {
        "float32": {"dtype": "float32"},
        **{name: WAYS[name] for name in ways},
    }.items():
        if name.startswith("adapters"):
            continue
        policy = resolve(recipe_settings("scenes")).policy.model_copy(
            update={"device": "cpu", "tuning": "lora", "dtype": "bfloat16", **options}
        )
        pictures = Sampler(
            policy=build_policy(policy, tuning="frozen"), shift=3.0, num_steps=steps
        ).pictures(names)
        exact = pictures if exact is None else exact
        scores = {reward: float(score(pictures, names).mean()) for reward, score in rewards.items()}
        found[name] = {"picture": float((pictures - exact).abs().mean()), **scores}
        print(name, json.dumps(found[name]), flush=True)
    return found


def main() -> None:
    args = arguments()
    result = {
        "machine": describe(torch.device(args.device)),
        "arguments": {key: value for key, value in vars(args).items() if key != "out"},
        "blocks": blocks(args),
        "embedded": embedded(args.ways, args.prompts),
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=256, help="of picture and text together")
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=list(WAYS),
        metavar="WAY",
    )
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=64, help="of the embedded model")
    parser.add_argument("--tiny", action="store_true", help="narrow blocks, to try the benchmark")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
