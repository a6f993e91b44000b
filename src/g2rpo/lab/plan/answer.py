"""`g2rpo plan`: estimates compute, memory and time of a run before launching it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from g2rpo.lab.plan.fit import fitting
from g2rpo.lab.plan.plan import COUNTED, Estimate, Planner, Target, find_target
from g2rpo.lab.plan.seconds import PlannedSeconds, Reached, reached
from g2rpo.models.catalogue import licence_of
from g2rpo.train.checks import check_quantized

HOURS = (1, 3, 8, 24)
"""Times of which a plan says how many iterations they buy."""


@dataclass(frozen=True)
class Alternative:
    """Overrides with which a run fits, the bytes needed with them, and the time on a card."""

    overrides: list[str]
    needed: int
    seconds: PlannedSeconds | None


@dataclass(frozen=True, kw_only=True)
class PlanAnswer:
    """The answer of `g2rpo plan`. `seconds` are None where no datasheet tells them."""

    recipe: str
    plan: Estimate
    target: Target
    seconds: PlannedSeconds | None
    alternative: Alternative | None
    notes: Sequence[str]

    @property
    def fits(self) -> bool:
        return self.target.holds(self.plan)

    @property
    def licence(self) -> str | None:
        return licence_of(self.plan.config.policy.path, self.plan.config.policy.kind)

    @property
    def reached(self) -> Reached | None:
        """What the run has reached after ten minutes; None if its time is unknown."""
        if self.seconds is None:
            return None
        counts = self.plan.counts
        return reached(self.seconds, counts.iterations, self.plan.config.evaluation)

    @property
    def bought(self) -> dict[int, int]:
        """How many iterations are done, and evaluated, in so many hours; {} if the time is unknown."""
        if self.seconds is None:
            return {}
        length, looks = self.plan.counts.iterations, self.plan.config.evaluation
        return {
            hours: reached(
                self.seconds, length, looks, 3600 * hours - self.seconds.evaluation
            ).iteration
            for hours in HOURS
        }

    def plain(self) -> dict[str, Any]:
        """As plain data: bytes and seconds."""
        plan, shapes, counts = self.plan, self.plan.model.shapes, self.plan.counts
        return {
            "recipe": self.recipe,
            "device": self.target.name,
            "ranks": plan.ranks,
            "parameters": plan.model.parameters,
            "trained_parameters": plan.trained_parameters,
            "image_tokens": shapes.image_tokens,
            "text_tokens": shapes.text_tokens,
            "network_rows_per_evaluation": plan.network_rows,
            "counts": {
                "iterations": counts.iterations,
                "an_iteration": {name: counts.mean(of) for name, of in COUNTED.items()},
                "the_run": {name: counts.total(of) for name, of in COUNTED.items()},
                "evaluations_per_prompt": counts.mean(COUNTED["evaluations"]) / counts.prompts,
                "evaluated": counts.times_evaluated,
                "evaluations_when_evaluated": counts.heldout_evaluations,
                "pictures_when_evaluated": counts.heldout,
                "evaluations_for_diversity": counts.spread,
                "checkpoints": counts.checkpoints,
            },
            "memory": {**asdict(plan.memory), "capacity": self.target.capacity, "fits": self.fits},
            "seconds": asdict(self.seconds) if self.seconds else None,
            "after_ten_minutes": asdict(self.reached) if self.reached else None,
            "iterations_in_hours": self.bought,
            "instead": asdict(self.alternative) if self.alternative else None,
            "notes": list(self.notes),
        }


def plan(
    recipe: str,
    overrides: Sequence[str],
    *,
    device: str | None,
    ranks: int,
    ranks_per_node: int | None,
) -> PlanAnswer:
    """The plan of `recipe` on `ranks` devices, `ranks_per_node` in a machine, and overrides that
    fit if it does not."""
    planner = Planner(recipe, overrides, ranks, ranks_per_node)
    config = planner.config
    target = find_target(device or config.policy.device)
    check_quantized(config)
    result = planner.plan(cuda=target.cuda)
    seconds = result.seconds(target.card) if target.card else None
    alternative = None
    if not target.holds(result) and (extra := fitting(planner, target)) is not None:
        other = planner.plan(*extra, cuda=target.cuda)
        alternative = Alternative(
            extra, other.memory.needed, other.seconds(target.card) if target.card else None
        )
    return PlanAnswer(
        recipe=recipe,
        plan=result,
        target=target,
        seconds=seconds,
        alternative=alternative,
        notes=planner.notes(result),
    )
