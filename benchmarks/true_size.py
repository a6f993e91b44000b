"""Iterations of G2RPO on true shapes with random weights: seconds by phase, evaluations a second, their share of the measured
rate of a matrix product, and peaks of memory beside the plan's.

    python -m benchmarks.true_size --out benchmarks/results/true_size.json     # one GPU of 80 GB; both models, nine minutes
    python -m benchmarks.true_size --models klein-4b --ways bfloat16 --options "forecast=true"   # with fast tails too
    python -m benchmarks.true_size --tiny                                      # a rehearsal on any machine

The text encoders are left out: training reads cached embeddings. A way is a set of policy options (`WAYS`); one that this
machine cannot have is recorded as refused, one that ends in an error as failed (exit code 1). The first way is measured with
each of the options of tails, too, and beside the published loop, one evaluation after the other.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.fast_tails import OPTIONS
from benchmarks.machine import describe, matmul_rate, peak_bytes
from benchmarks.published_loop import PublishedLoop
from benchmarks.random_models import MODELS, RandomText, random_pipeline, shape_of
from g2rpo.assembly.blueprint import Blueprint
from g2rpo.assembly.components import check_attention, check_quantized, pick_device, policy_options
from g2rpo.config.resolve import resolve
from g2rpo.config.schema import Config, grid_of
from g2rpo.core.errors import UserError
from g2rpo.core.seeding import generator_for
from g2rpo.lab.plan.plan import COUNTED, make_plan
from g2rpo.policies import catalogue
from g2rpo.policies.anyflow import DiffusersPolicy
from g2rpo.policies.embeddings import CachedEncoder, CachedPolicy
from g2rpo.policies.spec import Model
from g2rpo.rewards.analytic import Brightness
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.tails import Tails
from g2rpo.runtime.devices import accelerator, empty_cache
from g2rpo.training.trainer import Trainer

EVALUATED = COUNTED["evaluations"]
WAYS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "autocast=false": {"autocast": False},
    "attention=cudnn": {"autocast": False, "attention": "cudnn"},
    "attention=flash3": {"autocast": False, "attention": "flash3"},
    "compile=true": {"autocast": False, "compile": True},
    "quantize=fp8 compile=true": {"autocast": False, "quantize": "fp8", "compile": True},
    "quantize=fp8": {"autocast": False, "quantize": "fp8"},
    "quantize=int8": {"autocast": False, "quantize": "int8"},
    "quantize=nf4": {"autocast": False, "quantize": "nf4"},
}


def make_config(args: argparse.Namespace, way: str, tails: Tails) -> Config:
    size = 64 if args.tiny else args.size
    return resolve(
        {
            "policy": {
                "path": "random",
                "height": size,
                "width": size,
                "dtype": "bfloat16",
                "device": args.device,
                "gradient_checkpointing": True,
                "max_sequence_length": 8 if args.tiny else 512,
                **WAYS[way],
            },
            "algorithm": {
                "branch_steps": args.branch_steps,
                "granularities": args.granularities,
                "group_size": 3 if args.tiny else 12,
            },
            "rewards": {"brightness": 1.0},
            "prompts": {"train": "none"},
            "sampling": {
                "num_steps": 16,
                "batch_size": args.batch_size,
                "decode_batch_size": args.decode_batch_size,
                "tails": tails,
            },
            "optim": {"learning_rate": 1e-4},
            "trainer": {"iterations": args.iterations, "prompts_per_iteration": args.prompts, "micro_batch_size": 4},
            "evaluation": {"prompts": "none"},
        }
    )


def planned(args: argparse.Namespace, shape: Blueprint, config: Config) -> dict[str, float]:
    """What `g2rpo plan` gives for a run of this config on a GPU: the peak in bytes, evaluations, operations of one."""
    spec = catalogue.SPECS[shape.kind]
    with patch.dict(spec.models, random=Model("", parts=shape.parts, options=shape.options)):
        plan = make_plan(config, cuda=True, heldout=1, distinct_prompts=args.prompts)
    return {
        "bytes": max(plan.memory.moments[moment] for moment in ("rollout", "decoding", "update")),
        "evaluations": plan.counts.mean(EVALUATED),
        "flops": plan.traced.single.roofline.flops,
    }


def trainer_of(args: argparse.Namespace, policy: DiffusersPolicy, config: Config) -> Trainer:
    names = [f"prompt {i}" for i in range(args.prompts)]
    return Trainer(
        config=config,
        policy=CachedPolicy(policy, CachedEncoder(RandomText(policy), None, notify=print)),
        rewards={"brightness": Brightness()},
        prompts=names,
        heldout=names,
    )


def iterations(
    args: argparse.Namespace, policy: DiffusersPolicy, config: Config, plan: dict[str, float], rate: float
) -> list[dict[str, Any]]:
    """The log of every iteration, with the peak of memory in it, evaluations a second of the rollout, and the share of a matrix
    product's measured `rate` that they make."""
    trainer, found = trainer_of(args, policy, config), []
    for _ in range(config.trainer.iterations):
        if (module := accelerator(policy.device)) is not None:
            module.reset_peak_memory_stats(policy.device)
        row = trainer.iterate()
        speed = row["evaluations"] / row["seconds/rollout"]
        shares = {"evaluations_per_second": speed, "matmul_share": speed * plan["flops"] / rate}
        found.append({**row, **shares, "peak_bytes": peak_bytes(policy.device)})
    return found


def published(args: argparse.Namespace, policy: DiffusersPolicy, config: Config) -> dict[str, float]:
    """The published loop on one prompt: its evaluations a second, and the relative error of the engine's finished latents."""
    sigmas, prompt = grid_of(config.sampling.shift, policy, config.sampling.num_steps), ["prompt 0"]
    cached = trainer_of(args, policy, config).policy
    loop = PublishedLoop(cached, sigmas, config.algorithm, {"brightness": Brightness()})
    (finals,) = loop.rollout(prompt, generator_for)
    engine = Engine(policy=cached, cond=cached.encode(prompt), sigmas=sigmas, batch_size=int(args.batch_size))
    plans, kernel = config.algorithm.plans(len(sigmas) - 1), config.algorithm.kernel(sigmas)
    rollouts = engine.rollout(plans, config.algorithm.group_size, kernel, generator_for)
    difference = torch.stack([rollout.finals for rollout in rollouts]) - finals
    return {
        "evaluations": loop.evaluations,
        "evaluations_engine": engine.evaluations,
        "evaluations_per_second": loop.evaluations / loop.watch.seconds["rollout"],
        "finals_relative_error": float(difference.norm() / finals.norm()),
    }


def measured(args: argparse.Namespace, model: str, way: str, rate: float) -> dict[str, Any]:
    """Iterations with exact tails and, by the first of the ways, with each of the options and by the published loop."""
    device, shape = torch.device(pick_device(args.device)), shape_of(model, args.tiny)
    config = make_config(args, way, OPTIONS["exact"])
    try:
        check_quantized(config)
        check_attention(config.policy)
    except UserError as error:
        return {"refused": str(error)}
    kind, options = policy_options(config.policy, shape.kind, device=str(device))
    policy = kind(random_pipeline(shape, device, torch.bfloat16), **options)
    plan, first = planned(args, shape, config), way == args.ways[0]
    found: dict[str, Any] = {"plan": plan}
    for option in dict.fromkeys(["exact", *(args.options if first else [])]):
        found[option] = iterations(args, policy, make_config(args, way, OPTIONS[option]), plan, rate)
        print(model, way, option, json.dumps(found[option][-1]), flush=True)
    if first:
        found["published loop"] = published(args, policy, config)
        print(model, way, "published loop", json.dumps(found["published loop"]), flush=True)
    return found


def attempted(args: argparse.Namespace, model: str, way: str, rate: float) -> dict[str, Any]:
    """`measured`, or the error: the other ways' minutes on a GPU are not to be lost."""
    try:
        return measured(args, model, way, rate)
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}


def main(given: Sequence[str] | None = None) -> None:
    args, began = arguments(given), time.monotonic()
    device = torch.device(pick_device(args.device))
    rate = matmul_rate(torch.bfloat16, device, seconds=0.1 if args.tiny else 2.0)
    result: dict[str, Any] = {
        "machine": describe(device),
        "arguments": {key: value for key, value in vars(args).items() if key != "out"},
        "matmul_flops": rate,
        "models": {model: {} for model in args.models},
    }
    for way, model in itertools.product(args.ways, args.models):
        late = time.monotonic() - began > 60 * args.minutes
        found = {"refused": f"{args.minutes} minutes were over"} if late else attempted(args, model, way, rate)
        result["models"][model][way] = found
        gc.collect()
        empty_cache()
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    if any("failed" in found for ways in result["models"].values() for found in ways.values()):
        raise SystemExit(1)


def rows(text: str) -> int | str:
    """A batch size of the command line."""
    return text if text == "auto" else int(text)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model and small pictures")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--granularities", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--batch-size", type=rows, default=24, help='a number, or "auto"')
    parser.add_argument("--decode-batch-size", type=rows, default=8, help="likewise")
    parser.add_argument("--branch-steps", type=int, nargs="+", default=[3])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--options", nargs="*", choices=OPTIONS, default=["forecast=true"], metavar="OPTION")
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=8.0, help="no further way is begun after so many")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
