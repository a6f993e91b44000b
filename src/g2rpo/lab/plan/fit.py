"""Overrides with which a run fits: into a card's memory, on every card, and into a given time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from g2rpo.assembly.rewards import declared_by, defaults_of, reward_kind
from g2rpo.config.given import is_mention
from g2rpo.config.schema import Config
from g2rpo.core.errors import UserError
from g2rpo.lab.plan.cards import CARDS
from g2rpo.lab.plan.plan import Estimate, Planner, Target, find_target
from g2rpo.policies.quantized import installed
from g2rpo.training.pace import seconds_in

PlanChange = tuple[str, ...]
"""Overrides that belong together."""

WHOLE_SAMPLES = ("trainer.sharding=training",)
PIECES = ("trainer.sharding=full",)


# --- memory ------------------------------------------------------------------------------------------------------------


def same_result(config: Config, ranks: int) -> Iterator[PlanChange]:
    """Changes that cost time or disk but keep the run's mathematics, from the most to the least expensive."""
    numbered = config.sampling.batch_size != "auto"
    if ranks > 1 and config.policy.tuning == "full" and config.trainer.sharding != "full" and numbered:
        yield PIECES
    if config.trainer.shard_group != "all":
        yield ("trainer.shard_group=all",)
    for table in ("rewards", "evaluation.rewards"):  # held-out rewards are called less often
        if on_device := [name for name, options in _options(config, table) if options.get("device", "cpu") != "cpu"]:
            yield tuple(f"{table}.{name}.options.device=cpu" for name in on_device)
    if config.trainer.micro_batch_size > 1:
        yield ("trainer.micro_batch_size=1",)
    if config.sampling.batch_size not in ("auto", *range(9)):
        yield ("sampling.batch_size=8",)
    if config.sampling.decode_batch_size not in ("auto", 1):
        yield ("sampling.decode_batch_size=1",)
    if not config.policy.gradient_checkpointing:
        yield ("policy.gradient_checkpointing=true",)
    if config.prompts.cache == "off":
        yield ("prompts.cache=auto",)


def _options(config: Config, table: str) -> list[tuple[str, dict[str, Any]]]:
    """All options of the rewards of one of the config's two tables; the device is the policy's unless it is named."""
    entries = config.rewards if table == "rewards" else config.evaluation.rewards
    found = []
    for name, entry in entries.items():
        kind = None if is_mention(entry.kind) else reward_kind(name, entry)
        if kind is not None and declared_by(kind) is kind:
            defaults = defaults_of(kind)
            placed = {"device": "auto"} if "device" in defaults else {}
            found.append((name, {**defaults, **placed, **entry.options}))
    return found


def other_method(config: Config) -> Iterator[PlanChange]:
    """Changes of precision or of the trained weights, the mildest first; the first changes nothing."""
    rewards = tuple(
        f"{table}.{name}.options.dtype=bfloat16"
        for table in ("rewards", "evaluation.rewards")
        for name, options in _options(config, table)
        if options.get("dtype") == "float32"
    )
    network = ("policy.dtype=bfloat16",) if config.policy.dtype == "float32" else ()
    whole = () if config.trainer.sharding == "none" else ("trainer.sharding=none", "trainer.shard_group=all")
    low_rank = ("policy.tuning=lora", "optim.learning_rate=1e-4", *whole) if config.policy.tuning == "full" else ()
    fewer_bits = ("int8", "nf4") if installed("bitsandbytes") else ("int8",)
    stored = [()] if config.policy.quantize != "none" else [(), *((f"policy.quantize={how}",) for how in fewer_bits)]
    changes = dict.fromkeys(
        (*tuned, *rounded, *quantised, *judged)
        for tuned, rounded, quantised, judged in product(((), low_rank), ((), network), stored, ((), rewards))
        if not quantised or config.policy.tuning == "lora" or tuned  # full fine-tuning trains weights of full precision
    )
    yield from changes


def what_fits(config: Config, ranks: int, fits: Callable[[Sequence[str]], bool]) -> list[str] | None:
    """The smallest set of the mildest overrides with which a run on `ranks` ranks fits; None if there is none.
    `fits(overrides)` is called a few times.
    """
    for method in other_method(config):
        neutral = [change for change in same_result(config, ranks) if change != PIECES or "policy.tuning=lora" not in method]
        if not fits([*method, *_flat(neutral)]):
            continue
        for change in list(neutral):
            without = [other for other in neutral if other != change]
            if (without or method) and fits([*method, *_flat(without)]):
                neutral = without
        milder = [WHOLE_SAMPLES if change == PIECES else change for change in neutral]
        if milder != neutral and config.trainer.sharding == "none" and fits([*method, *_flat(milder)]):
            neutral = milder
        return [*method, *_flat(neutral)]
    return None


def _flat(changes: Sequence[PlanChange]) -> list[str]:
    return [override for change in changes for override in change]


def fitting(planner: Planner, target: Target) -> list[str] | None:
    """The mildest overrides with which the run fits in the memory of `target`; [] if it does, None if none are known."""

    def fits(more: Sequence[str]) -> bool:
        return target.holds(planner.plan(*more, cuda=target.cuda))

    return [] if fits([]) else what_fits(planner.config, planner.ranks, fits)


@dataclass(frozen=True)
class OnCard:
    """A run on a card, with the overrides by which it fits (None: none do). Bytes and seconds, those of the run as it would be
    there; of the run as it is, where it does not fit."""

    overrides: list[str] | None
    needed: int
    capacity: int
    seconds: float

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.overrides is not None}


def on_cards(recipe: str, overrides: Sequence[str], ranks: int, ranks_per_node: int | None = None) -> dict[str, OnCard]:
    """The run on every card that can compute it."""
    planner = Planner(recipe, overrides, ranks, ranks_per_node)
    rows = {}
    for key, card in CARDS.items():
        if planner.config.policy.quantize == "fp8" and not card.float8:
            continue
        target = find_target(key)
        extra = fitting(planner, target)
        run = planner.plan(*(extra or ()))
        rows[key] = OnCard(extra, run.memory.needed, target.capacity, run.seconds(card).run)
    return rows


# --- time --------------------------------------------------------------------------------------------------------------

FEWEST_ITERATIONS = 40
"""Fewest iterations of a run: an assumption, a third below the shortest `-evening` recipe."""
RELEVANT = 0.98
"""A change that leaves more than this share of the time is not made."""


@dataclass(frozen=True)
class Cut:
    """Overrides, what is known of their cost in worth and its source, and the seconds of the run with all cuts so far."""

    overrides: PlanChange
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
    steps: tuple[Cut, ...]
    overrides: PlanChange
    needed: int
    capacity: int
    seconds: float

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def cuts(plan: Estimate, target: Target) -> Iterator[tuple[PlanChange, str]]:
    """Possible cuts of a run and what they cost in worth, the least first. Those of an algorithm are made where it has such a
    field."""
    config = plan.config
    policy, algorithm, steps = config.policy, config.algorithm, config.sampling.num_steps
    if policy.tuning == "lora" and policy.autocast and policy.dtype == "bfloat16":
        yield ("policy.autocast=false",), "rounding: norms in bfloat16, as diffusers computes them"
    if not policy.compile and config.trainer.sharding == "none":
        yield ("policy.compile=true",), "rounding; not timed on a GPU (docs/performance.md)"
    evaluation, judged = config.evaluation, config.evaluation.num_steps or steps
    fewer = ["evaluation.num_prompts=16"] * (evaluation.num_prompts > 16) + ["evaluation.num_steps=20"] * (judged > 20)
    if fewer:
        yield tuple(fewer), "wider intervals; training is the same"
    if getattr(algorithm, "branch_schedule", "all") == "all" and len(getattr(algorithm, "branch_steps", ())) > 1:
        yield ("algorithm.branch_schedule=turns",), "none in words, within the error in scenes (docs/studies.md)"
    exact = not config.sampling.tails.forecast and config.sampling.tails.solver == "euler"
    if hasattr(algorithm, "granularities") and exact:
        yield ("sampling.tails.forecast=true",), "none: at equal cost .08 more in words, even in scenes (docs/studies.md)"
    if len(getattr(algorithm, "granularities", ())) > 1:
        yield ("algorithm.granularities=[1]",), "none beyond the error, in two worlds (docs/studies.md)"
    if config.trainer.prompts_per_iteration > 4:
        yield ("trainer.prompts_per_iteration=4",), "noisier updates: unknown"
    if hasattr(algorithm, "branch_steps") and steps > 8:
        yield ("sampling.num_steps=8", "algorithm.branch_steps=[0,1,2,3]"), "trained at half the steps: unknown"
    if config.sampling.guidance_scale is None and plan.policy.guided:
        yield ("sampling.guidance_scale=0",), "half the gain on scenes, if judged with guidance (docs/studies.md)"
    if policy.height > 512 or policy.width > 512:
        yield ("policy.height=512", "policy.width=512"), "trained and judged at 512 pixels: unknown"
    if policy.quantize in ("none", "int8") and policy.tuning == "lora" and target.card and target.card.float8:
        yield ("policy.quantize=fp8",), "weights and inputs off by 2.6 % (docs/performance.md); its worth is unknown"


def plan_within(recipe: str, overrides: Sequence[str], time: str, device: str | None) -> Within:
    """Makes cuts until the run takes at most `time`, such as 3h; the last one is the number of iterations,
    at least `FEWEST_ITERATIONS`."""
    limit, planner = seconds_in(time), Planner(recipe, overrides)
    target = find_target(device or planner.config.policy.device)
    card = target.card
    if card is None:
        raise UserError("--within: name a card, such as --device rtx4090; `g2rpo train --within` measures this machine")
    taken = fitting(planner, target)
    if taken is None:
        raise UserError(f"--within: the run does not fit on {target.name}; `g2rpo plan --cards` lists those that hold it")
    plan = planner.plan(*taken)
    before = seconds = plan.seconds(card).run
    steps = [Cut(tuple(taken), "the run does not fit in the card's memory without", before)] if taken else []
    for change, worth in cuts(plan, target):
        if seconds <= limit:
            break
        try:
            tried = planner.plan(*taken, *change)
        except UserError:  # not for this model or algorithm
            continue
        shorter = tried.seconds(card).run
        if target.holds(tried) and shorter < RELEVANT * seconds:
            taken, plan, seconds = [*taken, *change], tried, shorter
            steps.append(Cut(change, worth, seconds))
    if seconds > limit:
        each, every = plan.seconds(card), plan.config.evaluation.every
        iteration = sum(each.iteration.values())
        fits = [
            iterations
            for iterations in range(FEWEST_ITERATIONS, plan.counts.iterations + 1)
            if each.encoding + iterations * iteration + (1 + -(-iterations // every)) * each.evaluation <= limit
        ]
        if not fits:
            hours = (each.run - (plan.counts.iterations - FEWEST_ITERATIONS) * iteration) / 3600
            raise UserError(
                f"--within: nothing fits; the least on {target.name} is {hours:.1f} h for {FEWEST_ITERATIONS} iterations, "
                f"with {' '.join(taken)}"
            )
        length = (f"trainer.iterations={max(fits)}",)
        taken, plan = [*taken, *length], planner.plan(*taken, *length)
        seconds = plan.seconds(card).run
        steps.append(Cut(length, "fewer updates", seconds))
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
