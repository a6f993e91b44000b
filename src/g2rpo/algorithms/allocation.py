"""Chooses the granularity of each branch step and the group size by cost: `algorithm.granularities=auto`.

A group's gradient is nearly all noise, whose size does not depend on the reward, and a coarse tail whose rewards correlate with
the finest's by rho keeps a share rho of the signal. So at a fixed budget a granularity is worth rho^2 / (cost of a member): the
squared signal-to-noise ratio per evaluation (derivation and limits: docs/algorithm.md). rho is measured during the run: some
iterations *calibrate*, that is finish the same members at every candidate granularity, and train on the finest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from g2rpo.errors import UserError, at_least_one
from g2rpo.objectives import group_normalize, mix_rewards
from g2rpo.statistics import ranks
from g2rpo.types import Plan

if TYPE_CHECKING:
    from g2rpo.algorithms.g2rpo import GranularGRPO

FIRST = 3
"""Number of calibrating iterations at the start of a run."""


@dataclass(frozen=True)
class Auto:
    """How granularities are chosen.

    candidates: from the finest, the reference, to the coarsest.
    calibrate_every: period in iterations, after the first three.
    floor: the least rank agreement with the finest (the estimate minus one standard error).
    forget: the decay of older measurements at every calibration of a step, since the model changes.
    image_cost: the cost of decoding and scoring a picture in evaluations, added to the budget.
    spend: savings buy "members", or "time" (shorter iterations with equal groups).
    """

    candidates: tuple[int, ...] = (1, 2, 3)
    calibrate_every: int = 10
    floor: float = 0.7
    forget: float = 0.9
    image_cost: float = 0.0
    spend: Literal["members", "time"] = "members"

    def __post_init__(self) -> None:
        at_least_one(calibrate_every=self.calibrate_every)
        for wrong, message in (
            (
                len(self.candidates) < 2 or any(a >= b for a, b in zip(self.candidates, self.candidates[1:], strict=False)),
                f"candidates must be two granularities or more, from fine to coarse, got {self.candidates}",
            ),
            (not 0 <= self.floor <= 1, f"floor must lie in [0, 1], got {self.floor}"),
            (not 0 < self.forget <= 1, f"forget must lie in (0, 1], got {self.forget}"),
            (not self.image_cost >= 0, f"image_cost must not be negative, got {self.image_cost}"),
        ):
            if wrong:
                raise ValueError(message)


@dataclass
class Allocator:
    """Turns an algorithm with `granularities="auto"` into a plain one for each iteration.

    `evaluations(plans, group_size)` counts network evaluations. `state` has all measurements as plain numbers for a checkpoint:
    by branch step and candidate the sums of products xy, xx, yy of rank advantages x at the candidate and y at the finest
    granularity.
    """

    algorithm: GranularGRPO
    num_steps: int
    evaluations: Callable[[Sequence[Plan], int], int]
    state: dict[str, list[list[float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.at(0)  # refuses groups that are too small to calibrate

    def at(self, iteration: int) -> GranularGRPO:
        """The algorithm of an iteration: a granularity for each branch step, and the group size within the budget."""
        asked, auto = self.algorithm, self.algorithm.auto
        if self.calibrates(iteration):
            rest = (0.0,) * (len(auto.candidates) - 1)
            chosen = replace(asked, granularities=auto.candidates, granularity_weights=(1.0, *rest))
        else:
            chosen = replace(asked, granularities=(self.choice(),))
        if self.calibrates(iteration) or auto.spend == "members":
            budget = asked.group_size * self._price_of_a_member(asked, iteration)
            size = int(
                budget / self._price_of_a_member(chosen, iteration) + 1e-6
            )  # tolerance for quotients that should be integers
            size -= asked.antithetic * (size % 2)
            if size < 2:
                raise UserError(
                    f"algorithm.group_size={asked.group_size} is too small: calibration would leave groups of {size}"
                )
            chosen = replace(chosen, group_size=size)
        return chosen

    def calibrates(self, iteration: int) -> bool:
        """Whether an iteration finishes its members at every candidate granularity."""
        return iteration < FIRST or iteration % self.algorithm.auto.calibrate_every == 0

    def choice(self) -> tuple[int, ...]:
        """A granularity for each branch step, such that the sum of rho^2 over the sum of costs is largest."""
        candidates, floor = self.algorithm.auto.candidates, self.algorithm.auto.floor
        worths, costs = [], []
        for step in self.algorithm.branch_steps:
            agreements = [1.0, *(cautious(*sums) for sums in self._sums(step)[1:])]
            worths.append([rho**2 if rho >= floor else -math.inf for rho in agreements])
            plain = (replace(self.algorithm, granularities=(c,), branch_steps=(step,)) for c in candidates)
            costs.append([self._price_of_a_member(algorithm, 0) for algorithm in plain])
        return tuple(candidates[place] for place in best_ratio(worths, costs))

    def observe(self, iteration: int, steps: Sequence[int], rewards: Tensor, weights: Tensor) -> dict[str, float]:
        """Updates the state from rewards [N, R, M, G] of N groups with branch `steps`; returns what to log."""
        if self.calibrates(iteration):
            self._calibrate(steps, rewards, weights)
        used = self.at(iteration)
        row: dict[str, float] = {"group_size": used.group_size}
        for step in self.algorithm.branch_steps:
            row[f"allocation/{step}/granularity"] = used.granularities_at(step)[0]
            for candidate, (xy, xx, yy) in list(zip(self.algorithm.auto.candidates, self._sums(step), strict=True))[1:]:
                row[f"allocation/{step}/agreement/{candidate}"] = xy / math.sqrt(xx * yy) if xx * yy > 0 else math.nan
        return row

    def _calibrate(self, steps: Sequence[int], rewards: Tensor, weights: Tensor) -> None:
        """Each granularity's advantages, ranked within their groups, against the finest's.

        Groups without variance count as zeros, as in a gradient: differences of a coarse tail alone are noise.
        """
        scores = [mix_rewards(rewards[:, :, m : m + 1], weights, self.algorithm.reward_mix) for m in range(rewards.shape[2])]
        candidates = [group_normalize(ranks(score)) for score in scores]
        y, forget = candidates[0], self.algorithm.auto.forget
        for step in sorted(set(steps)):
            here = [n for n, other in enumerate(steps) if other == step]
            new = [[float((a * b)[here].sum()) for a, b in ((x, y), (x, x), (y, y))] for x in candidates]
            known = self._sums(step)
            self.state[str(step)] = [
                [forget * o + n for o, n in zip(*pair, strict=True)] for pair in zip(known, new, strict=True)
            ]

    def _sums(self, step: int) -> list[list[float]]:
        return self.state.get(str(step), [[0.0] * 3 for _ in self.algorithm.auto.candidates])

    def _price_of_a_member(self, algorithm: GranularGRPO, iteration: int) -> float:
        """The cost, in evaluations, of one more member in every group of a prompt, including its pictures."""
        plans = algorithm.plans(self.num_steps, iteration)
        pictures = algorithm.auto.image_cost * sum(len(plan.tails) for plan in plans)
        return self.evaluations(plans, 2) - self.evaluations(plans, 1) + pictures


def cautious(xy: float, xx: float, yy: float) -> float:
    """A correlation from sums of products, one standard error (of Fisher's z) below the estimate; -1 if there are too few data.

    Sums are of normalised advantages, so yy counts the degrees of freedom.
    """
    if yy <= 3 or xx <= 0:
        return -1.0
    rho = max(-1 + 1e-9, min(xy / math.sqrt(xx * yy), 1 - 1e-9))  # tails may be the same, where few steps are left
    return math.tanh(math.atanh(rho) - 1 / math.sqrt(yy - 3))


def best_ratio(worths: Sequence[Sequence[float]], costs: Sequence[Sequence[float]]) -> list[int]:
    """One place in each row, such that the sum of worths over the sum of costs is largest (Dinkelbach 1967).

    worths, costs [K, C], costs positive. At a price p of a cost, each row's best is the largest worth - p * cost; the best
    ratio is the price at which these add up to nothing, and every choice's own ratio is a better price than the last.
    """

    def ratio(places: Sequence[int]) -> float:
        return sum(w[c] for w, c in zip(worths, places, strict=True)) / sum(w[c] for w, c in zip(costs, places, strict=True))

    chosen = [0] * len(worths)
    while True:
        price = ratio(chosen)
        better = [
            max(range(len(worth)), key=lambda c, w=worth, k=cost: w[c] - price * k[c])  # type: ignore[misc]
            for worth, cost in zip(worths, costs, strict=True)
        ]
        if ratio(better) <= price:
            return chosen
        chosen = better
