"""The rollout engine: executes plans. The only loop over denoising steps that samples for training.

What plans have in common is computed once, with unchanged results:
- plans with shared noise branch off one anchor trajectory per prompt,
- the velocity at a branch point is used for the anchor and for the stochastic step of all members,
- tails with equal first steps are evaluated once up to where they differ (`tails.Tails.tree`).

What remains is independent, so batches of `batch_size` mix rows of any prompt, plan, member and
sigma. Cheaper tails are in `rollout.tails`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from g2rpo.core.data import FLOAT32, Cond, Precision
from g2rpo.core.flow import ode_step
from g2rpo.core.plans import Plan, Rollout, Transition
from g2rpo.core.types import Kernel, Policy, unguided
from g2rpo.rollout.memory import bounded_by
from g2rpo.rollout.planning import baseline_walk
from g2rpo.rollout.tails import EXACT, Node, Past, Tails

Noise = Callable[..., torch.Generator]
"""`noise(prompt, *purpose)`: the generator of one draw for one prompt, e.g. noise(0, "branch",
3)."""


@dataclass(kw_only=True)
class Engine:
    """Runs plans for a batch of prompts (the rows of `cond`) on the grid `sigmas` [num_steps + 1].

    `batch_size` bounds the rows of one network call. `tails` finish members only. `evaluations`
    counts rows given to the network, `calls` its calls; `on_rows(rows)` is called after each.
    """

    policy: Policy
    cond: Cond
    sigmas: Tensor
    batch_size: int = 64
    precision: Precision = FLOAT32
    tails: Tails = EXACT
    on_rows: Callable[[int], None] = lambda rows: None
    evaluations: int = field(default=0, init=False)
    calls: int = field(default=0, init=False)

    @property
    def num_steps(self) -> int:
        return len(self.sigmas) - 1

    @torch.no_grad()
    def rollout(
        self, plans: Sequence[Plan], group_size: int, kernel: Kernel, noise: Noise
    ) -> list[Rollout]:
        """Executes every plan for every prompt; rollouts are ordered by prompt, then plan. Groups
        advance together, to share batches. `planning.count_evaluations` predicts the evaluations of
        a prompt."""
        anchors = self.anchors([plan.branch for plan in plans if plan.shared_noise], noise)
        groups = []
        for prompt, plan in itertools.product(range(len(self.cond)), plans):
            if plan.shared_noise:  # the anchor's velocity at the branch point is the group's
                x, v = (rows[prompt : prompt + 1] for rows in anchors[plan.branch])
                groups.append(_Group(prompt, plan, x, v))
            else:
                own = [noise(prompt, "initial", member) for member in range(group_size)]
                x = self._noise(own)
                if plan.common:
                    x = (
                        plan.common * self._noise([noise(prompt, "initial")])
                        + math.sqrt(1 - plan.common**2) * x
                    )
                groups.append(_Group(prompt, plan, x))

        apart = [group for group in groups if not group.plan.shared_noise]
        for step in range(max((group.plan.branch for group in apart), default=0)):
            walking = [(group, step) for group in apart if step < group.plan.branch]
            for (group, _), v in zip(walking, self._velocities(walking), strict=True):
                group.x = ode_step(group.x, v, self.sigmas[step], self.sigmas[step + 1])
        for group in apart:
            # rounds; later arithmetic stays float32
            group.x = group.x.to(self.precision.anchor).float()

        for ahead in range(max(len(plan.stochastic) for plan in plans)):
            stepping = [
                (g, g.plan.stochastic[ahead]) for g in groups if ahead < len(g.plan.stochastic)
            ]
            unknown = [(group, step) for group, step in stepping if group.v is None]
            for (group, _), v in zip(unknown, self._velocities(unknown), strict=True):
                group.v = v
            for (group, step), (x, v) in zip(stepping, self._starts(stepping), strict=True):
                landing = kernel(x, v, self.sigmas[step], self.sigmas[group.plan.after(step)])
                generator = noise(group.prompt, "branch", group.plan.branch, step)
                draw = torch.randn(group_size, *group.x.shape[1:], generator=generator)
                # rounded before its log-prob is taken, so that the log-prob is that of the stored
                # latent
                x_next = (
                    landing.sample(draw.to(group.x.device, self.precision.step))
                    .to(self.precision.sample)
                    .float()
                )
                if group.plan.trains(step):
                    group.transitions.append(
                        Transition(step, group.x, x_next, landing.mean, landing.log_prob(x_next))
                    )
                group.x, group.v = x_next, None

        finals = self._finish(
            [
                *((group.plan.walks(self.sigmas), group.prompt, group.x) for group in groups),
                *self._baselines(plans, anchors),
            ],
            self.tails.walked_by(plans),
        )
        finals, odes = finals[: len(groups)], finals[len(groups) :]
        return [
            Rollout.of(
                g.prompt,
                g.plan,
                g.transitions,
                latents,
                self.sigmas,
                odes[g.prompt][0, 0] if g.plan.baseline else None,
            )
            for g, latents in zip(groups, finals, strict=True)
        ]

    @torch.no_grad()
    def sample(self, x: Tensor, tails: Tails = EXACT) -> Tensor:
        """Latents at sigma = 0 by the ODE from x [prompts, ...] at sigma = 1, by Euler's or another
        solver; num_steps evaluations a row."""
        walk = (range(self.num_steps + 1),)
        finals = self._finish(
            [(walk, prompt, x[prompt : prompt + 1]) for prompt in range(len(x))], tails
        )
        return torch.cat([final[0] for final in finals])

    def initial(self, noise: Noise) -> Tensor:
        """The shared initial latents, one per prompt."""
        return self._noise([noise(prompt, "initial") for prompt in range(len(self.cond))])

    def _noise(self, generators: Sequence[torch.Generator]) -> Tensor:
        return self.policy.noise(generators).to(self.precision.step).float()

    def velocity(self, x: Tensor, steps: Sequence[int], prompts: Sequence[int]) -> Tensor:
        """Velocities of rows x [B, ...] at grid indices `steps` for rows `prompts` of the
        conditioning."""
        sigma = self.sigmas[torch.as_tensor(steps)].to(x.device)
        chunks = []
        for rows in torch.arange(len(x)).split(self.batch_size):
            picked = slice(int(rows[0]), int(rows[-1]) + 1)
            with bounded_by("rollout"):
                cond = self.cond.rows(list(prompts[picked]))
                chunks.append(
                    self.policy.velocity(x[picked], sigma[picked], cond).to(self.precision.step)
                )
            self.evaluations += len(rows)
            self.calls += 1
            self.on_rows(len(rows))
        return torch.cat(chunks)

    @torch.no_grad()
    def anchors(
        self, branch_steps: Sequence[int], noise: Noise
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """(x, velocity), each with one row per prompt, at every branch step of the shared ODE
        trajectory."""
        if not branch_steps:
            return {}
        x, prompts = self.initial(noise), range(len(self.cond))
        anchors = {}
        for step in range(max(branch_steps) + 1):
            v = self.velocity(x, [step] * len(x), prompts)
            if step in branch_steps:
                anchors[step] = (x.to(self.precision.anchor).float(), v)
            x = ode_step(x, v, self.sigmas[step], self.sigmas[step + 1])
        return anchors

    def _baselines(
        self, plans: Sequence[Plan], anchors: Mapping[int, tuple[Tensor, Tensor]]
    ) -> list[tuple[Sequence[Sequence[int]], int, Tensor]]:
        """What is left of the anchors' way to the picture, one job for each prompt, if a plan has a
        baseline."""
        if not any(plan.baseline for plan in plans):
            return []
        last = max(anchors)
        x = ode_step(*anchors[last], self.sigmas[last], self.sigmas[last + 1])
        walk = baseline_walk(last, self.num_steps)
        return [(walk, prompt, x[prompt : prompt + 1]) for prompt in range(len(x))]

    def _starts(self, stepping: Sequence[tuple[_Group, int]]) -> Sequence[tuple[Tensor, Tensor]]:
        """The latents and velocities that the kernel gets for each group's step: the group's own,
        or those where the ODE's step ends, of a plan that is `corrected`."""
        starts, corrected = [], []
        for place, (group, step) in enumerate(stepping):
            assert group.v is not None
            starts.append((group.x, group.v))
            if group.plan.corrected:
                after = group.plan.after(step)
                x = ode_step(group.x, group.v, self.sigmas[step], self.sigmas[after])
                corrected.append((place, (replace(group, x=x), after)))
        if not corrected:
            return starts
        with unguided(self.policy):
            velocities = self._velocities([asking for _, asking in corrected])
        for (place, (group, _)), v in zip(corrected, velocities, strict=True):
            starts[place] = (group.x, v)
        return starts

    def _velocities(self, asking: Sequence[tuple[_Group, int]]) -> Sequence[Tensor]:
        """The velocities of groups, each at a step of its own."""
        if not asking:
            return []
        sizes = [len(group.x) for group, _ in asking]
        rows = [(step, group.prompt) for group, step in asking for _ in group.x]
        x = torch.cat([group.x for group, _ in asking])
        return self.velocity(x, [step for step, _ in rows], [prompt for _, prompt in rows]).split(
            sizes
        )

    def _finish(
        self, jobs: Sequence[tuple[Sequence[Sequence[int]], int, Tensor]], tails: Tails
    ) -> list[Tensor]:
        """Integrates each job's latents [G, ...] along its tails for its prompt; returns finals [M,
        G, ...] per job.

        Rows are kept on a stack and batches are taken from its top (depth first), so memory is
        bounded by the number of members, not of tails.
        """
        finals: list[list[list[Any]]] = [[[None] * len(x) for _ in steps] for steps, _, x in jobs]
        trees = [tails.tree(steps) for steps, _, _ in jobs]
        stack = [
            _Row(x, trees[job], job, member)
            for job, (_, _, xs) in enumerate(jobs)
            for member, x in enumerate(xs)
        ]
        # no loss has velocities of tails
        with getattr(self.policy, "merged", nullcontext)():
            while stack:
                asking: list[_Row] = []
                forecast: list[_Row] = []  # their velocities need no network
                while stack and len(asking) < self.batch_size:
                    row = stack.pop()
                    for tail in row.node.tails:
                        finals[row.job][tail][row.member] = row.x
                    if row.node.children:
                        (forecast if row.node.forecast else asking).append(row)
                if not (rows := [*asking, *forecast]):
                    continue
                x, v = torch.stack([row.x for row in rows]), []
                if asking:
                    steps, prompts = (
                        [row.node.step for row in asking],
                        [jobs[row.job][1] for row in asking],
                    )
                    v.append(self.velocity(x[: len(asking)], steps, prompts))
                v += [
                    tails.forecast_velocity(row.past, float(self.sigmas[row.node.step]))[None]
                    for row in forecast
                ]
                stack.extend(self._advance(rows, x, torch.cat(v), tails))
        return [torch.stack([torch.stack(members) for members in latents]) for latents in finals]

    def _advance(self, rows: Sequence[_Row], x: Tensor, v: Tensor, tails: Tails) -> Iterator[_Row]:
        """The rows after one step to each child of their nodes."""
        steps = [(index, child) for index, row in enumerate(rows) for child in row.node.children]
        index = [row for row, _ in steps]
        sigma = self.sigmas[[rows[row].node.step for row in index]]
        sigma_next = self.sigmas[[child.step for _, child in steps]]
        x_next = tails.step(
            x[index], v[index], sigma, sigma_next, [rows[row].past for row in index]
        )
        for place, (row, child) in enumerate(steps):
            before = rows[row]
            past = (
                before.past
                if before.node.forecast
                else tails.remember(before.past, x[row], v[row], float(sigma[place]))
            )
            yield _Row(x_next[place], child, before.job, before.member, past)


@dataclass
class _Group:
    """The members of one plan for one prompt before `merge`; x has one row as long as they share a
    latent."""

    prompt: int
    plan: Plan
    x: Tensor  # [1 or G, ...]
    v: Tensor | None = None  # the velocity at x, once it is known
    transitions: list[Transition] = field(default_factory=list)


@dataclass
class _Row:
    """A latent of a tail: its node in its job's tree, its prompt and member, and its past
    velocities."""

    x: Tensor
    node: Node
    job: int
    member: int
    past: Past = ()
