"""What the demo shows: one prompt as the base model draws it, as the tuned one does, and as the base
does with free knobs, each with its price; and one group of the algorithm, as an iteration of
training samples, scores and compares it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from g2rpo.core.contracts import advantages_of, plans_of
from g2rpo.core.errors import UserError, counted
from g2rpo.core.flow import ode_step
from g2rpo.core.noise import generator_for
from g2rpo.core.plans import Plan
from g2rpo.core.statistics import group_std
from g2rpo.core.types import Algorithm
from g2rpo.lab.demo.model import DemoModel
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.guidance import guided_by
from g2rpo.rollout.planning import count_evaluations
from g2rpo.rollout.scoring import above_baseline, of_members, score_rollouts
from g2rpo.train.evaluation.controls import NO_CONTROL, Control
from g2rpo.train.evaluation.heldout import Evaluation
from g2rpo.train.monitor.pictures import decode_reduced


@dataclass(frozen=True)
class Drawn:
    """One picture, or clip, with its scores by every reward."""

    name: str
    title: str
    evaluation: Evaluation
    price: str
    """What it cost."""
    knobs: str = ""
    """The sampler settings with which it was drawn."""

    @property
    def picture(self) -> Tensor:
        return self.evaluation.images[0]

    @property
    def scores(self) -> dict[str, float]:
        return {name: float(values) for name, values in self.evaluation.scores.items()}

    @property
    def right(self) -> bool | None:
        """Whether it is right, if a reward defines that."""
        right = self.evaluation.right
        return None if right is None or right.isnan().any() else bool(right)


@dataclass(frozen=True)
class DrawnPrompt:
    """One prompt drawn by the base model and, from the same noise, by the tuned one; and by the
    base model with other sampler settings."""

    model: DemoModel
    prompt: str
    base: Drawn
    tuned: Drawn | None
    free: Drawn | None
    settings: str
    """The settings of the drawing, as text."""

    @property
    def missing(self) -> list[str]:
        """The rewards that have no score for it."""
        return [name for name, value in self.base.scores.items() if math.isnan(value)]


def draw(
    model: DemoModel,
    prompt: str,
    *,
    seed: int | None = None,
    strength: float = 1.0,
    control: Control = NO_CONTROL,
    images: Sequence[str] = (),
) -> DrawnPrompt:
    """Draws and scores `prompt`, with its input pictures in `images`, as `g2rpo sample` draws its
    first with this seed (None: as evaluations do).

    A held-out prompt is drawn as by the run's evaluations, from the noise of its number. All
    pictures have the steps and the guidance of `control`; the base model draws once more with all
    of it, if there is more. UserError for wrong settings.
    """
    asked, number = model.prompt(prompt, images)
    seed = model.sampler.seed if seed is None else seed
    steps = control.steps or model.sampler.num_steps
    scale = model.policy.guidance_scale if control.guidance is None else control.guidance
    sampler = replace(model.sampler, num_steps=steps, seed=seed)
    rewards = {**model.rewards, **model.judges}
    weights = {name: model.config.rewards[name].weight for name in model.rewards}
    more = control.model_copy(update={"steps": None, "guidance": None})
    if more.best_of > 1 and not weights:
        raise UserError("the best of several pictures needs a reward that chooses it")

    def drawn(name: str, title: str, control: Control = NO_CONTROL, tuned: bool = False) -> Drawn:
        with guided_by(model.policy, scale), nullcontext() if tuned else model.policy.base():
            found = sampler.best([asked], rewards, weights, first=number or 0, control=control)
        return Drawn(name, title, found, control.price(steps), str(control))

    if model.tuned == "adapter":
        model.policy.sampling.scale(strength)
    settings = [
        *([f"held-out prompt {number + 1}"] if number is not None else []),
        f"seed {seed}",
        counted(steps, "step"),
        *([f"guidance {scale:g}"] if model.policy.guidable else []),
        *([f"strength {strength:g}"] if model.tuned == "adapter" else []),
    ]
    return DrawnPrompt(
        model=model,
        prompt=asked,
        base=drawn("base", "Base model"),
        tuned=drawn("tuned", "After training", tuned=True) if model.tuned != "nothing" else None,
        free=drawn("free", "Base model, other sampler settings", more)
        if more != NO_CONTROL
        else None,
        settings=" · ".join(settings),
    )


PAPER_GRANULARITIES = (1, 2, 3)
"""The paper's, to be looked at whatever a run was trained with."""


@dataclass(frozen=True, kw_only=True)
class GroupTrace:
    """One group of one prompt: as an iteration of training does it; pictures, or clips, are in 8
    bit."""

    model: DemoModel
    prompt: str
    plan: Plan
    predictions: Tensor | None
    """[T, 3, H, W], the image as the anchor predicts it at every step; None if members do not start
    from one noise."""
    noised: Tensor
    """[G, 3, H, W], every member just after `noised_at`, decoded as it is."""
    noised_at: int
    """The last stochastic step that is learned from."""
    finals: Tensor
    """[M, G, 3, H, W], every member finished by every tail."""
    rewards: Tensor
    """[R, M, G]; NaN where a picture has no score."""
    advantages: Tensor
    """[G], of rewards as they are."""
    settings: str

    @property
    def order(self) -> list[int]:
        """The members, best first."""
        return self.advantages.argsort(descending=True, stable=True).tolist()

    @property
    def where(self) -> str:
        """The steps at which noise enters."""
        return plan_label(self.plan)

    @property
    def means(self) -> Tensor:
        """Of the members' rewards, [R, M]."""
        return self.rewards.nanmean(-1)

    @property
    def spreads(self) -> Tensor:
        """Their standard deviations, [R, M]."""
        return group_std(self.rewards)

    @property
    def unscored(self) -> list[str]:
        """The rewards that scored nothing."""
        named = zip(self.model.rewards, self.rewards, strict=True)
        return [name for name, values in named if values.isnan().all()]


def own_granularities(model: DemoModel) -> list[int]:
    """Those of the algorithm's first iteration; none if it has none."""
    return sorted({granularity for plan in model.plans for granularity in plan.granularities})


def offered_granularities(model: DemoModel) -> list[int]:
    """Those that may be looked at."""
    own = own_granularities(model)
    return sorted({*own, *PAPER_GRANULARITIES}) if own else []


def trace_group(
    model: DemoModel,
    prompt: str,
    *,
    seed: int | None = None,
    plan: int = 0,
    tuned: bool = False,
    granularities: Collection[int] | None = None,
    images: Sequence[str] = (),
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> GroupTrace:
    """Samples, scores and compares one group for `prompt` by plan number `plan` of the algorithm.

    With a run's own seed and granularities (None) this is what its first iteration did for its
    first prompt. `on_progress(done, total)` counts network evaluations. UserError for wrong input.
    """
    asked, _ = model.prompt(prompt, images)
    key = model.sampler.seed if seed is None else seed
    algorithm, chosen = _group_to_show(model, plan, granularities)
    config, sigmas = model.config, model.sigmas
    s = config.sampling
    total = count_evaluations([chosen], algorithm.group_size, s.tails)
    total += s.num_steps * chosen.shared_noise

    def noise(row: int, *purpose: int | str) -> torch.Generator:
        return generator_for(key, "rollout", 0, row, *purpose)  # the trainer's key

    def shown(latents: Tensor) -> Tensor:
        return decode_reduced(model.policy, latents, model.sizes.decode)

    def sampled() -> GroupTrace:
        engine = Engine(
            policy=model.policy,
            cond=model.policy.encode([asked]),
            sigmas=sigmas,
            batch_size=model.sizes.rollout,
            tails=s.tails,
            precision=config.precision,
            on_rows=lambda rows: on_progress(engine.evaluations, total),
        )
        (rollout,) = engine.rollout([chosen], algorithm.group_size, algorithm.kernel(sigmas), noise)
        predictions = None
        if chosen.shared_noise:
            anchors, end = engine.anchors(range(s.num_steps), noise), sigmas.new_zeros(())
            ends = [ode_step(x, v, sigmas[step], end) for step, (x, v) in anchors.items()]
            predictions = shown(torch.cat(ends))
        scores = score_rollouts(model.policy, [rollout], model.rewards, [asked], model.sizes)
        rewards = of_members(scores, algorithm.group_size)
        against = above_baseline(scores, algorithm.group_size)
        finals = shown(rollout.finals.flatten(0, 1))
        return GroupTrace(
            model=model,
            prompt=asked,
            plan=chosen,
            predictions=predictions,
            noised=shown(rollout.transitions[-1].x_next),
            noised_at=rollout.transitions[-1].step,
            finals=finals.unflatten(0, rollout.finals.shape[:2]),
            rewards=rewards[0],
            advantages=advantages_of(algorithm, against, model.weights)[0],
            settings=f"seed {key} · {s.num_steps} steps · {'after training' if tuned else 'base model'}",
        )

    if model.tuned == "adapter":
        model.policy.sampling.scale(1.0)
    with (
        nullcontext() if tuned else model.policy.base(),
        guided_by(model.policy, s.guidance_scale),
    ):
        return model.sizes.fit(sampled)


def _group_to_show(
    model: DemoModel, plan: int, granularities: Collection[int] | None
) -> tuple[Algorithm, Plan]:
    """The algorithm with these granularities, and its plan of this number; UserError if there is no
    group to compare."""
    algorithm, plans = model.config.algorithm, model.plans
    if granularities is not None and sorted(granularities) != own_granularities(model):
        if not granularities:
            raise UserError(
                f"choose granularities of {', '.join(map(str, offered_granularities(model)))}"
            )
        algorithm = replace(algorithm, granularities=tuple(sorted(granularities)))  # type: ignore[type-var]
        plans = plans_of(algorithm, model.config.sampling.num_steps, 0, model.config.trainer.seed)
    if algorithm.uses_rewards:
        raise UserError(
            "the algorithm learns from the gradient of its rewards: it has no group to compare"
        )
    if plans[plan].branch == plans[plan].merge:
        raise UserError(
            "the algorithm learns from finished pictures: its rollout has no stochastic step to show"
        )
    return algorithm, plans[plan]


def plan_label(plan: Plan) -> str:
    """The steps at which a plan's noise enters."""
    first, last = plan.branch, plan.merge - 1
    return f"step {first}" if first == last else f"steps {first} to {last}"
