"""A training row of the log: statistics of its groups, and the cost of the iteration."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from g2rpo.core.data import Row
from g2rpo.core.types import Plan
from g2rpo.monitor.diagnostics import diagnose, reward_metrics
from g2rpo.runtime.devices import accelerator, measures_memory
from g2rpo.runtime.distributed import World
from g2rpo.runtime.memory import BatchSizes
from g2rpo.training.collector import Collected
from g2rpo.training.stopwatch import Stopwatch


def of_groups(plans: Sequence[Plan], names: Sequence[str], rewards: Tensor, advantages: Tensor, clip: float) -> Row:
    """Statistics of rewards [N, R, M, G] and advantages [N, G] of the N groups of all ranks, with their plans."""
    branches = [plan.branch for plan in plans]
    tails = [plan.tail_names for plan in plans]
    return {
        **reward_metrics(names, rewards, advantages, clip),
        **diagnose(branches, tails, names, rewards, advantages),
    }


def of_cost(parts: Sequence[Collected], world: World, sizes: BatchSizes, watch: Stopwatch, device: torch.device) -> Row:
    """Network evaluations and pictures of all ranks, batch sizes, this rank's seconds and, of an accelerator, the bytes of its
    peak so far; the rollouts are the last part."""
    memory = {"memory_peak": accelerator(device).max_memory_allocated(device)} if measures_memory(device) else {}
    images = sum(rollout.finals.shape[:2].numel() for part in parts for rollout in part.rollouts)
    evaluations, images, halved = world.total(sum(part.evaluations for part in parts), images, sizes.halved)
    return {
        "evaluations": evaluations,
        "images": images,
        "batch_size": sizes.rollout,
        "decode_batch_size": sizes.decode,
        "micro_batch_size": sizes.micro,
        "out_of_memory": halved,
        "ranks": world.size,
        **memory,
        "seconds": sum(watch.seconds.values()),
        "seconds_overlapped": parts[-1].seconds_overlapped,
        **{f"seconds/{phase}": seconds for phase, seconds in watch.seconds.items()},
    }
