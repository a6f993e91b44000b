"""The engine against the published loop, side by side in one process, on the same weights, prompts and noise.

    python -m benchmarks.rollout                       # the testbed on this machine's CPU
    python -m benchmarks.rollout --granularities 1 2 3 --prompts 2 --out benchmarks/results/cpu.json

Both produce the same latents; the largest difference is printed. Seconds are for rollout, decoding and scoring; the
training pass is measured apart, because it is the same for both.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import torch

from benchmarks.published_loop import PublishedLoop
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.commands.train import load_config
from g2rpo.components import build_policy, build_prompts, build_rewards
from g2rpo.flow import sigma_grid
from g2rpo.rollout.engine import Engine
from g2rpo.scoring import Stopwatch, score_rollouts
from g2rpo.seeding import generator_for


def main() -> None:
    args = arguments()
    config = load_config("scenes", [])
    policy, rewards = build_policy(config.policy), build_rewards(config.rewards)
    prompts = build_prompts(config.prompts.train, "prompts.train")[: args.prompts]
    sigmas = sigma_grid(16, 3.0)
    algorithm = GranularGRPO(granularities=tuple(args.granularities))  # the paper's other settings
    plans = algorithm.plans(16)

    warm = Engine(policy, policy.encode(prompts[:1]), sigmas, args.batch_size)  # kernels chosen, caches filled
    policy.decode(warm.sample(warm.initial(generator_for)))

    engine_seconds, loop_seconds, difference = [], [], 0.0
    for repeat in range(args.repeats):

        def noise(*key: int | str, repeat: int = repeat) -> torch.Generator:
            return generator_for(repeat, *key)

        watch, began = Stopwatch(), time.perf_counter()
        cond = policy.encode(prompts)
        watch.lap("encode")
        engine = Engine(policy, cond, sigmas, args.batch_size)
        rollouts = engine.rollout(plans, algorithm.group_size, algorithm.kernel(sigmas), noise)
        watch.lap("rollout")
        score_rollouts(policy, rollouts, rewards, prompts, args.batch_size, watch)
        engine_seconds.append(time.perf_counter() - began)

        loop, began = PublishedLoop(policy, sigmas, algorithm, rewards), time.perf_counter()
        finals = loop.rollout(prompts, noise)
        loop_seconds.append(time.perf_counter() - began)
        mine = torch.stack([rollout.finals for rollout in rollouts])
        difference = max(difference, float((mine - torch.cat(finals)).abs().max()))

    result = {
        "granularities": args.granularities,
        "prompts": args.prompts,
        "batch_size": args.batch_size,
        "evaluations": {"published": loop.evaluations, "engine": engine.evaluations},
        "seconds": {"published": loop_seconds, "engine": engine_seconds},
        "phases": {"published": loop.watch.seconds, "engine": watch.seconds},
        "ratio": sum(loop_seconds) / sum(engine_seconds),
        "largest_difference": difference,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    print(json.dumps(result, indent=1))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--granularities", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
