"""Fits a run to a given time (`g2rpo train --within`)."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence

from g2rpo.config.schema import Config
from g2rpo.core.capabilities import judged_by
from g2rpo.core.errors import UserError
from g2rpo.evaluation.work import plans_in, work

MEASURED = 3
"""Iterations after which a run is fitted for the first time."""
EVALUATIONS = 3
"""Evaluations of a fitted run, beside the base model's."""
TIMED_PROMPTS = 8
"""Held-out prompts on which an evaluation is timed before a run begins."""
FEWEST_PROMPTS = 16
"""The fewest held-out prompts that a fitted run is evaluated on, unless it has fewer."""
EVALUATED = 0.3
"""The share of a given time for all evaluations, as planned before the run begins."""
LEEWAY = 1.1
"""The shortest time that is named is so many times what was measured, so that it is enough."""
UNITS = {"s": 1, "m": 60, "h": 3600}


def seconds_in(text: str) -> float:
    """5400 of "90m", "1.5h" or "5400s"; UserError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if found is None or not float(found[1]):
        raise UserError(f"--within {text}: should be a time like 45s, 90m or 3h")
    return float(found[1]) * UNITS[found[2]]


def planned(
    config: Config,
    row: float,
    picture: float,
    look: float,
    heldout: int,
    left: float,
    pairs: float = 0.0,
    spent: float = 0.0,
) -> Config:
    """`config` for a run of `left` seconds, of which a network evaluation of one latent takes `row`
    seconds, decoding and scoring a picture `picture` seconds, a held-out prompt `look` seconds and
    all held-out pairs or marks `pairs` seconds: with an estimated number of iterations, and with
    fewer than the `heldout` prompts where evaluations would take more than their share. UserError
    with the least time, with that already `spent`, if not even one iteration fits."""
    plans, group = plans_in(config, 0), config.algorithm.group_size
    each = sum(len(plan.tails) * (group + plan.baseline) for plan in plans)
    if judged_by(config.algorithm) is not None:  # pictures from files, which no reward scores
        each = 0
    pictures = config.trainer.prompts_per_iteration * each
    iteration = work(config, 0) * row + pictures * picture
    fewest = min(FEWEST_PROMPTS, heldout)
    least = iteration + 2 * (fewest * look + pairs)
    if least > left:
        enough = math.ceil(LEEWAY * (spent + least))
        beside = " and held-out pairs" if pairs else ""
        raise UserError(
            f"--within {spent + left:.0f}s: too short; give {enough}s or more, of which starting took "
            f"{spent:.0f} s, an iteration takes {iteration:.1f} s, and {fewest} prompts{beside} by base and tuned model "
            f"{least - iteration:.1f} s; or lower trainer.prompts_per_iteration, algorithm.group_size or sampling.num_steps"
        )
    for looks in range(1 + EVALUATIONS, 1, -1):
        prompts = min(heldout, int((EVALUATED * left / looks - pairs) / look))
        if prompts >= min(heldout, 4 * FEWEST_PROMPTS):
            break
    prompts = max(fewest, prompts)
    # fitted before it ends
    iterations = max(MEASURED + 1, int((left - looks * (prompts * look + pairs)) / iteration))
    evaluation = config.evaluation.model_copy(update={"num_prompts": prompts})
    return with_length(
        config.model_copy(update={"evaluation": evaluation}),
        iterations,
        math.ceil(iterations / (looks - 1)),
    )


def fitted_length(
    config: Config,
    done: int,
    train: Sequence[float],
    look: float,
    left: float,
    first: bool,
    evaluated: bool = False,
    save: float = 0.0,
) -> Config:
    """`config` with as many iterations as fit into the `left` seconds, given that an iteration took
    `train`, an evaluation `look` and a checkpoint `save` seconds; at least those that are `done`,
    after which the model was `evaluated` or may have to be. The `first` fit also spreads
    evaluations over them."""
    trainer = config.trainer
    per = statistics.median(train[1:][-10:] or train)
    spread = min(EVALUATIONS, math.ceil(config.trainer.iterations / config.evaluation.every))

    def every(iterations: int) -> int:
        return math.ceil(iterations / spread) if first else config.evaluation.every

    def needed(iterations: int) -> float:
        before = (done if evaluated else done - 1) // every(iterations)
        looks = math.ceil(iterations / every(iterations)) - before
        training = (iterations - done) * per
        saves = math.ceil(iterations / trainer.checkpoint_every)
        saves -= (done - 1) // trainer.checkpoint_every
        if trainer.checkpoint_minutes is not None:
            saves += math.floor(training / (60 * trainer.checkpoint_minutes))
        return training + looks * look + saves * save

    iterations = done + max(0, math.floor(left / per))
    while iterations > done and needed(iterations) > left:
        iterations -= 1
    return with_length(config, iterations, every(iterations))


def with_length(config: Config, iterations: int, every: int) -> Config:
    """`config` with this number of iterations, and an evaluation `every` so many iterations."""
    trainer = config.trainer.model_copy(update={"iterations": iterations})
    evaluation = config.evaluation.model_copy(update={"every": every})
    return config.model_copy(update={"trainer": trainer, "evaluation": evaluation})
