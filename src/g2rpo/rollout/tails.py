"""How tails are integrated: which steps they share, and Euler's steps, another solver's, or fewer
evaluations. A tail only estimates the reward of a member and carries no log-prob, so the ratio is
unaffected: anchors and stochastic steps always use the policy's own velocity.
benchmarks/results/fast_tails.md has the errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from g2rpo.core.flow import ode_step
from g2rpo.core.noise import per_row
from g2rpo.core.plans import Plan, Solver

Past = tuple[tuple[float, Tensor], ...]
"""The last evaluations of a row, newest first: sigma, and velocity (dpmpp2m: predicted image)."""


@dataclass
class Node:
    """A step at which all tails in this part of the tree have the same latent."""

    step: int
    tails: list[int] = field(default_factory=list)  # tails that end here
    children: list[Node] = field(default_factory=list)
    forecast: bool = False  # its velocity is not evaluated

    def evaluations(self) -> int:
        """Velocities needed below and at this node, per member: the last node of a tail needs
        none."""
        return bool(self.children and not self.forecast) + sum(
            child.evaluations() for child in self.children
        )


@dataclass(frozen=True)
class Tails:
    """Options of tails. `Tails()` takes exact Euler steps over the steps of a plan.

    solver: "dpmpp2m" is DPM-Solver++(2M) (arXiv 2211.01095, Alg. 2), its form for flows: second
        order with as many evaluations; it begins with an Euler step.
    forecast: from the third on, every second velocity of a tail is extrapolated, linearly in sigma,
        from the last two that were evaluated (TaylorSeer, arXiv 2503.06923, of order 1 on the
        network's output). To reuse the last velocity unchanged would be Euler with longer jumps,
        which `granularities` offer already.
    """

    solver: Solver = "euler"
    forecast: bool = False

    def __post_init__(self) -> None:
        if self.forecast and self.solver != "euler":
            raise ValueError(
                f"forecast replaces velocities of Euler steps: set sampling.tails.forecast=false with solver={self.solver}"
            )

    def walked_by(self, plans: Sequence[Plan]) -> Tails:
        """These tails with the plans' solver; plans with the default ("euler") use
        `self.solver`."""
        asked = {plan.solver for plan in plans}
        if len(asked) > 1:
            raise ValueError(
                f"the plans of one rollout must agree on a solver, got {', '.join(sorted(asked))}"
            )
        return self if asked <= {"euler"} else replace(self, solver=asked.pop())

    def tree(self, tails: Sequence[Sequence[int]]) -> Node:
        """The prefix tree of `tails`, which begin with the same step: two that visit the same first
        steps have the same latents there, and each node is evaluated once. `Node.tails` are indices
        into the argument."""
        root = Node(tails[0][0])
        for index, steps in enumerate(tails):
            node = root
            for place, step in enumerate(steps[1:], 1):
                match = next((child for child in node.children if child.step == step), None)
                if match is None:
                    match = Node(step, forecast=self.forecast and place % 2 == 0)
                    node.children.append(match)
                node = match
            node.tails.append(index)
        return root

    def remember(self, past: Past, x: Tensor, velocity: Tensor, sigma: float) -> Past:
        """`past` with the evaluation at sigma added."""
        if self.solver == "euler":
            return ((sigma, velocity), *past)[:2] if self.forecast else ()
        return ((sigma, x - sigma * velocity),)

    def forecast_velocity(self, past: Past, sigma: float) -> Tensor:
        """The line through the last two velocities, at sigma."""
        (near, velocity), (far, before) = past
        return velocity + (sigma - near) / (near - far) * (velocity - before)

    def step(
        self, x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, past: Sequence[Past]
    ) -> Tensor:
        """x [B, ...] at `sigma_next` [B]; rows without a past take an Euler step.

        "dpmpp2m" adds to it (1 - sigma_next / sigma) * h / (2 h_before) of how much the predicted
        image has changed since the row's last step, with h the change of log((1 - sigma) / sigma),
        and nothing on a step to 0, where h is infinite.
        """
        x_next = ode_step(x, velocity, sigma, sigma_next)
        if self.solver == "euler":
            return x_next
        now, then = sigma.double(), sigma_next.double()
        before = torch.tensor(
            [memory[0][0] if memory else torch.nan for memory in past], dtype=torch.float64
        )
        value = x - per_row(sigma, x) * velocity
        factor = (
            (1 - then / now)
            * (_log_snr(then) - _log_snr(now))
            / (2 * (_log_snr(now) - _log_snr(before)))
        )
        factor = factor.where(factor.isfinite(), 0.0)
        last = torch.stack(
            [memory[0][1] if memory else own for memory, own in zip(past, value, strict=True)]
        )
        return x_next + per_row(factor, x) * (value - last)


EXACT = Tails()


def _log_snr(sigma: Tensor) -> Tensor:
    """Half the log signal-to-noise ratio, the time of DPM-Solver."""
    return torch.log((1 - sigma) / sigma)
