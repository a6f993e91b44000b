"""Tries a user's own algorithm and rewards on random numbers, before anything is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from g2rpo.config.algorithms import ALGORITHMS
from g2rpo.config.schema import Config
from g2rpo.core.contracts import check_loss, name_of
from g2rpo.core.data import Cond, Example, Loss
from g2rpo.core.devices import pick_device
from g2rpo.core.errors import RewardFailed, UserError, placed, where
from g2rpo.core.noise import generator_for
from g2rpo.core.plain import as_json, parse_as
from g2rpo.core.rewards import Scorer, as_reward
from g2rpo.core.types import Algorithm
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.rewards.analytic import Brightness, load_function
from g2rpo.rewards.catalogue import RewardKind
from g2rpo.rollout.scoring import decode, score
from g2rpo.rollout.tails import Tails
from g2rpo.train.found import Found
from g2rpo.train.run.records import TrainingRow
from g2rpo.train.trainer import Trainer

TRIAL_PROMPTS = 2
"""Of the trial."""


def tried(found: Found) -> Iterator[str]:
    """One iteration of an own algorithm, and one call of every own reward that exists before models
    are loaded: functions, and objects that are given. UserError names the code that fails."""
    config, given = found.config, found.given
    with torch.random.fork_rng(devices=[]):
        if type(config.algorithm) not in ALGORITHMS.values():
            _try_algorithm(config)
        both = [*found.prompts[:1], *found.heldout[:1]]
        for rewards, kinds, asked in (
            (given.rewards, found.rewards, both),
            (given.judges, found.judges, found.heldout[:TRIAL_PROMPTS]),
        ):
            device = pick_device(config.policy.device)
            own = _functions(kinds.values(), device) if rewards is None else _own(rewards)
            for name, reward in own.items():
                _try_reward(name, reward, asked, found)
    yield from ()


def _try_algorithm(config: Config) -> None:
    """An iteration of the trainer, on the policy that has a closed form."""
    prompts = [str(index / 10) for index in range(TRIAL_PROMPTS)]
    small = config.changed("trainer", prompts_per_iteration=TRIAL_PROMPTS, sharding="none")
    small = small.changed("sampling", tails=Tails(), guidance_scale=None)
    small = small.model_copy(update={"alarms": {"action": "off"}})
    try:
        trainer = Trainer(
            config=small,
            policy=GaussianPolicy(),
            rewards=dict.fromkeys(config.rewards, Brightness()),
            prompts=prompts,
            heldout=prompts[:1],
        )
        trainer.updater.loss = partial(_checked_loss, config.algorithm, trainer.updater.loss)  # type: ignore[method-assign]
        parse_as(TrainingRow, as_json(trainer.iterate()))  # its log can be read again
    except UserError:
        raise
    except Exception as error:
        what = f"algorithm {name_of(config.algorithm)}: a trial iteration on random latents [3, 4, 4] failed"
        raise UserError(f"{what}: {type(error).__name__}: {error}{where(error)}") from error


def _checked_loss(
    algorithm: Algorithm,
    own: Callable[..., Loss],
    examples: Sequence[Example],
    cond: Cond,
    first: bool,
) -> Loss:
    loss = own(examples, cond, first)
    check_loss(algorithm, loss, sum(len(item.advantages) for item in examples), first)
    return loss


def _own(rewards: Mapping[str, Scorer]) -> dict[str, Scorer]:
    """Those that are not of this package."""

    def module(reward: Scorer) -> str:
        return (reward if inspect.isroutine(reward) else type(reward)).__module__ or ""

    return {name: it for name, it in rewards.items() if not module(it).startswith("g2rpo.")}


def _functions(kinds: Iterable[RewardKind], device: str) -> dict[str, Scorer]:
    """The rewards of a config that are functions; a class might load a model."""
    functions: dict[str, Scorer] = {}
    for kind in kinds:
        made = _target(kind) if kind.entry.kind == "function" else kind.maker
        if not isinstance(made, type):
            functions[kind.name] = kind.build(device)
    return functions


def _target(kind: RewardKind) -> Any:
    """What the kind "function" names."""
    with placed(f"{kind.key}.options.target: "):
        return load_function(str(kind.entry.options.get("target")))


def _try_reward(name: str, reward: Scorer, prompts: Sequence[str], found: Found) -> None:
    """Scores random pictures of the run's size, or what a given policy decodes from noise."""
    if as_reward(reward).latent:
        return
    if (policy := found.given.policy) is not None:
        noise = policy.noise([generator_for("trial", i) for i in range(TRIAL_PROMPTS)])
        images = decode(policy, noise, TRIAL_PROMPTS)
    else:
        size = found.config.policy
        length = size.num_frames or 1
        frames = [length] if length > 1 else []
        images = torch.rand(TRIAL_PROMPTS, *frames, 3, size.height, size.width)
    try:
        score({name: reward}, images[: len(prompts)], prompts)
    except RewardFailed as error:
        what = f"It was tried on {len(prompts)} random pictures, with the prompts {', '.join(map(repr, prompts))}"
        raise UserError(f"{error}\n{what}; nothing is loaded yet.") from error
