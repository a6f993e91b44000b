"""The engine against the published loop, side by side in one process, on the same weights, prompts
and noise.

    python -m benchmarks.rollout --out benchmarks/results/rollout.json     # the testbed on this machine
    python -m benchmarks.rollout --granularities 1 2 3 --options "forecast=true"

Exact, both produce the same latents; the largest difference is printed. Seconds are for encoding,
rollout, decoding and scoring; the training pass is the same for both and left out. The engine with
every option and the loop take turns. With --clock cpu they are seconds of processor time, summed
over threads: on a machine that does other work too, one thread's (OMP_NUM_THREADS=1) are what it
would take alone, but for what others do to its caches.

Utilisation is the network's floating point operations during the rollout, counted by
torch.utils.flop_counter, over what a square matrix product reaches here in the same dtype.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.machine import describe, matmul_rate, peak_bytes
from benchmarks.published_loop import PublishedLoop
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.config.read import load_config
from g2rpo.core.flow import sigma_grid
from g2rpo.core.noise import generator_for
from g2rpo.data.prompts import build_prompts
from g2rpo.models.load import build_policy
from g2rpo.rewards.catalogue import build_rewards
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.memory import BatchSizes
from g2rpo.rollout.scoring import score_rollouts
from g2rpo.rollout.tails import EXACT, Tails
from g2rpo.train.collector import Stopwatch

NUM_STEPS = 16
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
OPTIONS = {
    "exact": EXACT,
    "solver=dpmpp2m": Tails("dpmpp2m"),
    "forecast=true": Tails(forecast=True),
}


@dataclass
class Bench:
    """One iteration's sampling and scoring on the testbed, by either side."""

    prompts: Sequence[str]
    batch_size: int
    decode_batch_size: int
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        config = load_config("scenes", [])
        self.policy, self.rewards = build_policy(config.policy), build_rewards(config.rewards)
        self.sigmas = sigma_grid(NUM_STEPS, 3.0)

    def engine(
        self, algorithm: GranularGRPO, tails: Tails, repeat: int
    ) -> tuple[dict[str, float], int, Tensor]:
        """Seconds by phase, network evaluations, finals [K * prompts, M, G, ...]."""
        watch = Stopwatch(clock=self.clock)
        cond = self.policy.encode(self.prompts)
        watch.lap("encode")
        engine = Engine(
            policy=self.policy,
            cond=cond,
            sigmas=self.sigmas,
            batch_size=self.batch_size,
            tails=tails,
        )
        plans, kernel = algorithm.plans(NUM_STEPS), algorithm.kernel(self.sigmas)
        rollouts = engine.rollout(
            plans, algorithm.group_size, kernel, lambda *key: generator_for(repeat, *key)
        )
        watch.lap("rollout")
        sizes = BatchSizes(rollout=self.batch_size, decode=self.decode_batch_size, micro=1)
        score_rollouts(self.policy, rollouts, self.rewards, self.prompts, sizes, watch.lap)
        return (
            watch.seconds,
            engine.evaluations,
            torch.stack([rollout.finals for rollout in rollouts]),
        )

    def loop(self, algorithm: GranularGRPO, repeat: int) -> tuple[dict[str, float], int, Tensor]:
        """The same by the published loop."""
        loop = PublishedLoop(
            self.policy, self.sigmas, algorithm, self.rewards, watch=Stopwatch(clock=self.clock)
        )
        finals = loop.rollout(self.prompts, lambda *key: generator_for(repeat, *key))
        return loop.watch.seconds, loop.evaluations, torch.cat(finals)

    def flops_per_evaluation(self) -> float:
        """Of one row of the policy's network, adapters included."""
        x = self.policy.noise([generator_for("flops")])
        cond = self.policy.encode(self.prompts[:1])
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            self.policy.velocity(x, self.sigmas[1:2].to(x.device), cond)
        return float(counter.get_total_flops())


def compare(
    bench: Bench, algorithm: GranularGRPO, options: Sequence[str], repeats: int
) -> dict[str, Any]:
    """The loop and the engine with each option, in turns; seconds are medians over repeats."""
    for name in options:
        # caches filled
        bench.engine(GranularGRPO(branch_steps=(0,), granularities=(1,)), OPTIONS[name], 0)
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in [*options, "published"]}
    evaluations: dict[str, int] = {}
    difference, exact = 0.0, torch.empty(0)
    for repeat in range(repeats):
        for name in options:
            seconds, evaluations[name], finals = bench.engine(algorithm, OPTIONS[name], repeat)
            taken[name].append(seconds)
            exact = finals if name == "exact" else exact
        seconds, evaluations["published"], finals = bench.loop(algorithm, repeat)
        taken["published"].append(seconds)
        difference = max(difference, float((exact - finals).abs().max()))
    flops, device = bench.flops_per_evaluation(), bench.policy.device
    rates = {
        dtype: matmul_rate(getattr(torch, dtype), device, bench.clock)
        for dtype in ("float32", "bfloat16")
    }
    loop_total = median(sum(phases.values()) for phases in taken["published"])
    rows = []
    for name, phases in taken.items():
        total, rollout = (
            median(sum(p.values()) for p in phases),
            median(p["rollout"] for p in phases),
        )
        dtype = str(bench.policy.dtype).removeprefix("torch.")
        rows.append(
            {
                "what": name,
                "evaluations": evaluations[name],
                "seconds": total,
                "phases": {key: median(p[key] for p in phases) for key in phases[0]},
                "ratio": loop_total / total,
                "ratio_rollout": median(p["rollout"] for p in taken["published"]) / rollout,
                "utilisation": evaluations[name] * flops / rollout / rates[dtype],
            }
        )
    return {
        "rows": rows,
        "largest_difference": difference,
        "flops_per_evaluation": flops,
        "matmul_flops": rates,
        "peak_bytes": peak_bytes(device),
    }


def published_evaluations(algorithm: GranularGRPO) -> int:
    """What the loop asks of the network for one prompt."""
    tails = sum(
        math.ceil((NUM_STEPS - 1 - k) / g)
        for k in algorithm.branch_steps
        for g in algorithm.granularities
    )
    return NUM_STEPS + algorithm.group_size * (len(algorithm.branch_steps) + tails)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| what | evaluations | seconds | rollout | decode | rewards | faster | rollout faster | utilisation |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        phases = [f"{row['phases'][phase]:.2f}" for phase in ("rollout", "decode", "rewards")]
        shares = [
            f"{row['ratio']:.1f}x",
            f"{row['ratio_rollout']:.1f}x",
            f"{row['utilisation']:.0%}",
        ]
        lines.append(
            "| "
            + " | ".join(
                [row["what"], str(row["evaluations"]), f"{row['seconds']:.2f}", *phases, *shares]
            )
            + " |"
        )
    return "\n".join(lines)


def main() -> None:
    args = arguments()
    warnings.filterwarnings("ignore", category=UserWarning)
    prompts = build_prompts("testbed:train", "prompts.train")
    bench = Bench(
        prompts[: args.prompts], args.batch_size, args.decode_batch_size, CLOCKS[args.clock]
    )
    # the paper's other settings
    algorithm = GranularGRPO(granularities=tuple(args.granularities))
    options = list(dict.fromkeys(["exact", *args.options]))
    result = {
        "settings": {key: value for key, value in vars(args).items() if key != "out"},
        "machine": describe(bench.policy.device),
        "load": os.getloadavg(),
        **compare(bench, algorithm, options, args.repeats),
    }
    print(table(result["rows"]))
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--granularities", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--decode-batch-size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--options",
        nargs="*",
        choices=OPTIONS,
        default=[],
        metavar="OPTION",
        help="fast tails to measure too",
    )
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
