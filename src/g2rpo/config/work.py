"""The cost of a run in network evaluations, the unit of equal budgets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice

from torch import Tensor

from g2rpo.config.schema import Config
from g2rpo.core.contracts import plans_of
from g2rpo.core.errors import UserError
from g2rpo.core.plans import Plan
from g2rpo.rollout.planning import count_evaluations, count_trained, trained_sigmas

TRAINED_LATENT = 3
"""The cost of one latent of a training pass in evaluations: one for the forward pass, two for the
backward pass."""


def work(config: Config, iteration: int, evaluations: int | None = None) -> int:
    """The cost of an iteration (from 0) in network evaluations of one latent.

    A rollout's evaluations, three for each latent of the training pass, and one for each that it
    evaluates without gradient, under the untrained or the old weights. `evaluations` are the
    rollout's if known; beforehand an algorithm may only give an upper bound.
    """
    return _work_of_plans(config, plans_in(config, iteration), evaluations)


def work_of_run(config: Config) -> int:
    """The `work` of all iterations."""
    return sum(islice(_costs(config), config.trainer.iterations))


def work_in_pictures(config: Config) -> float:
    """`work_of_run` in evaluations of judged pictures."""
    trained, judged = (policy.height * policy.width for policy in (config.policy, config.judged))
    return work_of_run(config) * trained / judged


def plans_in(config: Config, iteration: int) -> list[Plan]:
    """The plans of one iteration."""
    return plans_of(config.algorithm, config.sampling.num_steps, iteration, config.trainer.seed)


def trained_sigmas_of(config: Config, sigmas: Tensor) -> list[float]:
    """The sigmas at which a run trains, falling; where they are drawn, the grid's."""
    plans = {
        plan
        for iteration in range(config.trainer.iterations)
        for plan in plans_in(config, iteration)
    }
    return trained_sigmas(config.algorithm, [*plans], sigmas)


def _work_of_plans(config: Config, plans: Sequence[Plan], evaluations: int | None = None) -> int:
    algorithm = config.algorithm
    trained, base = count_trained(algorithm, plans, config.sampling.num_steps)
    prompts = config.trainer.prompts_per_iteration
    if evaluations is None:
        evaluations = prompts * count_evaluations(
            plans, algorithm.group_size, config.sampling.tails
        )
    return evaluations + prompts * (TRAINED_LATENT * trained + base)


MOST_ITERATIONS = 1_000_000
"""The most iterations of a budget."""


def iterations_within(config: Config, evaluations: float) -> int:
    """The most iterations whose `work` stays within `evaluations`; a `UserError` if that is
    none."""
    spent = 0
    for iterations, cost in enumerate(islice(_costs(config), MOST_ITERATIONS + 1)):
        spent += cost
        if spent > evaluations and not iterations:
            raise UserError(
                f"a budget of {evaluations:,.0f} evaluations is below one iteration, which takes {spent:,}"
            )
        if spent > evaluations:
            return iterations
    raise UserError(
        f"a budget of {evaluations:,.0f} evaluations is more than {MOST_ITERATIONS:,} iterations"
    )


def _costs(config: Config) -> Iterator[int]:
    """The `work` of each iteration, without end. Those with the same plans cost the same and are
    counted once: counting one calls the algorithm's loss."""
    known: dict[tuple[Plan, ...], int] = {}
    for iteration in count():
        plans = tuple(plans_in(config, iteration))
        if plans not in known:
            known[plans] = _work_of_plans(config, plans)
        yield known[plans]
