"""`g2rpo plan`: estimates compute, memory and time of a run before launching it, and overrides with
which it fits into a card's memory, and on every card."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from g2rpo.config.schema import Config
from g2rpo.core.errors import UserError, refuse
from g2rpo.lab.plan.cards import CARDS
from g2rpo.lab.plan.plan import (
    COUNTS_OF_ITERATION,
    Estimate,
    Planner,
    Target,
    find_target,
    limited_target,
)
from g2rpo.lab.plan.seconds import PlannedSeconds, Reached, reached
from g2rpo.models.catalogue import licence_of
from g2rpo.models.offload import faults_of_places
from g2rpo.models.quantized import installed
from g2rpo.rewards.catalogue import find_reward

RELEVANT_SHARE = 0.98
"""A change that costs something is made where it leaves less than this share."""


@dataclass(frozen=True)
class PlanChange:
    """Overrides that belong together. One that `keeps` the run's mathematics costs time or disk at
    most."""

    overrides: tuple[str, ...]
    keeps: bool = False


Measure = Callable[[Sequence[str]], float]
"""Bytes of the run with overrides; infinite for a run that cannot be."""


def overrides_of(changes: Sequence[PlanChange]) -> list[str]:
    return [override for change in changes for override in change.overrides]


def fewest(changes: Sequence[PlanChange], measure: Measure, limit: float) -> list[str] | None:
    """The overrides of the fewest of the mildest `changes`, which come in this order, with which
    the run is within the limit: [] if it is as it is, None if all are not enough.

    All that keep the mathematics are made at once, for memory has several peaks; then one after the
    other. In the end those are undone that were not needed, the most expensive first.
    """
    least, taken = measure([]), list[PlanChange]()
    if least <= limit:
        return []
    free = [change for change in changes if change.keeps]
    if free:
        least, taken = measure(overrides_of(free)), free
    for change in changes:
        if least <= limit:
            break
        amount = math.inf if change.keeps else measure(overrides_of([*taken, change]))
        if amount < RELEVANT_SHARE * least:
            least, taken = amount, [*taken, change]
    if least > limit:
        return None
    for change in reversed(taken):
        without = [other for other in taken if other is not change]
        if measure(overrides_of(without)) <= limit:
            taken = without
    return overrides_of(taken)


def for_memory(config: Config, ranks: int) -> Iterator[PlanChange]:
    """Changes that need less memory, the mildest first."""
    yield from (PlanChange(tuple(each), keeps=True) for each in _costing_time(config, ranks))
    halved = [
        f"{table}.{name}.options.dtype=bfloat16"
        for table in ("rewards", "evaluation.rewards")
        for name, options in _all_options(config, table)
        if options.get("dtype") == "float32"
    ]
    if halved:
        yield PlanChange(tuple(halved))
    if config.policy.dtype == "float32":
        yield PlanChange(("policy.dtype=bfloat16",))
    if config.policy.tuning == "full":
        whole = ("trainer.sharding=none", "trainer.shard_group=all")
        alone = config.trainer.sharding == "none" and ranks == 1
        low_rank = "policy.tuning=lora", "optim.learning_rate=1e-4"
        yield PlanChange(low_rank if alone else (*low_rank, *whole))
    if config.policy.quantize == "none":  # full fine-tuning trains weights of full precision
        for fewer_bits in ("int8", "nf4") if installed("bitsandbytes") else ("int8",):
            yield PlanChange((f"policy.quantize={fewer_bits}",))


def _costing_time(config: Config, ranks: int) -> Iterator[Sequence[str]]:
    """Changes that cost time or disk, from the least to the most expensive."""
    if config.prompts.cache == "off":
        yield ["prompts.cache=auto"]
    checkpointing = "policy.gradient_checkpointing=true"
    if not config.policy.gradient_checkpointing:
        yield [checkpointing]
    policy = config.policy
    if policy.tuning == "lora" and True not in (policy.offload, policy.compile):
        more = [] if config.policy.gradient_checkpointing else [checkpointing]
        yield ["policy.offload=true", *more]
    if config.sampling.decode_batch_size not in ("auto", 1):
        yield ["sampling.decode_batch_size=1"]
    if config.sampling.batch_size not in ("auto", *range(9)):
        yield ["sampling.batch_size=8"]
    if config.trainer.micro_batch_size > 1:
        yield ["trainer.micro_batch_size=1"]
    for table in ("evaluation.rewards", "rewards"):  # held-out rewards are called less often
        moved = [
            f"{table}.{name}.options.device=cpu"
            for name, options in _all_options(config, table)
            if options.get("device", "cpu") != "cpu"
        ]
        if moved:
            yield moved
    if config.trainer.shard_group != "all":
        yield ["trainer.shard_group=all"]
    if ranks > 1 and config.policy.tuning == "full" and config.sampling.batch_size != "auto":
        modes = ["none", "training", "full"]
        for mode in modes[modes.index(config.trainer.sharding) + 1 :]:
            yield [f"trainer.sharding={mode}"]


def _all_options(config: Config, table: str) -> list[tuple[str, dict[str, Any]]]:
    """All options of the rewards of one of the config's two tables; the device is the policy's
    unless it is named."""
    entries = config.rewards if table == "rewards" else config.evaluation.rewards
    found = []
    for name, entry in entries.items():
        kind = find_reward(f"rewards.{name}", entry)
        if kind.is_reward_class:
            placed = {"device": "auto"} if "device" in kind.defaults else {}
            found.append((name, {**kind.defaults, **placed, **entry.options}))
    return found


def fitting(planner: Planner, target: Target) -> list[str] | None:
    """The mildest overrides with which the run fits in the memory of `target`; [] if it does, None
    if none are known."""

    def needed(overrides: Sequence[str]) -> float:
        try:
            return planner.plan(*overrides, cuda=target.cuda).memory.needed
        except UserError:  # a run that cannot be
            return math.inf

    unsupported = planner.plan(cuda=target.cuda).model.policy.spec.unsupported
    lacking = [*unsupported, *([] if target.cuda else ["policy.offload"])]
    changes = [
        change
        for change in for_memory(planner.config, planner.ranks)
        if not any(name in override for name in lacking for override in change.overrides)
    ]
    return fewest(changes, needed, target.capacity)


@dataclass(frozen=True)
class OnCard:
    """A run on a card, with the overrides by which it fits (None: none do). Bytes and seconds,
    those of the run as it would be there; of the run as it is, where it does not fit."""

    overrides: list[str] | None
    needed: int
    capacity: int
    seconds: float
    notes: tuple[str, ...] = ()
    """What is assumed, and what is not counted."""

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.overrides is not None}


def on_cards(
    recipe: str, overrides: Sequence[str], ranks: int, ranks_per_node: int | None = None
) -> dict[str, OnCard]:
    """The run on every card."""
    planner = Planner(recipe, overrides, ranks, ranks_per_node)
    rows = {}
    for key, card in CARDS.items():
        target = find_target(key)
        extra = fitting(planner, target)
        run = planner.plan(*(extra or ()))
        seconds, notes = run.seconds(card).run, tuple(planner.notes(run))
        rows[key] = OnCard(extra, run.memory.needed, target.capacity, seconds, notes)
    return rows


BOUGHT_HOURS = (1, 3, 8, 24)
"""Times of which a plan says how many iterations they buy."""


@dataclass(frozen=True)
class Alternative:
    """Overrides with which a run fits, the bytes needed with them, and the time on a card."""

    overrides: list[str]
    needed: int
    seconds: PlannedSeconds | None


@dataclass(frozen=True)
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
            for hours in BOUGHT_HOURS
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
                "an_iteration": {name: counts.mean(of) for name, of in COUNTS_OF_ITERATION.items()},
                "the_run": {name: counts.total(of) for name, of in COUNTS_OF_ITERATION.items()},
                "evaluations_per_prompt": counts.mean(COUNTS_OF_ITERATION["evaluations"])
                / counts.prompts,
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
    memory: float | None = None,
    ranks: int,
    ranks_per_node: int | None,
) -> PlanAnswer:
    """The plan of `recipe` on `ranks` devices, `ranks_per_node` in a machine, of whose `memory` it
    takes so many GB, and overrides that fit if it does not."""
    planner = Planner(recipe, overrides, ranks, ranks_per_node)
    policy = planner.config.policy
    target = limited_target(device, memory) if memory else find_target(device or policy.device)
    result = planner.plan(cuda=target.cuda)
    refuse(faults_of_places(policy, result.model.policy.blocks, target.capacity))
    alternative = None
    if not target.holds(result) and (extra := fitting(planner, target)) is not None:
        other = planner.plan(*extra, cuda=target.cuda)
        alternative = Alternative(extra, other.memory.needed, other.seconds_on(target))
    seconds, notes = result.seconds_on(target), planner.notes(result)
    return PlanAnswer(recipe, result, target, seconds, alternative, notes)
