"""What the ranks of a run send each other in an iteration, how long that takes, and what limits the run.

Collectives are counted as rings, as NCCL's (Patarasuk and Yuan, 2009): of `size` bytes over n ranks, each rank sends
(n - 1) / n of them in a gather or a scatter, and twice that in a sum.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from g2rpo.config.schema import Config
from g2rpo.core.errors import UserError
from g2rpo.lab.plan.cards import Card
from g2rpo.lab.plan.counting import Counts, Iteration
from g2rpo.lab.plan.memory import in_calls_dtype
from g2rpo.policies.anyflow import DiffusersPolicy

NODE = 8
"""Ranks of a node, if nothing else is known."""
NETWORK = 12.5
"""GB/s that a node sends to others, if nothing else is known: Ethernet of 100 Gbit/s."""


@dataclass(frozen=True)
class Layout:
    """`ranks` in nodes of `node`, each weight divided over `group` consecutive ones; GB/s between nodes."""

    ranks: int = 1
    node: int = 1
    group: int = 1
    network: float = NETWORK


def nodes_of(ranks: int, asked: int | None) -> int:
    """The ranks of a node: `asked`, or `NODE` where there are more; UserError if they do not divide `ranks`."""
    node = asked or min(ranks, NODE)
    if ranks % node:
        raise UserError(f"--ranks-per-node {node}: {ranks} ranks do not fill such nodes; give a divisor of {ranks}")
    return node


@dataclass(frozen=True)
class Traffic:
    """Bytes of an iteration: `inside` leave each rank for others of its node, `across` leave each node."""

    inside: float = 0.0
    across: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.inside + other.inside, self.across + other.across)


def ring(sent: float, ranks: int, apart: int, node: int) -> Traffic:
    """`sent` by each of `ranks` in a ring, neighbours in it being `apart` ranks apart, as one of `apart` such rings.

    Rings that leave a node share its network; where neighbours are in different nodes, nothing is sent inside.
    """
    if ranks * apart <= node:
        return Traffic(inside=sent)
    return Traffic(inside=sent if apart < node else 0.0, across=sent * min(apart, node))


def traffic(config: Config, policy: DiffusersPolicy, counts: Counts, layout: Layout) -> Traffic:
    """What an iteration sends on average: sums of gradients and, where weights are sharded, gathers and scatters."""
    if layout.ranks == 1:
        return Traffic()
    gradients = float(sum(p.nbytes for p in policy.trainable_parameters()))
    steps, sharding = counts.mean(lambda it: it.optimizer_steps), config.trainer.sharding
    if sharding == "none":
        return ring(2 * steps * _most(layout.ranks) * gradients, layout.ranks, 1, layout.node)
    group, groups = layout.group, layout.ranks // layout.group
    weights, passes = float(in_calls_dtype(policy)), counts.mean(lambda it: len(it.passes))

    def gathers(it: Iteration) -> float:
        return 2 * len(it.passes) + (len(it.calls) if sharding == "full" else 1)

    divided = _most(group) * (counts.mean(gathers) * weights + passes * gradients)
    summed = 2 * steps * _most(groups) * gradients / group
    between = ring(summed, groups, group, layout.node) if groups > 1 else Traffic()
    return ring(divided, group, 1, layout.node) + between


def _most(ranks: int) -> float:
    return (ranks - 1) / ranks


@dataclass(frozen=True)
class Limit:
    """Seconds of an iteration by what takes them, at full bandwidth; `what` takes longest."""

    sent: Traffic
    compute: float
    links: float
    network: float

    @property
    def what(self) -> str:
        times = {"compute": self.compute, "links": self.links, "network": self.network}
        return max(times, key=lambda name: times[name])

    @property
    def least(self) -> float:
        """An iteration's seconds if sending overlaps with computing entirely."""
        return max(self.compute, self.links, self.network)

    @property
    def most(self) -> float:
        """An iteration's seconds if nothing overlaps."""
        return self.compute + max(self.links, self.network)

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "limited_by": self.what, "iteration": [self.least, self.most]}


def limit_of(card: Card, sent: Traffic, compute: float, layout: Layout) -> Limit:
    """What limits an iteration of `compute` seconds on each rank's card."""
    network = sent.across / (layout.network * 1e9) if math.isfinite(layout.network) else 0.0
    return Limit(sent, compute, sent.inside / (card.link * 1e9), network)
