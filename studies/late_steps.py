"""Where in the sampling an adapter acts: scores of held-out pictures with the adapter in the first
k steps and the base model after them, for every k.

    python -m studies.late_steps runs/a runs/b --out studies/results/late_steps.json

Of finished runs with an adapter, from the noise of their own evaluations. A change is the paired
one against the base, with its 95 % interval over prompts and, with several runs, over runs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from g2rpo.assembly import components
from g2rpo.assembly.prompts import build_prompts
from g2rpo.assembly.rewards import build_rewards
from g2rpo.core.files import write_whole
from g2rpo.core.statistics import Interval, interval
from g2rpo.evaluation.sampler import sampler_of
from g2rpo.run.rates import Values
from g2rpo.run.run import Run


def scores(run: Path, count: int) -> list[dict[str, Values]]:
    """Scores by reward, [prompts] each, with the adapter in the first 0, 1, ... steps."""
    config = Run(run).read_config()
    policy = components.build_policy(config.policy, tuning="frozen")
    components.load_weights(policy, Run(run).weights, config.policy.path)
    sampler, options = sampler_of(config, policy), policy.options
    prompts = build_prompts(config.evaluation.prompts, "evaluation.prompts")[:count]
    rewards, found = build_rewards(config.rewards | config.evaluation.rewards), []
    with policy.base():
        found.append(sampler.evaluate(prompts, rewards).scores)
    for end in sampler.sigmas[1:]:  # the adapter acts above this: in the steps that begin before it
        policy.options = options.model_copy(update={"lora_above": float(end)})
        found.append(sampler.evaluate(prompts, rewards).scores)
    return [{name: values.double().numpy() for name, values in each.items()} for each in found]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--prompts", type=int, default=192)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    runs = [scores(run, args.prompts) for run in args.runs]
    table: list[dict[str, Interval]] = [
        {
            name: interval(np.stack([run[steps][name] - run[0][name] for run in runs]))
            for name in runs[0][0]
        }
        for steps in range(1, len(runs[0]))
    ]
    print(
        "| steps with the adapter | "
        + " | ".join(table[0])
        + " |\n"
        + "|---" * (1 + len(table[0]))
        + "|"
    )
    print(
        "| none | "
        + " | ".join(f"{np.mean([run[0][name] for run in runs]):.3f}" for name in table[0])
        + " |"
    )
    for steps, row in enumerate(table, 1):
        print(f"| first {steps} | " + " | ".join(f"{change:+}" for change in row.values()) + " |")
    if args.out:
        base = {name: [float(run[0][name].mean()) for run in runs] for name in table[0]}
        changes = [{name: asdict(change) for name, change in row.items()} for row in table]
        write_whole(
            args.out,
            json.dumps(
                {"prompts": args.prompts, "base": base, "changes": changes}, indent=1
            ).encode(),
        )


if __name__ == "__main__":
    main()
