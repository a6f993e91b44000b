"""The demo's computations: pictures before and after training, and one group of the algorithm. Independent of Gradio."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor

from g2rpo.config.schema import SamplingConfig
from g2rpo.core.capabilities import differentiates_rewards
from g2rpo.core.contracts import advantages_of, plans_of
from g2rpo.core.data import FLOAT32, Precision
from g2rpo.core.errors import UserError, counted
from g2rpo.core.flow import ode_step
from g2rpo.core.input_pictures import check_counts
from g2rpo.core.seeding import generator_for
from g2rpo.core.types import Algorithm, Plan, Prompt, Reward
from g2rpo.evaluation.heldout import Evaluation
from g2rpo.evaluation.sampler import Sampler
from g2rpo.monitor.clips import reduced, seconds_of
from g2rpo.policies.anyflow import DiffusersPolicy
from g2rpo.rollout.engine import Engine, Noise
from g2rpo.rollout.guidance import guided_by, in_training
from g2rpo.rollout.planning import count_evaluations
from g2rpo.rollout.scoring import decode, pictures_at_once, score
from g2rpo.runtime.memory import BatchSizes

MAX_PROMPT = 500
"""Characters of a prompt."""
MAX_STEPS, MAX_GUIDANCE, MAX_STRENGTH = 100, 20.0, 2.0
"""Allowed settings, besides a model's own steps and guidance."""
MAX_SEED = 2**53 - 1
"""The largest exact integer in JavaScript."""
GRANULARITIES = (1, 2, 3)
"""The paper's, to be looked at whatever a run was trained with."""

Tuned = Literal["nothing", "adapter", "all weights"]


@dataclass(kw_only=True)
class DemoModel:
    """A model with its rewards and its algorithm; not thread-safe.

    `sampler` is that of the run's evaluations, of the prompts `heldout`; `sampling` is the training's. `tuned` describes the
    loaded tuned weights; the policy's `base()` must then be the untrained model. `rewards` are those of the advantages, with
    `weights` [R]; `judges` only score. `explain` returns why a prompt is none of the model's world, or "". `plans` are those of
    the first iteration with the sampler's seed.
    """

    sampler: Sampler
    algorithm: Algorithm
    sampling: SamplingConfig
    sizes: BatchSizes
    rewards: Mapping[str, Reward]
    weights: Tensor
    judges: Mapping[str, Reward]
    precision: Precision = FLOAT32
    tuned: Tuned = "nothing"
    explain: Callable[[str], str] = lambda prompt: ""
    heldout: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.numbers = {str(prompt): number for number, prompt in reversed(list(enumerate(self.heldout)))}
        self.input_pictures: tuple[int, int] = getattr(self.policy, "input_pictures", (0, 0))
        self.plans = plans_of(self.algorithm, self.sampling.num_steps, 0, self.sampler.seed)
        self.most_steps = max(MAX_STEPS, self.sampling.num_steps, self.sampler.num_steps)
        self.most_guidance = max(MAX_GUIDANCE, self.policy.guidance_scale)

    @property
    def policy(self) -> DiffusersPolicy:
        return cast(DiffusersPolicy, self.sampler.policy)

    @property
    def sigmas(self) -> Tensor:
        """The sigma grid of training."""
        return replace(self.sampler, num_steps=self.sampling.num_steps).sigmas

    def prompt(self, text: str, images: Sequence[str]) -> tuple[str, int | None]:
        """The prompt with these words and input pictures, and its number if it is a held-out one; without pictures, those of
        the held-out prompt with the same words. `UserError` if the model takes more or fewer pictures."""
        number = self.numbers.get(text) if not images else None
        prompt = Prompt(text, images) if number is None else self.heldout[number]
        if images or self.input_pictures[0]:
            check_counts([prompt], self.input_pictures)
        return prompt, number

    @property
    def granularities(self) -> tuple[int, ...]:
        """The granularities of the algorithm's first iteration; none if it has none."""
        return tuple(sorted({granularity for plan in self.plans for granularity in plan.granularities}))

    @property
    def offered(self) -> list[int]:
        """Granularities that may be looked at."""
        return sorted({*self.granularities, *GRANULARITIES}) if self.granularities else []

    def with_granularities(self, granularities: Collection[int] | None) -> Algorithm:
        """The algorithm with other granularities; `UserError` for none at all, or any that are not `offered`."""
        if granularities is None or set(granularities) == set(self.granularities):
            return self.algorithm
        chosen = tuple(sorted(set(granularities)))
        if not chosen or not set(chosen) <= set(self.offered):
            raise UserError(f"choose granularities of {', '.join(map(str, self.offered))}")
        return replace(self.algorithm, granularities=chosen)  # type: ignore[type-var]

    def engine(self, prompt: str) -> Engine:
        """An engine that samples `prompt` as training does."""
        return Engine(
            policy=self.policy,
            cond=self.policy.encode([prompt]),
            sigmas=self.sigmas,
            batch_size=self.sizes.rollout,
            tails=self.sampling.tails,
            precision=self.precision,
        )

    @contextmanager
    def model(self, tuned: bool, guidance: float | None, strength: float = 1.0) -> Iterator[None]:
        """While entered, the policy is the tuned or the base model, with this guidance (None: its own) and strength of its
        adapter."""
        if self.tuned == "adapter":
            self.policy.tuning.scale(strength)
        with guided_by(self.policy, guidance), nullcontext() if tuned else self.policy.base():
            yield


@dataclass(frozen=True)
class DrawnPair:
    """One prompt as the base model draws it and, from the same noise, the tuned one; both scored by every reward."""

    base: Evaluation
    tuned: Evaluation | None
    trained: tuple[str, ...]
    """The rewards that were trained on."""
    why: str
    """Why the prompt is none of the model's world, if that is known."""
    meanings: Mapping[str, str]
    """What each reward measures, as its code says."""
    settings: str
    """The settings of the drawing, as text."""
    seconds: float = 0
    """Of a clip."""

    @property
    def prompt(self) -> str:
        return self.base.prompts[0]


def draw_pair(
    session: DemoModel,
    prompt: str,
    *,
    seed: int,
    steps: int,
    guidance: float,
    strength: float = 1.0,
    images: Sequence[str] = (),
) -> DrawnPair:
    """Draws and scores `prompt`, with its input pictures in `images`, as `g2rpo sample` draws its first with this seed.

    A held-out prompt is drawn as by the run's evaluations, from the noise of its number. `UserError` for settings out of range.
    """
    prompt, seed = checked(prompt, seed)
    for name, value, low, high in (
        ("steps", steps, 1, session.most_steps),
        ("guidance", guidance, 0, session.most_guidance),
        ("strength", strength, 0, MAX_STRENGTH),
    ):
        if value is None or not low <= value <= high or (name == "steps" and value != int(value)):
            got = "nothing" if value is None else f"{value:g}"
            raise UserError(f"{name} should be {'a whole number ' if name == 'steps' else ''}from {low} to {high:g}, got {got}")
    steps, rewards = int(steps), {**session.rewards, **session.judges}
    with_inputs, number = session.prompt(prompt, images)
    sampler = replace(session.sampler, num_steps=steps, seed=seed)

    def evaluated(tuned: bool) -> Evaluation:
        with session.model(tuned, guidance, strength):
            return sampler.evaluate([with_inputs], rewards, first=number or 0)

    base, tuned = evaluated(False), evaluated(True) if session.tuned != "nothing" else None
    settings = [
        *([f"held-out prompt {number + 1}"] if number is not None else []),
        f"seed {seed}",
        counted(steps, "step"),
        *([f"guidance {guidance:g}"] if session.policy.guidable else []),
        *([f"strength {strength:g}"] if session.tuned == "adapter" else []),
    ]
    seconds = seconds_of(session.policy, base.images.shape[1])
    meanings = {name: meaning for name, reward in rewards.items() if (meaning := meaning_of(reward))}
    return DrawnPair(base, tuned, tuple(session.rewards), session.explain(prompt), meanings, " · ".join(settings), seconds)


def meaning_of(reward: Reward) -> str:
    """The first sentences of a reward's documentation; "" if it has none."""
    text = inspect.getdoc(reward) or ""
    return " ".join(text.split("\n\n")[0].split())


@dataclass(frozen=True, kw_only=True)
class GroupTrace:
    """One group of one prompt: as an iteration of training does it for every prompt and plan."""

    prompt: str
    plan: Plan
    sigmas: Tensor
    predictions: Tensor | None
    """[T, 3, H, W], the image as the anchor predicts it at every step; None if members do not start from one noise."""
    noised: Tensor
    """[G, 3, H, W], every member just after `noised_at`, decoded as it is."""
    noised_at: int
    """The last stochastic step that is learned from."""
    finals: Tensor
    """[M, G, 3, H, W], every member finished by every tail."""
    names: tuple[str, ...]
    weights: Tensor
    rewards: Tensor
    """[R, M, G]; NaN where a picture has no score."""
    advantages: Tensor
    """[G]"""
    granularities: tuple[int, ...]
    why: str
    settings: str
    seconds: float = 0
    """Of a clip."""


def trace_group(
    session: DemoModel,
    prompt: str,
    *,
    seed: int,
    plan: int,
    tuned: bool,
    granularities: Collection[int] | None = None,
    images: Sequence[str] = (),
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> GroupTrace:
    """Samples, scores and compares one group for `prompt` by plan number `plan` of the algorithm.

    With a run's own seed and granularities (None: the algorithm's) this is what its first iteration did for its first
    prompt. Tails follow `sampling.tails`. `on_progress(done, total)` counts
    network evaluations. `UserError` for wrong input.
    """
    prompt, seed = checked(prompt, seed)
    with_inputs, _ = session.prompt(prompt, images)
    algorithm, chosen = _group_to_show(session, plan, granularities)
    s = session.sampling
    sigmas = session.sigmas
    total = count_evaluations([chosen], algorithm.group_size, s.tails) + s.num_steps * chosen.shared_noise

    def noise(row: int, *purpose: int | str) -> torch.Generator:
        return generator_for(seed, "rollout", 0, row, *purpose)  # the trainer's key

    def sampled() -> GroupTrace:
        engine = session.engine(with_inputs)
        engine.on_rows = lambda rows: on_progress(engine.evaluations, total)
        (rollout,) = engine.rollout([chosen], algorithm.group_size, algorithm.kernel(sigmas), noise)
        predictions = _predictions(session, engine, noise) if chosen.shared_noise else None
        shape = rollout.finals.shape[:2]
        finals, scores = _decoded(session, rollout.finals.flatten(0, 1), session.rewards, with_inputs, algorithm.group_size)
        rewards = scores.unflatten(1, shape)
        return GroupTrace(
            prompt=with_inputs,
            plan=chosen,
            sigmas=sigmas,
            predictions=predictions,
            noised=_decoded(session, rollout.transitions[-1].x_next)[0],
            noised_at=rollout.transitions[-1].step,
            finals=finals.unflatten(0, shape),
            names=tuple(session.rewards),
            weights=session.weights,
            rewards=rewards,
            advantages=advantages_of(algorithm, rewards[None], session.weights)[0],
            granularities=chosen.tail_names,
            why=session.explain(prompt),
            settings=f"seed {seed} · {s.num_steps} steps · {'after training' if tuned else 'base model'}",
            seconds=seconds_of(session.policy, finals.shape[1]),
        )

    with session.model(tuned, None), in_training(session.policy, s.guidance_scale):
        return session.sizes.fit(sampled)


def _group_to_show(session: DemoModel, plan: int, granularities: Collection[int] | None) -> tuple[Algorithm, Plan]:
    """The algorithm with these granularities, and its plan of this number; `UserError` if there is no group to compare."""
    if plan not in range(len(session.plans)):
        raise UserError(f"there is no such branch: {plan}")
    algorithm = session.with_granularities(granularities)
    chosen = plans_of(algorithm, session.sampling.num_steps, 0, session.sampler.seed)[plan]
    if differentiates_rewards(algorithm):
        raise UserError("the algorithm learns from the gradient of its rewards: it has no group to compare")
    if chosen.branch == chosen.merge:
        raise UserError("the algorithm learns from finished pictures: its rollout has no stochastic step to show")
    return algorithm, chosen


def _predictions(session: DemoModel, engine: Engine, noise: Noise) -> Tensor:
    """[T, 3, H, W], the image as the anchor predicts it at every step."""
    sigmas = engine.sigmas
    anchors = engine.anchors(range(engine.num_steps), noise)
    predicted = [ode_step(x, v, sigmas[step], sigmas.new_zeros(())) for step, (x, v) in anchors.items()]
    return _decoded(session, torch.cat(predicted))[0]


def _decoded(
    session: DemoModel, latents: Tensor, rewards: Mapping[str, Reward] | None = None, prompt: str = "", members: int = 1
) -> tuple[Tensor, Tensor]:
    """Pictures or reduced clips of latents [N, ...], and their scores [R, N], a batch at a time: clips are large."""
    shown, scores = [], []
    for part in latents.split(pictures_at_once(rewards or {}, session.sizes.decode, members)):
        images = decode(session.policy, part, session.sizes.decode)
        shown.append(reduced(images) if images.ndim == 5 else images)
        scores.append(score(rewards or {}, images, [prompt] * len(images), part, members=members))
    return torch.cat(shown), torch.cat(scores, 1)


def checked(prompt: str, seed: float | None) -> tuple[str, int]:
    """The stripped prompt and the seed. `UserError` for an empty or too long prompt, or a wrong seed."""
    prompt = prompt.strip()
    if not prompt:
        raise UserError("write a prompt first")
    if len(prompt) > MAX_PROMPT:
        raise UserError(f"the prompt has {len(prompt)} characters; {MAX_PROMPT} are allowed")
    if seed is None or not (math.isfinite(seed) and seed == int(seed) and 0 <= seed <= MAX_SEED):
        raise UserError(f"the seed should be a whole number from 0 to {MAX_SEED}")
    return prompt, int(seed)


def plan_labels(plans: Sequence[Plan]) -> list[str]:
    """Labels of the steps at which each plan's noise enters."""
    return [f"step {p.branch}" if p.merge == p.branch + 1 else f"steps {p.branch} to {p.merge - 1}" for p in plans]
