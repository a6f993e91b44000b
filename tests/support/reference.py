"""A rollout as in the paper's algorithm: no shared evaluations, no batches, exact tails. The engine
is tested against it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from g2rpo.core.data import Cond
from g2rpo.core.flow import ode_step
from g2rpo.core.plans import Plan, Rollout, Transition
from g2rpo.core.types import Kernel, Policy, unguided


@torch.no_grad()
def rollout(
    policy: Policy,
    cond: Cond,
    sigmas: Tensor,
    plan: Plan,
    group_size: int,
    kernel: Kernel,
    noise: Callable[..., torch.Generator],
) -> Rollout:
    """One plan for the one prompt of `cond`: shared ODE, noise at `plan.branch` to `merge`, and
    every tail to its end."""

    def velocity(x: Tensor, step: int) -> Tensor:
        return policy.velocity(x, sigmas[step].expand(len(x)), cond.rows([0] * len(x)))

    starts = [
        ("initial",) if plan.shared_noise else ("initial", member) for member in range(group_size)
    ]
    # shared: all members are the anchor until noise enters
    x = policy.noise([noise(0, *start) for start in starts])
    if plan.common:
        x = plan.common * policy.noise([noise(0, "initial")]) + (1 - plan.common**2) ** 0.5 * x
    for step in range(plan.branch):
        x = ode_step(x, velocity(x, step), sigmas[step], sigmas[step + 1])
    ode = x[:1]
    for step in range(plan.branch, len(sigmas) - 1) if plan.baseline else ():
        ode = ode_step(ode, velocity(ode, step), sigmas[step], sigmas[step + 1])
    transitions = []
    for step in plan.stochastic:
        at, v, after = x, velocity(x, step), plan.after(step)
        if plan.corrected:
            at = ode_step(x, v, sigmas[step], sigmas[after])
            with unguided(policy):
                v = velocity(at, after)
        landing = kernel(at, v, sigmas[step], sigmas[after])
        x_next = landing.sample(
            torch.randn(x.shape, generator=noise(0, "branch", plan.branch, step))
        )
        if plan.trains(step):
            transitions.append(Transition(step, x, x_next, landing.mean, landing.log_prob(x_next)))
        x = x_next
    ends = []
    for tail in plan.walks(sigmas):
        end = x
        for step, following in pairwise(tail):
            end = ode_step(end, velocity(end, step), sigmas[step], sigmas[following])
        ends.append(end)
    own = ode[0] if plan.baseline else None
    return Rollout.of(0, plan, transitions, torch.stack(ends), sigmas, own)
