"""A training row of the log: statistics of its groups, and the cost of the iteration."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from g2rpo.core.data import Row
from g2rpo.core.devices import accelerator, measures_memory
from g2rpo.core.distributed import World
from g2rpo.core.plans import Plan
from g2rpo.core.statistics import group_std, spearman
from g2rpo.rollout.memory import BatchSizes
from g2rpo.train.collector import Groups


def group_metrics(
    plans: Sequence[Plan], names: Sequence[str], groups: Groups, advantages: Tensor
) -> Row:
    """Statistics of rewards [N, R, M, G] and advantages [N, G] of the N groups of all ranks, with
    their plans: R rewards, M tails (granularities), G members; NaN means "no score"."""
    rewards, clip = groups.rewards, groups.algorithm.advantage_clip
    branches = [plan.branch for plan in plans]
    tails = [plan.tail_names for plan in plans]
    return {
        **reward_metrics(names, rewards, advantages, clip),
        **noise_metrics(branches, tails, names, rewards, advantages),
    }


def noise_metrics(
    steps: Sequence[int],
    granularities: Sequence[Sequence[int]],
    names: Sequence[str],
    rewards: Tensor,
    advantages: Tensor,
) -> dict[str, float]:
    """Means over groups for the log. `steps` [N] names each group's branch step, `granularities`
    [N, M] its tails, `names` [R].

    `step/K/spread/NAME`: std of a reward within groups that branch at K, over all tails.
    `step/K/advantage`: mean |A| there. `step/K/agreement`: Spearman between two tails' rewards of
    the same members, over all pairs of tails and all rewards. `granularity/M/spread/NAME`,
    `granularity/M/agreement`: the same by tail, the latter against the group's finest tail. With
    one tail there are no such entries. An entry without a single valid value is NaN.
    """
    grain = torch.as_tensor(granularities)
    spread = group_std(rewards)
    pairs = [
        spearman(rewards[:, :, a], rewards[:, :, b])
        for a, b in combinations(range(grain.shape[1]), 2)
    ]
    branch = torch.as_tensor(steps)
    row: dict[str, float] = {}
    for step in sorted(set(steps)):
        here = branch == step
        row |= {
            f"step/{step}/spread/{name}": float(spread[here, r].nanmean())
            for r, name in enumerate(names)
        }
        row[f"step/{step}/advantage"] = float(advantages[here].abs().mean())
        if pairs:
            row[f"step/{step}/agreement"] = float(torch.stack(pairs)[:, here].nanmean())
    finest = grain.argmin(1)
    fine = rewards[torch.arange(len(rewards)), :, finest]
    agreement = torch.stack([spearman(rewards[:, :, m], fine) for m in range(grain.shape[1])], -1)
    for granularity in sorted(set(grain.flatten().tolist())):
        groups, tails = (grain == granularity).nonzero(as_tuple=True)
        row |= {
            f"granularity/{granularity}/spread/{name}": float(spread[groups, r, tails].nanmean())
            for r, name in enumerate(names)
        }
        coarse = tails != finest[groups]
        if coarse.any():
            row[f"granularity/{granularity}/agreement"] = float(
                agreement[groups[coarse], :, tails[coarse]].nanmean()
            )
    return row


def reward_metrics(
    names: Sequence[str], rewards: Tensor, advantages: Tensor, clip: float
) -> dict[str, float]:
    """Summary statistics of rewards [N, R, M, G] and advantages [N, G] for the log (formulas:
    docs/log.md)."""
    spread, row = group_std(rewards), {}
    too_few = (~rewards.isnan()).sum(-1) < min(2, rewards.shape[-1])
    for index, name in enumerate(names):
        row[f"reward/{name}"] = float(rewards[:, index].nanmean())
        row[f"spread/{name}"] = float(spread[:, index].nanmean())
    return {
        **row,
        "missing_scores": float(rewards.isnan().float().mean()),
        "masked_groups": float(too_few.flatten(1).all(1).float().mean()),
        "silent_groups": float((advantages == 0).all(-1).float().mean()),
        "advantage_size": float(advantages.abs().mean()),
        "advantage_clipped": float((advantages.abs() >= clip).float().mean()),
    }


def cost_metrics(groups: Groups, world: World, sizes: BatchSizes, device: torch.device) -> Row:
    """Network evaluations and pictures of all ranks, batch sizes, this rank's seconds and, of an
    accelerator, the bytes of its peak so far."""
    collected, seconds = groups.collected, groups.watch.seconds
    own = collected.evaluations, collected.pictures, sizes.halved
    evaluations, images, halved = world.total(*own)
    memory = {}
    if measures_memory(device):
        memory["memory_peak"] = accelerator(device).max_memory_allocated(device)
    return {
        "evaluations": evaluations,
        "images": images,
        "batch_size": sizes.rollout,
        "decode_batch_size": sizes.decode,
        "micro_batch_size": sizes.micro,
        "out_of_memory": halved,
        "ranks": world.size,
        **memory,
        "seconds": sum(seconds.values()),
        "seconds_overlapped": collected.seconds_overlapped,
        **{f"seconds/{phase}": took for phase, took in seconds.items()},
    }
