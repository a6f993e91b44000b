"""The rollout engine: executes plans. The only loop over denoising steps that samples for training.

Everything that plans have in common is computed once, with the mathematics unchanged:
- plans with shared noise branch off one anchor walk per prompt,
- the velocity of a branch point serves the anchor and the stochastic step of all members,
- tails that begin alike are one walk until they part (`rollout.sharing`).
What remains is independent, so rows of any prompt, plan, member and sigma fill batches of `batch_size` until none is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from g2rpo.flow import ode_step
from g2rpo.rollout.sharing import Node, prefix_tree
from g2rpo.solvers import Memory, bend
from g2rpo.types import Cond, Kernel, Plan, Policy, Rollout, Solver, Transition

Noise = Callable[..., torch.Generator]
"""`noise(prompt, *purpose)`: the generator of one draw for one prompt, e.g. noise(0, "branch", 3)."""


@dataclass
class Engine:
    """Runs plans for a batch of prompts (the rows of `cond`) on the grid `sigmas` [num_steps + 1].

    `batch_size` bounds the rows of one network call. `anchor_dtype` rounds the latents at which noise enters, `sample_dtype`
    the latents that the noise leads to; both before log-probs are taken, so that what is stored is what was scored.
    `evaluations` counts rows given to the network, `calls` its calls; `on_rows` hears of every call.
    """

    policy: Policy
    cond: Cond
    sigmas: Tensor
    batch_size: int = 64
    anchor_dtype: torch.dtype = torch.float32
    sample_dtype: torch.dtype = torch.float32
    on_rows: Callable[[int], None] = lambda rows: None
    evaluations: int = field(default=0, init=False)
    calls: int = field(default=0, init=False)

    @property
    def num_steps(self) -> int:
        return len(self.sigmas) - 1

    @torch.no_grad()
    def rollout(self, plans: Sequence[Plan], group_size: int, kernel: Kernel, noise: Noise) -> list[Rollout]:
        """Every plan for every prompt, ordered by prompt, then plan. Needs sum over plans, prompts of the evaluations that
        `planning.count_evaluations` predicts."""
        anchors = self._anchors([plan.branch for plan in plans if plan.shared_noise], noise)
        begun = [
            self._branch(plan, prompt, group_size, kernel, noise, anchors) for prompt in range(len(self.cond)) for plan in plans
        ]
        finals = self._finish([(prefix_tree(plan.tails), prompt, x, plan.solver) for prompt, plan, _, x in begun])
        return [
            Rollout(prompt, plan, transitions, latents)
            for (prompt, plan, transitions, _), latents in zip(begun, finals, strict=True)
        ]

    @torch.no_grad()
    def sample(self, x: Tensor) -> Tensor:
        """Latents at sigma = 0 by the plain ODE from x [prompts, ...] at sigma = 1; num_steps evaluations a row."""
        walk = prefix_tree([range(self.num_steps + 1)])
        return torch.cat([final[0] for final in self._finish([(walk, p, x[p : p + 1], "euler") for p in range(len(x))])])

    def initial(self, noise: Noise) -> Tensor:
        """The shared initial latents, one per prompt."""
        return self.policy.noise([noise(prompt, "initial") for prompt in range(len(self.cond))])

    def velocity(self, x: Tensor, steps: Sequence[int], prompts: Sequence[int]) -> Tensor:
        """Velocities of rows x [B, ...] at grid indices `steps` for rows `prompts` of the conditioning, float32, in batches."""
        sigma = self.sigmas[torch.as_tensor(steps)].to(x.device)
        chunks = []
        for rows in torch.arange(len(x)).split(self.batch_size):
            picked = slice(int(rows[0]), int(rows[-1]) + 1)
            cond = self.cond.rows(list(prompts[picked]))
            chunks.append(self.policy.velocity(x[picked], sigma[picked], cond).float())
            self.evaluations += len(rows)
            self.calls += 1
            self.on_rows(len(rows))
        return torch.cat(chunks)

    def _anchors(self, branch_steps: Sequence[int], noise: Noise) -> dict[int, tuple[Tensor, Tensor]]:
        """(x, velocity), each with one row per prompt, at every branch step of the shared ODE walk."""
        if not branch_steps:
            return {}
        x, prompts = self.initial(noise), range(len(self.cond))
        anchors = {}
        for step in range(max(branch_steps) + 1):
            v = self.velocity(x, [step] * len(x), prompts)
            if step in branch_steps:
                anchors[step] = (x.to(self.anchor_dtype).float(), v)
            x = ode_step(x, v, self.sigmas[step], self.sigmas[step + 1])
        return anchors

    def _branch(
        self, plan: Plan, prompt: int, group_size: int, kernel: Kernel, noise: Noise, anchors: dict
    ) -> tuple[int, Plan, tuple[Transition, ...], Tensor]:
        """The stochastic steps of one plan for one prompt: (prompt, plan, transitions, latents [G, ...] at plan.merge)."""
        if plan.shared_noise:
            x, v = (rows[prompt : prompt + 1] for rows in anchors[plan.branch])
        else:
            x = self.policy.noise([noise(prompt, "initial", member) for member in range(group_size)])
            for step in range(plan.branch):
                v = self.velocity(x, [step] * len(x), [prompt] * len(x))
                x = ode_step(x, v, self.sigmas[step], self.sigmas[step + 1])
            x, v = x.to(self.anchor_dtype).float(), None
        transitions = []
        for step in range(plan.branch, plan.merge):
            if v is None:
                v = self.velocity(x, [step] * len(x), [prompt] * len(x))
            landing = kernel(x, v, self.sigmas[step], self.sigmas[step + 1])
            draw = torch.randn(group_size, *x.shape[1:], generator=noise(prompt, "branch", plan.branch, step))
            x_next = landing.sample(draw.to(x)).to(self.sample_dtype).float()
            if plan.trains(step):
                transitions.append(Transition(step, x, x_next, landing.mean, landing.log_prob(x_next)))
            x, v = x_next, None
        return prompt, plan, tuple(transitions), x

    def _finish(self, jobs: Sequence[tuple[Node, int, Tensor, Solver]]) -> list[Tensor]:
        """Walks each job's latents [G, ...] down its tree; finals [M, G, ...] per job.

        Rows wait on a stack and full batches are taken from its top, so that members are finished rather than begun: memory
        stays near the number of members whatever the number of tails.
        """
        finals: list[list[list[Tensor | None]]] = []
        stack: list[tuple[Tensor, Node, int, int, Memory | None]] = []  # latent, place, job, member, last step
        for job, (tree, _, x, _) in enumerate(jobs):
            finals.append([[None] * len(x) for _ in range(_count_tails(tree))])
            stack.extend((latent, tree, job, member, None) for member, latent in enumerate(x))
        while stack:
            ready, at_end = _take(stack, self.batch_size)
            for latent, node, job, member, _ in at_end:
                for tail in node.tails:
                    finals[job][tail][member] = latent
            if not ready:
                continue
            x = torch.stack([latent for latent, *_ in ready])
            v = self.velocity(x, [node.step for _, node, *_ in ready], [jobs[job][1] for _, _, job, *_ in ready])
            seen = [
                Memory(latent - self.sigmas[node.step] * v[row], self.sigmas[node.step]) if jobs[job][3] == "dpm2" else None
                for row, (latent, node, job, *_) in enumerate(ready)
            ]
            steps = [(row, child) for row, (_, node, *_) in enumerate(ready) for child in node.children]
            rows = torch.tensor([row for row, _ in steps])
            sigma = self.sigmas[[ready[row][1].step for row, _ in steps]]
            sigma_next = self.sigmas[[child.step for _, child in steps]]
            bent = bend(v[rows], sigma, sigma_next, [(seen[row], ready[row][4]) for row, _ in steps])
            x_next = ode_step(x[rows], bent, sigma, sigma_next)
            stack.extend((x_next[i], child, *ready[row][2:4], seen[row]) for i, (row, child) in enumerate(steps))
        return [torch.stack([torch.stack(members) for members in tails]) for tails in finals]  # type: ignore[arg-type]


def _take(stack: list, batch_size: int) -> tuple[list, list]:
    """Pops up to `batch_size` rows that still have steps to go, and every finished row that lies above them."""
    ready: list = []
    at_end: list = []
    while stack and len(ready) < batch_size:
        row = stack.pop()
        (ready if row[1].children else at_end).append(row)
    return ready, at_end


def _count_tails(tree: Node) -> int:
    return len(tree.tails) + sum(_count_tails(child) for child in tree.children)
