"""Overrides with which a run fits: into a card's memory, on every card, and into a given time."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from g2rpo.assembly.rewards import declared_by, defaults_of, reward_kind
from g2rpo.config.given import is_mention
from g2rpo.config.schema import Config
from g2rpo.core.errors import UserError
from g2rpo.core.intervals import in_time
from g2rpo.lab.plan.cards import Card, cards_for
from g2rpo.lab.plan.plan import Estimate, Planner, Target, find_target, nodes_of, target_of
from g2rpo.policies.quantized import installed
from g2rpo.training.pace import seconds_in

RELEVANT = 0.98
"""A change that costs something is made where it leaves less than this share."""
FEWEST_PROMPTS = 4
"""Fewest prompts of an iteration."""
FEWEST_ITERATIONS = 40
"""Fewest iterations of a run: an assumption, a third below the shortest `-evening` recipe."""


@dataclass(frozen=True)
class PlanChange:
    """Overrides that belong together, and what is known of their cost. One that `keeps` the run's
    mathematics costs time or disk at most."""

    overrides: tuple[str, ...]
    worth: str = ""
    keeps: bool = False


Measure = Callable[[Sequence[str]], float]
"""Bytes or seconds of the run with overrides; infinite for a run that cannot be."""


def overrides_of(changes: Sequence[PlanChange]) -> list[str]:
    return [override for change in changes for override in change.overrides]


def fewest(
    changes: Sequence[PlanChange], measure: Measure, limit: float
) -> tuple[list[PlanChange], bool]:
    """The fewest of the mildest `changes`, which come in this order, with which the run is within
    the limit; and whether it is.

    All that keep the mathematics are made at once, for memory has several peaks; then one after the
    other. In the end those are undone that were not needed, the most expensive first.
    """
    least, taken = measure([]), list[PlanChange]()
    if least <= limit:
        return taken, True
    free = [change for change in changes if change.keeps]
    if free:
        least, taken = measure(overrides_of(free)), free
    for change in changes:
        if least <= limit:
            break
        amount = math.inf if change.keeps else measure(overrides_of([*taken, change]))
        if amount < RELEVANT * least:
            least, taken = amount, [*taken, change]
    if least > limit:
        return taken, False
    for change in reversed(taken):
        without = [other for other in taken if other is not change]
        if measure(overrides_of(without)) <= limit:
            taken = without
    return taken, True


# --- memory ---------------------------------------------------------------------------------------


def for_memory(config: Config, ranks: int) -> Iterator[PlanChange]:
    """Changes that need less memory, the mildest first."""
    yield from (PlanChange(tuple(each), keeps=True) for each in _free(config, ranks))
    halved = [
        f"{table}.{name}.options.dtype=bfloat16"
        for table in ("rewards", "evaluation.rewards")
        for name, options in _options(config, table)
        if options.get("dtype") == "float32"
    ]
    if halved:
        yield PlanChange(tuple(halved))
    if config.policy.dtype == "float32":
        yield PlanChange(("policy.dtype=bfloat16",))
    whole = (
        []
        if config.trainer.sharding == "none" and ranks == 1
        else ["trainer.sharding=none", "trainer.shard_group=all"]
    )
    if config.policy.tuning == "full":
        yield PlanChange(("policy.tuning=lora", "optim.learning_rate=1e-4", *whole))
    if config.policy.quantize == "none":  # full fine-tuning trains weights of full precision
        for fewer_bits in ("int8", "nf4") if installed("bitsandbytes") else ("int8",):
            yield PlanChange((f"policy.quantize={fewer_bits}",))


def _free(config: Config, ranks: int) -> Iterator[Sequence[str]]:
    """Changes that cost time or disk, from the least to the most expensive."""
    if config.prompts.cache == "off":
        yield ["prompts.cache=auto"]
    if not config.policy.gradient_checkpointing:
        yield ["policy.gradient_checkpointing=true"]
    if config.sampling.decode_batch_size not in ("auto", 1):
        yield ["sampling.decode_batch_size=1"]
    if config.sampling.batch_size not in ("auto", *range(9)):
        yield ["sampling.batch_size=8"]
    if config.trainer.micro_batch_size > 1:
        yield ["trainer.micro_batch_size=1"]
    for table in ("evaluation.rewards", "rewards"):  # held-out rewards are called less often
        if on_device := [
            name
            for name, options in _options(config, table)
            if options.get("device", "cpu") != "cpu"
        ]:
            yield [f"{table}.{name}.options.device=cpu" for name in on_device]
    if config.trainer.shard_group != "all":
        yield ["trainer.shard_group=all"]
    if ranks > 1 and config.policy.tuning == "full" and config.sampling.batch_size != "auto":
        modes = ["none", "training", "full"]
        yield from (
            [f"trainer.sharding={mode}"]
            for mode in modes[modes.index(config.trainer.sharding) + 1 :]
        )


def _options(config: Config, table: str) -> list[tuple[str, dict[str, Any]]]:
    """All options of the rewards of one of the config's two tables; the device is the policy's
    unless it is named."""
    entries = config.rewards if table == "rewards" else config.evaluation.rewards
    found = []
    for name, entry in entries.items():
        kind = None if is_mention(entry.kind) else reward_kind(name, entry)
        if kind is not None and declared_by(kind) is kind:
            defaults = defaults_of(kind)
            placed = {"device": "auto"} if "device" in defaults else {}
            found.append((name, {**defaults, **placed, **entry.options}))
    return found


def fitting(planner: Planner, target: Target) -> list[str] | None:
    """The mildest overrides with which the run fits in the memory of `target`; [] if it does, None
    if none are known."""

    def needed(overrides: Sequence[str]) -> float:
        plan = planner.tried(overrides, cuda=target.cuda)
        return math.inf if plan is None else plan.memory.needed

    taken, fits = fewest(list(for_memory(planner.config, planner.ranks)), needed, target.capacity)
    return overrides_of(taken) if fits else None


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
    """The run on every card that can compute it."""
    planner = Planner(recipe, overrides, ranks, ranks_per_node)
    rows = {}
    for key, card in cards_for(planner.config.policy.quantize).items():
        target = find_target(key)
        extra = fitting(planner, target)
        run = planner.plan(*(extra or ()))
        seconds, notes = run.seconds(card).run, tuple(planner.notes(run))
        rows[key] = OnCard(extra, run.memory.needed, target.capacity, seconds, notes)
    return rows


# --- time -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """Overrides, what is known of their cost in worth and its source, and the seconds of the run
    with all cuts so far."""

    overrides: tuple[str, ...]
    worth: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Within:
    """The run of `recipe` with `overrides` on `card`, or on one of `ranks` such cards each,
    `ranks_per_node` in a machine: bytes `needed` of its `capacity`, and `seconds`, at most
    `limit`."""

    recipe: str
    card: str
    limit: float
    before: float
    """Seconds of the run before any cut."""
    steps: tuple[Cut, ...]
    overrides: tuple[str, ...]
    needed: int
    capacity: int
    seconds: float
    ranks: int = 1
    ranks_per_node: int = 1
    notes: tuple[str, ...] = ()
    """What is assumed, and what is not counted."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def for_time(plan: Estimate, target: Target) -> Iterator[PlanChange]:
    """Possible cuts of a run and what they cost in worth, the least first. Those of an algorithm
    are made where it has such a field."""
    config = plan.config
    policy, algorithm, sampling = config.policy, config.algorithm, config.sampling
    evaluation, lora = config.evaluation, config.policy.tuning == "lora"
    granularities = len(getattr(algorithm, "granularities", ()))
    if lora and policy.autocast and policy.dtype == "bfloat16":
        yield PlanChange(
            ("policy.autocast=false",), "rounding: norms in bfloat16, as diffusers computes them"
        )
    if not policy.compile and config.trainer.sharding == "none":
        yield PlanChange(("policy.compile=true",), "rounding (docs/performance.md)")
    fewer = []
    if evaluation.num_prompts > 16:
        fewer.append("evaluation.num_prompts=16")
    if (evaluation.num_steps or sampling.num_steps) > 20:
        fewer.append("evaluation.num_steps=20")
    if fewer:
        yield PlanChange(tuple(fewer), "wider intervals; training is the same")
    schedule = getattr(algorithm, "branch_schedule", None)
    if schedule == "all" and len(getattr(algorithm, "branch_steps", ())) > 1:
        yield PlanChange(
            ("algorithm.branch_schedule=turns",),
            "none in words, within the error in scenes (studies/registered.md)",
        )
    if granularities and not sampling.tails.forecast and sampling.tails.solver == "euler":
        yield PlanChange(
            ("sampling.tails.forecast=true",),
            "none: at equal cost .08 more in words, even in scenes (studies/registered.md)",
        )
    if granularities > 1:
        yield PlanChange(
            ("algorithm.granularities=[1]",),
            "none beyond the error, in two worlds (studies/registered.md)",
        )
    fewest_prompts = math.ceil(FEWEST_PROMPTS / plan.ranks)  # of a rank, as in its config
    if config.trainer.prompts_per_iteration > fewest_prompts:
        prompts = fewest_prompts * plan.ranks
        yield PlanChange((f"trainer.prompts_per_iteration={prompts}",), "noisier updates: unknown")
    if hasattr(algorithm, "branch_steps") and sampling.num_steps > 8:
        yield PlanChange(
            ("sampling.num_steps=8", "algorithm.branch_steps=[0,1,2,3]"),
            "trained at half the steps: unknown",
        )
    if sampling.guidance_scale is None and plan.model.policy.guided:
        yield PlanChange(
            ("sampling.guidance_scale=0",),
            "half the gain on scenes, if judged with guidance (studies/registered.md)",
        )
    if policy.height > 512 or policy.width > 512:
        yield PlanChange(
            ("policy.height=512", "policy.width=512"),
            "trained and judged at 512 pixels: unknown",
        )
    if lora and policy.quantize in ("none", "int8") and target.card and target.card.float8:
        yield PlanChange(
            ("policy.quantize=fp8",),
            "weights and inputs off by 2.6 % (docs/performance.md); its worth is unknown",
        )


def plan_within(
    recipe: str,
    overrides: Sequence[str],
    time: str,
    device: str | None,
    ranks: int = 1,
    ranks_per_node: int | None = None,
) -> Within:
    """Makes cuts until the run takes at most `time`, such as 3h; the last one is the number of
    iterations, at least `FEWEST_ITERATIONS`."""
    limit, planner = seconds_in(time), Planner(recipe, overrides, ranks, ranks_per_node)
    target = target_of(planner.config, device)
    if target.card is None:
        raise UserError(
            "--within: name a card, such as --device rtx4090; `g2rpo train --within` measures this machine"
        )
    card: Card = target.card
    fitted = fitting(planner, target)
    if fitted is None:
        raise UserError(
            f"--within: the run does not fit on {target.name}; `g2rpo plan --cards` lists those that hold it"
        )

    def seconds(more: Sequence[str]) -> float:
        plan = planner.tried([*fitted, *more])
        return plan.seconds(card).run if plan is not None and target.holds(plan) else math.inf

    first = PlanChange(tuple(fitted), "the run does not fit in the card's memory without")
    cuts, short_enough = fewest(list(for_time(planner.plan(*fitted), target)), seconds, limit)
    if not short_enough:
        shorter = overrides_of(cuts)
        most = planner.plan(*fitted, *shorter).counts.iterations
        lengths = range(min(FEWEST_ITERATIONS, most), most + 1)

        def of_length(iterations: int) -> float:
            return seconds([*shorter, f"trainer.iterations={iterations}"])

        fits = bisect_right(lengths, limit, key=of_length)
        if not fits:
            least, changed = lengths[0], " ".join([*fitted, *shorter])
            raise UserError(
                f"--within: nothing fits; the least on {card.name} is {in_time(of_length(least))} "
                f"for {least} iterations, with {changed}"
            )
        longest = f"trainer.iterations={lengths[fits - 1]}"
        cuts.append(PlanChange((longest,), "fewer updates"))
    steps = [Cut(first.overrides, first.worth, seconds([]))] if fitted else []
    steps += [
        Cut(cut.overrides, cut.worth, seconds(overrides_of(cuts[: n + 1])))
        for n, cut in enumerate(cuts)
    ]
    taken = (*fitted, *overrides_of(cuts))
    plan = planner.plan(*taken)
    return Within(
        recipe=recipe,
        card=target.name,
        limit=limit,
        before=seconds([]),
        steps=tuple(steps),
        overrides=taken,
        needed=plan.memory.needed,
        capacity=target.capacity,
        seconds=plan.seconds(card).run,
        ranks=ranks,
        ranks_per_node=nodes_of(ranks, ranks_per_node),
        notes=tuple(planner.notes(plan)),
    )
