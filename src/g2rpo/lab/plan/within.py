"""Overrides with which a run ends in a given time on a card, the least costly in worth first (`g2rpo plan --within`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from g2rpo.core.errors import UserError
from g2rpo.lab.plan.plan import Estimate, Target, find_target
from g2rpo.lab.plan.planner import Planner
from g2rpo.training.pace import seconds_in

LEAST = 40
"""Fewest iterations of a run: an assumption, a third below the shortest `-evening` recipe."""
RELEVANT = 0.98
"""A change that leaves more than this share of the time is not made."""


@dataclass(frozen=True)
class Cut:
    """Overrides, and what is known of their cost in worth, with its source."""

    overrides: tuple[str, ...]
    worth: str


@dataclass(frozen=True)
class Step:
    """A cut that is made, and the seconds of the run with it and all earlier ones."""

    overrides: tuple[str, ...]
    worth: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Within:
    """The run of `recipe` with `overrides` on `card`: bytes `needed` of its `capacity`, and `seconds`, at most `limit`."""

    recipe: str
    card: str
    limit: float
    before: float
    """Seconds of the run before any cut."""
    steps: tuple[Step, ...]
    overrides: tuple[str, ...]
    needed: int
    capacity: int
    seconds: float

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def cuts(plan: Estimate, target: Target) -> Iterator[Cut]:
    """Possible cuts of a run, the least costly in worth first. Those of an algorithm are made where it has such a field."""
    config = plan.config
    policy, algorithm, steps = config.policy, config.algorithm, config.sampling.num_steps
    if policy.tuning == "lora" and policy.autocast and policy.dtype == "bfloat16":
        yield Cut(("policy.autocast=false",), "rounding: norms in bfloat16, as diffusers computes them")
    if not policy.compile and config.trainer.sharding == "none":
        yield Cut(("policy.compile=true",), "rounding; not timed on a GPU (docs/performance.md)")
    evaluation, judged = config.evaluation, config.evaluation.num_steps or steps
    fewer = ["evaluation.num_prompts=16"] * (evaluation.num_prompts > 16) + ["evaluation.num_steps=20"] * (judged > 20)
    if fewer:
        yield Cut(tuple(fewer), "wider intervals; training is the same")
    if getattr(algorithm, "branch_schedule", "all") == "all" and len(getattr(algorithm, "branch_steps", ())) > 1:
        yield Cut(("algorithm.branch_schedule=turns",), "none in words, within the error in scenes (docs/studies.md)")
    exact = not config.sampling.tails.forecast and config.sampling.tails.solver == "euler"
    if hasattr(algorithm, "granularities") and exact:
        yield Cut(("sampling.tails.forecast=true",), "none: at equal cost .08 more in words, even in scenes (docs/studies.md)")
    if len(getattr(algorithm, "granularities", ())) > 1:
        yield Cut(("algorithm.granularities=[1]",), "none beyond the error, in two worlds (docs/studies.md)")
    if config.trainer.prompts_per_iteration > 4:
        yield Cut(("trainer.prompts_per_iteration=4",), "noisier updates: unknown")
    if hasattr(algorithm, "branch_steps") and steps > 8:
        yield Cut(("sampling.num_steps=8", "algorithm.branch_steps=[0,1,2,3]"), "trained at half the steps: unknown")
    if config.sampling.guidance_scale is None and plan.policy.guided:
        yield Cut(("sampling.guidance_scale=0",), "half the gain on scenes, if judged with guidance (docs/studies.md)")
    if policy.height > 512 or policy.width > 512:
        yield Cut(("policy.height=512", "policy.width=512"), "trained and judged at 512 pixels: unknown")
    if policy.quantize in ("none", "int8") and policy.tuning == "lora" and target.card and target.card.float8:
        yield Cut(("policy.quantize=fp8",), "weights and inputs off by 2.6 % (docs/performance.md); its worth is unknown")


def plan_within(recipe: str, overrides: Sequence[str], time: str, device: str | None) -> Within:
    """Makes cuts until the run takes at most `time`, such as 3h; the last one is the number of iterations, at least `LEAST`."""
    limit, planner = seconds_in(time), Planner(recipe, overrides)
    target = find_target(device or planner.config.policy.device)
    if target.card is None:
        raise UserError("--within: name a card, such as --device rtx4090; `g2rpo train --within` measures this machine")
    taken = planner.fitting(target)
    if taken is None:
        raise UserError(f"--within: the run does not fit on {target.name}; `g2rpo plan --cards` lists those that hold it")
    plan = planner.plan(*taken)
    before = seconds = plan.seconds(target.card).run
    steps = [Step(tuple(taken), "the run does not fit in the card's memory without", before)] if taken else []
    for cut in cuts(plan, target):
        if seconds <= limit:
            break
        try:
            tried = planner.plan(*taken, *cut.overrides)
        except UserError:  # not for this model or algorithm
            continue
        shorter = tried.seconds(target.card).run
        if target.holds(tried) and shorter < RELEVANT * seconds:
            taken, plan, seconds = [*taken, *cut.overrides], tried, shorter
            steps.append(Step(cut.overrides, cut.worth, seconds))
    if seconds > limit:
        fitted = _shortened(plan, target, limit)
        if fitted is None:
            least = plan.seconds(target.card)
            hours = (least.run - (plan.counts.iterations - LEAST) * sum(least.iteration.values())) / 3600
            raise UserError(
                f"--within: nothing fits; the least on {target.name} is {hours:.1f} h for {LEAST} iterations, "
                f"with {' '.join(taken)}"
            )
        length = f"trainer.iterations={fitted}"
        plan, taken = planner.plan(*taken, length), [*taken, length]
        seconds = plan.seconds(target.card).run
        steps.append(Step((length,), "fewer updates", seconds))
    return Within(
        recipe=recipe,
        card=target.name,
        limit=limit,
        before=before,
        steps=tuple(steps),
        overrides=tuple(taken),
        needed=plan.memory.needed,
        capacity=target.capacity,
        seconds=seconds,
    )


def _shortened(plan: Estimate, target: Target, limit: float) -> int | None:
    """The most iterations that end within `limit`, with their evaluations; None if these are fewer than `LEAST`."""
    assert target.card is not None
    seconds, every = plan.seconds(target.card), plan.config.evaluation.every
    each = sum(seconds.iteration.values())

    def needed(iterations: int) -> float:
        return seconds.encoding + iterations * each + (1 + -(-iterations // every)) * seconds.evaluation

    fits = [iterations for iterations in range(LEAST, plan.counts.iterations + 1) if needed(iterations) <= limit]
    return max(fits, default=None)
