"""What an algorithm must return, checked where it is called.

A wrong shape would often broadcast: training would go on, on other numbers than the algorithm meant.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from g2rpo.errors import UserError
from g2rpo.types import Algorithm, Plan, Steps


def name_of(algorithm: Algorithm) -> str:
    """What messages call an algorithm: its `name`, else its class's."""
    return str(getattr(algorithm, "name", "") or type(algorithm).__name__)


def plans_of(algorithm: Algorithm, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
    """`algorithm.plans(...)`. UserError for hyper-parameters that do not fit `num_steps`, and for plans that cannot be sampled
    together: none at all, different numbers of tails, or tails that do not end at `num_steps`."""
    try:
        plans = list(algorithm.plans(num_steps, iteration, seed))
    except ValueError as error:
        raise UserError(f"algorithm: {error}") from None
    if not plans:
        raise _broken(algorithm, "plans", "at least one Plan", f"none in iteration {iteration}")
    if ends := {plan.tails[0][-1] for plan in plans} - {num_steps}:
        raise _broken(algorithm, "plans", f"tails that end at step {num_steps}, the image", f"tails that end at {min(ends)}")
    if len(numbers := {len(plan.tails) for plan in plans}) > 1:
        raise _broken(algorithm, "plans", "equally many tails in every Plan", f"numbers of tails {sorted(numbers)}")
    return plans


def advantages_of(algorithm: Algorithm, rewards: Tensor, weights: Tensor) -> Tensor:
    """`algorithm.advantages(...)` of rewards [N, R, M, G]. UserError unless it is finite and has shape [N, G]."""
    advantages = algorithm.advantages(rewards, weights)
    groups, members = rewards.shape[0], rewards.shape[-1]
    _check_shape(algorithm, "advantages", advantages, (groups, members), "one for each group and member")
    if not bool(advantages.isfinite().all()):
        wanted = "finite numbers (0 for a member whose rewards are NaN)"
        raise _broken(algorithm, "advantages", wanted, f"{int((~advantages.isfinite()).sum())} that are NaN or infinite")
    return advantages


def log_ratio_of(algorithm: Algorithm, steps: Steps) -> Tensor:
    """`algorithm.log_ratio(steps)`. UserError unless it has shape [B]."""
    log_ratio = algorithm.log_ratio(steps)
    _check_shape(algorithm, "log_ratio", log_ratio, steps.log_prob.shape, "one for each step")
    return log_ratio


def loss_of(algorithm: Algorithm, steps: Steps, on_policy: bool) -> Tensor:
    """`algorithm.loss(steps)`. UserError unless it has shape [B], depends on the weights and, `on_policy`, is finite.

    After the first update of an iteration a ratio may overflow; such an update is skipped and counted (`update.Updater`).
    """
    loss = algorithm.loss(steps)
    _check_shape(algorithm, "loss", loss, steps.log_prob.shape, "one for each step, before any mean")
    if not loss.requires_grad:
        raise _broken(algorithm, "loss", "a loss that depends on steps.log_prob", "one without a gradient")
    if on_policy and bool(steps.log_prob.isfinite().all()) and not bool(loss.isfinite().all()):
        raise _broken(algorithm, "loss", "finite numbers", f"NaN or infinity for {int((~loss.isfinite()).sum())} steps")
    return loss


def _check_shape(algorithm: Algorithm, method: str, value: Any, shape: tuple[int, ...], meaning: str) -> None:
    if not isinstance(value, Tensor):
        raise _broken(algorithm, method, f"a tensor of shape {list(shape)} ({meaning})", f"a {type(value).__name__}")
    if value.shape != shape:
        raise _broken(algorithm, method, f"shape {list(shape)} ({meaning})", f"shape {list(value.shape)}")


def _broken(algorithm: Algorithm, method: str, wanted: str, got: str) -> UserError:
    return UserError(f"algorithm {name_of(algorithm)}: {method} should return {wanted}, but returned {got}")
