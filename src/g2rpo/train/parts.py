"""The parts of a trainer, each from what it needs of the trainer's config and objects."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from g2rpo.rollout.memory import BatchSizes, batch_sizes
from g2rpo.train.collector import Collector
from g2rpo.train.evaluation.sampler import sampler_of
from g2rpo.train.evaluator import RunEvaluator, spread_prompts
from g2rpo.train.model_card import header_of
from g2rpo.train.persistence import Persistence
from g2rpo.train.updater import Updater

if TYPE_CHECKING:
    from g2rpo.train.trainer import Trainer


def sizes_of(trainer: Trainer) -> BatchSizes:
    sampling, micro = trainer.config.sampling, trainer.config.trainer.micro_batch_size
    asked = sampling.batch_size, sampling.decode_batch_size, micro
    sizes = batch_sizes(*asked, trainer.policy.device, trainer.notify)
    sizes.in_step = trainer.shards.in_step
    return sizes


def collector_of(trainer: Trainer) -> Collector:
    return Collector(
        config=trainer.config,
        policy=trainer.policy,
        rewards=trainer.rewards,
        sigmas=trainer.sigmas,
        sizes=trainer.sizes,
        shards=trainer.shards,
        division=trainer.division,
        on_evaluations=lambda rows: trainer.on_evaluations(rows),
    )


def updater_of(trainer: Trainer) -> Updater:
    return Updater(
        policy=trainer.policy,
        algorithm=trainer.algorithm,
        optimizer=trainer.learner.optimizer,
        sigmas=trainer.sigmas,
        sizes=trainer.sizes,
        max_grad_norm=trainer.config.optim.max_grad_norm,
        shards=trainer.shards,
        step_dtype=trainer.config.precision.step,
        old=trainer.learner.as_old,
    )


def evaluator_of(trainer: Trainer) -> RunEvaluator:
    config, sampler = trainer.config, sampler_of(trainer.config, trainer.policy)
    return RunEvaluator(
        sampler=sampler,
        learner=trainer.learner,
        rewards=trainer.rewards,
        judges=trainer.judges,
        prompts=trainer.heldout,
        sizes=trainer.sizes,
        shards=trainer.shards,
        run=trainer.run,
        spread_on=spread_prompts(config, sampler.num_steps, len(trainer.heldout)),
    )


def persistence_of(trainer: Trainer) -> Persistence:
    return Persistence(
        policy=trainer.policy,
        learner=trainer.learner,
        algorithm_state=trainer.algorithm_state,
        rewards={**trainer.rewards, **trainer.judges},
        shards=trainer.shards,
        run=trainer.run,
        keep=trainer.config.trainer.keep_checkpoints,
        header=partial(header_of, trainer.config),
    )
