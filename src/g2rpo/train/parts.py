"""The loop of a run, and the batch sizes of its calls, from a config and objects."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from g2rpo.config.algorithms import faults_of_gradients
from g2rpo.config.schema import Config, grid_of
from g2rpo.config.work import plans_in
from g2rpo.core.data import Cond
from g2rpo.core.errors import refuse
from g2rpo.core.seeding import generator_for
from g2rpo.core.types import Policy, Reward
from g2rpo.data.prompts import PromptOrder
from g2rpo.models.sharding import Replicated
from g2rpo.rollout.guidance import check_scale, sized
from g2rpo.rollout.memory import batch_sizes
from g2rpo.train.collector import Collector
from g2rpo.train.learner import Learner
from g2rpo.train.loop import Loop
from g2rpo.train.ranks import divided
from g2rpo.train.updater import Updater


def loop_of(
    config: Config,
    policy: Policy,
    rewards: Mapping[str, Reward],
    prompts: Sequence[str],
    shards: Replicated,
    notify: Callable[[str], None],
    on_evaluations: Callable[[int], None],
) -> Loop:
    """A loop before its first iteration. UserError for an algorithm that does not fit rewards or
    ranks."""
    algorithm, optim = config.algorithm, config.optim
    weights = {name: config.rewards[name].weight for name in rewards}
    refuse(faults_of_gradients(algorithm, rewards, weights))
    check_scale(policy, config.sampling.guidance_scale)
    division = divided(config, shards.world)
    sigmas = grid_of(config.sampling.shift, policy, config.sampling.num_steps)
    learner = Learner(policy.trainable_parameters(), optim, shards, algorithm.uses_old)
    asked = (
        config.sampling.batch_size,
        config.sampling.decode_batch_size,
        config.trainer.micro_batch_size,
    )
    sizes = batch_sizes(*asked, policy.device, notify)
    sizes.in_step = shards.in_step
    collector = Collector(
        config=config,
        policy=policy,
        rewards=rewards,
        sigmas=sigmas,
        sizes=sizes,
        shards=shards,
        division=division,
        on_evaluations=on_evaluations,
    )
    updater = Updater(
        policy=policy,
        algorithm=algorithm,
        optimizer=learner.optimizer,
        sigmas=sigmas,
        sizes=sizes,
        max_grad_norm=optim.max_grad_norm,
        shards=shards,
        step_dtype=config.precision.step,
        old=learner.as_old,
    )
    return Loop(
        config=config,
        policy=policy,
        rewards=rewards,
        weights=torch.tensor([*weights.values()]),
        algorithm=algorithm,
        algorithm_state=algorithm.memory(),
        order=PromptOrder(prompts, config.trainer.seed),
        division=division,
        collector=collector,
        updater=updater,
        learner=learner,
        sizes=sizes,
        world=shards.world,
    )


def find_sizes(loop: Loop, heldout: int, cond: Cond) -> None:
    """Measures batch sizes that are `auto`, up to the largest that an iteration, or an evaluation
    of `heldout` prompts of this rank, can use."""
    if not loop.sizes.auto:
        return
    config, policy, division = loop.config, loop.policy, loop.division
    prompts = division.own(config.trainer.prompts_per_iteration)
    members = (
        prompts
        * len(division.plans.shard(plans_in(config, loop.iteration)))
        * loop.algorithm.group_size
    )
    size = config.judged_size  # the larger of the two is measured
    larger = size is not None and math.prod(size) > config.policy.height * config.policy.width
    # with its own guidance, whose calls are no smaller than training's (consistency.check_guidance)
    with loop.collector.shards.sampling(), sized(policy, size if larger else None):
        noise = policy.noise([generator_for("memory")])
        loop.sizes.find(policy, cond.rows([0]), noise, max(members, heldout))
