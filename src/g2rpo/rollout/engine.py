"""The rollout engine: executes plans. The only loop over denoising steps that samples for training.

Everything that plans have in common is computed once, with the mathematics unchanged:
- plans with shared noise branch off one anchor trajectory per prompt,
- the velocity of a branch point serves the anchor and the stochastic step of all members,
- tails with equal first steps are evaluated once up to where they differ (`rollout.sharing`).
What remains is independent, so batches of `batch_size` mix rows of any prompt, plan, member and sigma. Cheaper tails are in
`rollout.tails`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from g2rpo.data import FLOAT32, Precision
from g2rpo.flow import ode_step
from g2rpo.rollout.sharing import Node
from g2rpo.rollout.tails import EXACT, Past, Tails
from g2rpo.runtime.memory import bounded_by
from g2rpo.types import Cond, Kernel, Plan, Policy, Rollout, Transition

Noise = Callable[..., torch.Generator]
"""`noise(prompt, *purpose)`: the generator of one draw for one prompt, e.g. noise(0, "branch", 3)."""


@dataclass(kw_only=True)
class Engine:
    """Runs plans for a batch of prompts (the rows of `cond`) on the grid `sigmas` [num_steps + 1].

    `batch_size` bounds the rows of one network call. `tails` finish members only. `evaluations` counts rows given to the
    network, `calls` its calls; `on_rows(rows)` is called after each.
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
    def rollout(self, plans: Sequence[Plan], group_size: int, kernel: Kernel, noise: Noise) -> list[Rollout]:
        """Executes every plan for every prompt; rollouts are ordered by prompt, then plan. `planning.count_evaluations`
        predicts the evaluations of a prompt."""
        groups = self._begin(plans, group_size, kernel, noise)
        tails = self.tails.walked_by(plans)
        jobs = [(tails.tree(group.plan.tails), group.prompt, group.x) for group in groups]
        finals = self._finish(jobs, tails)
        return [
            Rollout(group.prompt, group.plan, tuple(group.transitions), latents)
            for group, latents in zip(groups, finals, strict=True)
        ]

    @torch.no_grad()
    def sample(self, x: Tensor, tails: Tails = EXACT) -> Tensor:
        """Latents at sigma = 0 by the ODE from x [prompts, ...] at sigma = 1, by Euler's or another solver; num_steps
        evaluations a row."""
        walk = tails.tree([range(self.num_steps + 1)])
        finals = self._finish([(walk, prompt, x[prompt : prompt + 1]) for prompt in range(len(x))], tails)
        return torch.cat([final[0] for final in finals])

    def initial(self, noise: Noise) -> Tensor:
        """The shared initial latents, one per prompt."""
        return self._noise([noise(prompt, "initial") for prompt in range(len(self.cond))])

    def _noise(self, generators: Sequence[torch.Generator]) -> Tensor:
        return self.policy.noise(generators).to(self.precision.step).float()

    def velocity(self, x: Tensor, steps: Sequence[int], prompts: Sequence[int]) -> Tensor:
        """Velocities of rows x [B, ...] at grid indices `steps` for rows `prompts` of the conditioning."""
        sigma = self.sigmas[torch.as_tensor(steps)].to(x.device)
        chunks = []
        for rows in torch.arange(len(x)).split(self.batch_size):
            picked = slice(int(rows[0]), int(rows[-1]) + 1)
            with bounded_by("rollout"):
                cond = self.cond.rows(list(prompts[picked]))
                chunks.append(self.policy.velocity(x[picked], sigma[picked], cond).to(self.precision.step))
            self.evaluations += len(rows)
            self.calls += 1
            self.on_rows(len(rows))
        return torch.cat(chunks)

    @torch.no_grad()
    def anchors(self, branch_steps: Sequence[int], noise: Noise) -> dict[int, tuple[Tensor, Tensor]]:
        """(x, velocity), each with one row per prompt, at every branch step of the shared ODE trajectory."""
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

    def _begin(self, plans: Sequence[Plan], group_size: int, kernel: Kernel, noise: Noise) -> list[_Group]:
        """Executes every plan up to its `merge`; groups advance together, so that they share batches."""
        anchors = self.anchors([plan.branch for plan in plans if plan.shared_noise], noise)
        groups = [self._start(plan, prompt, group_size, noise, anchors) for prompt in range(len(self.cond)) for plan in plans]
        own = [group for group in groups if not group.plan.shared_noise]
        for step in range(max((group.plan.branch for group in own), default=0)):
            walking = [group for group in own if step < group.plan.branch]
            self._evaluate(walking, [step] * len(walking))
            for group in walking:
                group.move(ode_step(group.x, group.known(), self.sigmas[step], self.sigmas[step + 1]))
        for group in own:
            group.x = group.x.to(self.precision.anchor).float()
        for ahead in range(max(plan.merge - plan.branch for plan in plans)):
            stepping = [group for group in groups if group.plan.branch + ahead < group.plan.merge]
            asking = [group for group in stepping if group.v is None]
            self._evaluate(asking, [group.plan.branch + ahead for group in asking])
            for group in stepping:
                self._stochastic_step(group, group.plan.branch + ahead, group_size, kernel, noise)
        return groups

    def _start(self, plan: Plan, prompt: int, group_size: int, noise: Noise, anchors: dict) -> _Group:
        """A group at its branch point if that is shared, otherwise at its own noise."""
        if plan.shared_noise:
            x, v = anchors[plan.branch]
            return _Group(prompt, plan, x[prompt : prompt + 1], v[prompt : prompt + 1])
        return _Group(prompt, plan, self._noise([noise(prompt, "initial", member) for member in range(group_size)]))

    def _evaluate(self, groups: Sequence[_Group], steps: Sequence[int]) -> None:
        """The velocities of groups, each at its own step."""
        if not groups:
            return
        sizes = [len(group.x) for group in groups]
        at = [step for step, size in zip(steps, sizes, strict=True) for _ in range(size)]
        prompts = [group.prompt for group, size in zip(groups, sizes, strict=True) for _ in range(size)]
        for group, v in zip(groups, self.velocity(torch.cat([g.x for g in groups]), at, prompts).split(sizes), strict=True):
            group.v = v

    def _stochastic_step(self, group: _Group, step: int, group_size: int, kernel: Kernel, noise: Noise) -> None:
        landing = kernel(group.x, group.known(), self.sigmas[step], self.sigmas[step + 1])
        generator = noise(group.prompt, "branch", group.plan.branch, step)
        draw = torch.randn(group_size, *group.x.shape[1:], generator=generator)
        x_next = landing.sample(draw.to(group.x.device, self.precision.step)).to(self.precision.sample).float()
        if group.plan.trains(step):
            group.transitions.append(Transition(step, group.x, x_next, landing.mean, landing.log_prob(x_next)))
        group.move(x_next)

    def _finish(self, jobs: Sequence[tuple[Node, int, Tensor]], tails: Tails) -> list[Tensor]:
        """Integrates each job's latents [G, ...] along its prefix tree; returns finals [M, G, ...] per job. Rows are kept on a
        stack and batches are taken from its top (depth first), so memory is bounded by the number of members, not of tails.
        """
        finals: list[list[list[Tensor | None]]] = []
        stack: list[_Row] = []
        for job, (tree, _, x) in enumerate(jobs):
            finals.append([[None] * len(x) for _ in range(_count_tails(tree))])
            stack.extend(_Row(latent, tree, job, member) for member, latent in enumerate(x))
        while stack:
            asking, forecast, ended = _take(stack, self.batch_size)
            for row in ended:
                for tail in row.node.tails:
                    finals[row.job][tail][row.member] = row.x
            rows = [*asking, *forecast]
            if not rows:
                continue
            x, v = torch.stack([row.x for row in rows]), []
            if asking:
                steps, prompts = [row.node.step for row in asking], [jobs[row.job][1] for row in asking]
                v.append(self.velocity(x[: len(asking)], steps, prompts))
            v += [tails.forecast_velocity(row.past, float(self.sigmas[row.node.step]))[None] for row in forecast]
            stack.extend(self._advance(rows, x, torch.cat(v), tails))
        return [torch.stack([torch.stack(members) for members in tails]) for tails in finals]  # type: ignore[arg-type]

    def _advance(self, rows: Sequence[_Row], x: Tensor, v: Tensor, tails: Tails) -> Iterator[_Row]:
        """The rows after one step to each child of their nodes."""
        steps = [(index, child) for index, row in enumerate(rows) for child in row.node.children]
        index = [row for row, _ in steps]
        sigma = self.sigmas[[rows[row].node.step for row in index]]
        sigma_next = self.sigmas[[child.step for _, child in steps]]
        x_next = tails.step(x[index], v[index], sigma, sigma_next, [rows[row].past for row in index])
        for place, (row, child) in enumerate(steps):
            before = rows[row]
            past = before.past if before.node.forecast else tails.remember(before.past, x[row], v[row], float(sigma[place]))
            yield _Row(x_next[place], child, before.job, before.member, past)


@dataclass
class _Group:
    """The members of one plan for one prompt before `merge`; x has one row as long as they share a latent."""

    prompt: int
    plan: Plan
    x: Tensor  # [1 or G, ...]
    v: Tensor | None = None  # the velocity at x, once it is known
    transitions: list[Transition] = field(default_factory=list)

    def known(self) -> Tensor:
        assert self.v is not None
        return self.v

    def move(self, x: Tensor) -> None:
        self.x, self.v = x, None


@dataclass
class _Row:
    """A latent of a tail: its node in its job's tree, its prompt and member, and its past velocities."""

    x: Tensor
    node: Node
    job: int
    member: int
    past: Past = ()


def _take(stack: list[_Row], batch_size: int) -> tuple[list[_Row], list[_Row], list[_Row]]:
    """Pops up to `batch_size` rows that need the network, with the forecast and finished rows between them."""
    asking: list[_Row] = []
    forecast: list[_Row] = []
    ended: list[_Row] = []
    while stack and len(asking) < batch_size:
        row = stack.pop()
        (ended if not row.node.children else forecast if row.node.forecast else asking).append(row)
    return asking, forecast, ended


def _count_tails(tree: Node) -> int:
    return len(tree.tails) + sum(_count_tails(child) for child in tree.children)
