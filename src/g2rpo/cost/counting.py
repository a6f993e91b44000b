"""What a run does, counted: exact, and a function of the config alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from g2rpo.config import Config
from g2rpo.flow import sigma_grid
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.planning import count_evaluations, count_images
from g2rpo.seeding import generator_for
from g2rpo.types import Plan


@dataclass(frozen=True)
class Counts:
    """The work of one iteration, of one evaluation on held-out prompts, and how often each happens in a run."""

    iterations: int
    prompts: int
    evaluations_per_prompt: int
    evaluations: int
    """Velocities asked of the policy by a rollout; true guidance makes two network rows of each."""
    images: int
    scores: dict[str, int]
    """Pictures scored, by trained reward."""
    training_rows: int
    """Rows of the training pass, forward and backward."""
    reference_rows: int
    """Rows that a KL term evaluates under the untrained model."""
    training_passes: int
    optimizer_steps: int
    heldout: int
    """Held-out prompts: pictures of one evaluation, scored by every reward and judge."""
    heldout_steps: int
    times_evaluated: int
    checkpoints: int

    @property
    def heldout_evaluations(self) -> int:
        return self.heldout * self.heldout_steps


def count(config: Config, heldout: int) -> Counts:
    """Counts of a run of `config` with `heldout` held-out prompts.

    A training pass has one row per stochastic step where the group branches from a shared latent, one per member elsewhere.
    Held-out pictures are judged before the first iteration, every `evaluation.every` iterations and after the last; then
    once more for the before/after table.
    """
    algorithm, trainer = config.algorithm, config.trainer
    plans, prompts, group = algorithm.plans(config.sampling.num_steps), trainer.prompts_per_iteration, algorithm.group_size
    images = prompts * count_images(plans, group)
    per_step = Counter(step for plan in plans for step in range(plan.branch, plan.merge))  # transitions of one prompt
    batches = list(per_step.values()) if algorithm.update_every == "branch" else [per_step.total()]
    rows = prompts * sum(rows_of(plan, step, group) for plan in plans for step in range(plan.branch, plan.merge))
    n = trainer.iterations
    return Counts(
        iterations=n,
        prompts=prompts,
        evaluations_per_prompt=count_evaluations(plans, group),
        evaluations=prompts * count_evaluations(plans, group),
        images=images,
        scores=dict.fromkeys(config.rewards, images),
        training_rows=rows,
        reference_rows=rows if algorithm.kl_weight else 0,
        training_passes=sum(math.ceil(prompts * items / trainer.micro_batch_size) for items in batches),
        optimizer_steps=len(batches),
        heldout=heldout,
        heldout_steps=config.evaluation.num_steps or config.sampling.num_steps,
        times_evaluated=2 + _times(n, config.evaluation.every),
        checkpoints=_times(n, trainer.checkpoint_every),
    )


def rows_of(plan: Plan, step: int, group: int) -> int:
    """Rows of the training pass for one stochastic step of a group."""
    return 1 if plan.shared_noise and step == plan.branch else group


def _times(iterations: int, every: int) -> int:
    """How often something happens that happens every so many iterations, and after the last."""
    return iterations // every + bool(iterations % every)


def largest_pass(config: Config) -> tuple[int, int]:
    """(network rows before guidance, group members) of the largest training pass."""
    algorithm, plans = config.algorithm, config.algorithm.plans(config.sampling.num_steps)
    steps = [rows_of(plan, step, algorithm.group_size) for plan in plans for step in range(plan.branch, plan.merge)]
    items = min(config.trainer.micro_batch_size, config.trainer.prompts_per_iteration * len(steps))
    return items * max(steps), items * algorithm.group_size


def call_sizes(config: Config) -> Sequence[int]:
    """Rows of every network call of one iteration's rollout: the engine itself runs, on a policy of one number."""
    sigmas = sigma_grid(config.sampling.num_steps)
    sizes: list[int] = []
    policy = GaussianPolicy(size=1)
    cond = policy.encode(["0"] * config.trainer.prompts_per_iteration)
    engine = Engine(policy, cond, sigmas, config.sampling.batch_size, on_rows=sizes.append)
    algorithm = config.algorithm
    with torch.no_grad():
        plans = algorithm.plans(config.sampling.num_steps)
        engine.rollout(plans, algorithm.group_size, algorithm.diffusion(sigmas), generator_for)
    return sizes
