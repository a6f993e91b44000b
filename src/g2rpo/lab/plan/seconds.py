"""The time of a run on a card, from the rooflines of its calls and a datasheet."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from g2rpo.lab.plan.cards import Card
from g2rpo.lab.plan.kernels import RATES
from g2rpo.train.build import why_not_compiled
from g2rpo.train.run.records import FIRST_LOOK

if TYPE_CHECKING:
    from g2rpo.config.schema import EvaluationConfig
    from g2rpo.lab.plan.counting import CountedIteration
    from g2rpo.lab.plan.plan import Estimate
    from g2rpo.lab.plan.trace import TracedCall

COMPILING = 21.0 + 8.0 + 42.0
"""Seconds of compiling for each kind of block: the graph of rollouts and that of a single row, as
measured for FLUX.1-dev's two kinds (benchmarks/results/gpu_nvidia-h100-80gb-hbm3_2026-11-26.json),
and that of training, forward and backward: twice the first, assumed."""
OPTIMIZER_PASSES = 10
"""Reads and writes of every trained float32: three in clipping, and seven in an AdamW step of one
kernel."""
CORE = 80e9
"""FLOP/s of a CPU's core in rewards: one thread of an AMD EPYC with AVX-512, float32, a ViT-H-14 or
ImageReward: 68 to 84 (benchmarks/rewards_on_cpu.py)."""


@dataclass(frozen=True)
class PlannedSeconds:
    """Seconds by phase of one iteration (on average); of encoding all prompts ahead, and of compiling
    (0: nothing is); of one evaluation; of the run."""

    iteration: dict[str, float]
    encoding: float
    compiling: float
    evaluation: float
    run: float
    basis: str
    """The source of the numbers."""


@dataclass(frozen=True)
class Reached:
    """How many iterations are done at a time, and after which ones it was evaluated: [0] for the
    base, [] if that is not done."""

    iteration: int
    evaluated: list[int]


def reached(
    seconds: PlannedSeconds, iterations: int, looks: EvaluationConfig, within: float = 600.0
) -> Reached:
    """What a run of `iterations` has reached `within` so many seconds, loading aside."""
    once, spent = sum(seconds.iteration.values()), seconds.encoding + seconds.evaluation
    spent += seconds.compiling
    evaluated, since = [0] if spent <= within else [], 0.0
    done = 0
    while evaluated and done < iterations and spent + once <= within:
        done, spent, since = done + 1, spent + once, since + once
        share = FIRST_LOOK if evaluated == [0] else 1
        late = looks.every_minutes is not None and since >= 60 * looks.every_minutes * share
        if late or done % looks.every == 0 or done == iterations:
            spent, since = spent + seconds.evaluation, 0.0
            if spent <= within:
                evaluated.append(done)
    return Reached(done, evaluated)


def planned_seconds(plan: Estimate, card: Card, cores: int) -> PlannedSeconds:
    """The rooflines of all calls, each for its rows, and rewards on `cores` of a CPU; calls are
    compiled with `policy.compile=auto` where that saves more than twice what it takes.

    Not counted: work of the host (preprocessing of rewards, pictures, checkpoints, starting),
    rewards elsewhere.
    """
    plain = _seconds(plan, card, cores)
    if plan.config.policy.compile != "auto" or why_not_compiled(plan.config) is not None:
        return plain
    compiled = _seconds(replace(plan, traced=plan.traced.compiled()), card, cores)
    return compiled if plain.run - compiled.run > compiled.compiling else plain


def _seconds(plan: Estimate, card: Card, cores: int) -> PlannedSeconds:
    config, counts, calls, dtype = plan.config, plan.counts, plan.traced, plan.config.policy.dtype
    known = {name: cost for name, cost in plan.reward_costs.items() if cost is not None}
    costs = {name: cost for name, cost in known.items() if cost.device.startswith("cuda")}
    on_cpu = {name: it.flops for name, it in known.items() if it.device == "cpu" and it.flops}

    def compute(flops: float, dtype: str = dtype) -> float:
        return flops / (RATES.products(card, dtype) * RATES.models)

    def scoring(names: Iterable[str]) -> float:
        on_card = [costs[name] for name in names if name in costs]
        return sum(compute(cost.flops, cost.dtype) for cost in on_card)

    def scoring_on_cpu(names: Iterable[str]) -> float:
        return sum(on_cpu.get(name, 0.0) for name in names) / (CORE * cores)

    @cache
    def velocity(rows: float) -> float:
        return calls.velocity.roofline.call(card, rows=rows / calls.velocity.rows)

    def a_row(call: TracedCall) -> float:
        return call.roofline.call(card) / call.rows

    training_row, picture = a_row(calls.training), a_row(calls.decode)
    ahead = math.ceil(plan.distinct_prompts / plan.ranks) if config.prompts.cache != "off" else 0
    # two with a negative prompt
    limit, rows = plan.model.policy.max_sequence_length, plan.model.shapes.rows
    encoding = compute(
        sum(2.0 * it.parameters * min(it.longest, limit) for it in plan.model.encoders) * rows
    )
    prompt = 0.0 if ahead else encoding
    step = OPTIMIZER_PASSES * sum(p.nbytes for p in plan.model.trained) / RATES.moved(card)

    def update(iteration: CountedIteration) -> float:
        without = iteration.unguided_reference * (1 - 1 / plan.network_rows)
        reference = (iteration.reference_rows - without) * a_row(calls.velocity)
        return iteration.training_rows * training_row + reference + iteration.optimizer_steps * step

    def rollout(iteration: CountedIteration) -> float:
        guided = sum(map(velocity, iteration.calls)) - sum(map(velocity, iteration.unguided))
        return guided + sum(velocity(rows / plan.network_rows) for rows in iteration.unguided)

    images, sampled = counts.mean(lambda it: it.images), counts.mean(rollout)
    # on the CPU they are scored meanwhile
    late = max(0.0, images * scoring_on_cpu(config.rewards) - sampled)
    iteration = {
        **({"encode": counts.prompts * prompt} if prompt else {}),
        "rollout": sampled,
        "decode": images * picture,
        "rewards": images * scoring(config.rewards) + late,
        "update": counts.mean(update),
    }
    evaluation = counts.heldout_evaluations * a_row(calls.heldout)
    evaluation += counts.heldout * (
        prompt + a_row(calls.judged) + scoring(costs) + scoring_on_cpu(on_cpu)
    )
    reached = RATES.products(card, dtype) / 1e12
    rate = f"{reached:.0f} of {card.tflops(dtype):g} TFLOP/s in {dtype}, {card.bandwidth:g} GB/s"
    kinds = {type(block) for block in plan.model.policy.blocks}
    compiling = len(kinds) * COMPILING if calls.velocity.roofline.compiled else 0.0
    once = counts.iterations * sum(iteration.values()) + ahead * encoding + compiling
    run = once + counts.looks * evaluation
    basis = f"{card.name} by roofline: {rate}"
    if on_cpu:
        basis += f"; {', '.join(on_cpu)} on {cores} cores of {CORE / 1e9:g} GFLOP/s (assumed)"
    if calls.velocity.roofline.streamed:
        basis += f"; blocks come at {card.link:g} GB/s (assumed)" + "".join(
            f", {call.roofline.copies(card):.2g} s of copies in a {name} of {call.roofline.call(card):.2g} s"
            for name, call in (("call", calls.velocity), ("training pass", calls.training))
        )
    return PlannedSeconds(iteration, ahead * encoding, compiling, evaluation, run, basis)
