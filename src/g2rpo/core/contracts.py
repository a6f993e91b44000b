"""Checks of what other code computes: what an algorithm returns, whose wrong shape would often
broadcast silently, and numbers that are not finite."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from g2rpo.core.data import Cond, Loss
from g2rpo.core.errors import Stopped, UserError, placed, refuse, shown, where
from g2rpo.core.plans import Plan
from g2rpo.core.types import Algorithm

Fault = tuple[str, str]
"""What a method of an algorithm should return, and what it returned."""


def name_of(algorithm: Algorithm) -> str:
    """An algorithm's name in messages: its class's own `name`, or the class with its file and
    line."""
    kind = type(algorithm)
    if (name := vars(kind).get("name")) is not None:
        return str(name)
    try:
        file, (_, line) = inspect.getsourcefile(kind), inspect.getsourcelines(kind)
    except (OSError, TypeError):
        return kind.__name__
    return f"{kind.__name__} ({file}:{line})"


def plans_of(algorithm: Algorithm, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
    """`algorithm.plans(...)`. UserError for hyper-parameters that do not fit `num_steps`, and for
    plans that cannot be sampled together: none at all, different numbers of tails, tails that do not
    end at `num_steps`, or a baseline in some alone."""
    try:
        with placed("algorithm: "):
            plans = list(algorithm.plans(num_steps, iteration, seed))
    except UserError:
        raise
    except Exception as error:  # anything the user's code raises
        failed = f"algorithm {name_of(algorithm)}: plans failed: {type(error).__name__}: {error}{where(error)}"
        raise UserError(failed) from error
    _refuse_answer(algorithm, "plans", _faults_of_plans(plans, num_steps, iteration))
    return plans


def _faults_of_plans(plans: Sequence[Plan], num_steps: int, iteration: int) -> Iterator[Fault]:
    if not plans:
        yield "at least one Plan", f"none in iteration {iteration}"
    if other := [plan for plan in plans if not isinstance(plan, Plan)]:
        yield "a list of Plan", f"a {type(other[0]).__name__} in it"
    if ends := {plan.tails[0][-1] for plan in plans} - {num_steps}:
        yield f"tails that end at step {num_steps}, the image", f"tails that end at {min(ends)}"
    if len(numbers := {len(plan.tails) for plan in plans}) > 1:
        yield "equally many tails in every Plan", f"numbers of tails {sorted(numbers)}"
    if len({plan.baseline for plan in plans}) > 1:
        yield "a baseline in every Plan or in none", "one in some"


def advantages_of(algorithm: Algorithm, rewards: Tensor, weights: Tensor) -> Tensor:
    """`algorithm.advantages(...)` of rewards [N, R, M, G]. UserError unless it is finite and has
    shape [N, G]."""
    advantages = algorithm.advantages(rewards, weights)
    groups, members = rewards.shape[0], rewards.shape[-1]
    _refuse_answer(algorithm, "advantages", _faults_of_advantages(advantages, (groups, members)))
    return advantages


def _faults_of_advantages(advantages: Any, shape: tuple[int, ...]) -> Iterator[Fault]:
    yield from _faults_of_shape(advantages, shape, "one for each group of all ranks, and member")
    if wrong := int((~advantages.isfinite()).sum()):
        yield (
            "finite numbers (0 for a member whose rewards are NaN)",
            f"{wrong} that are NaN or infinite",
        )


def check_own_advantages(rewards: Tensor, names: Sequence[str], advantages: Tensor) -> None:
    """UserError unless rewards [N, R, M, G] are those of a run's rewards `names`, in whose log they
    would be, and advantages by a rule of one's own are finite and have shape [N, G]."""
    if rewards.shape[1] != len(names):
        raise UserError(
            f"these groups have {rewards.shape[1]} rewards, and an iteration's have {len(names)}: {', '.join(names)}"
        )
    faults = _faults_of_advantages(advantages, (rewards.shape[0], rewards.shape[-1]))
    refuse(f"advantages: needed is {wanted}, got {got}" for wanted, got in faults)


def check_loss(algorithm: Algorithm, loss: Loss, members: int, first: bool) -> None:
    """UserError unless a loss has a value for each of so many members, depends on the weights and,
    in the first update of a rollout, is finite; the network's velocities have to be. For a trial: a
    run has no time for it at every pass."""
    _refuse_answer(algorithm, "loss", _faults_of_loss(loss, members, first))


def _faults_of_loss(loss: Any, members: int, first: bool) -> Iterator[Fault]:
    if not isinstance(loss, Loss):
        yield "a types.Loss", f"a {type(loss).__name__}"
    values = loss.values
    meaning = "one for each member of the batch, before any mean"
    yield from _faults_of_shape(values, (members,), meaning)
    if not values.requires_grad:
        yield "a loss that depends on network.velocity", "one without a gradient"
    wrong = int((~values.isfinite()).sum())
    if first and wrong:
        yield "finite numbers", f"NaN or infinity for {wrong} members"


def _faults_of_shape(value: Any, shape: tuple[int, ...], meaning: str) -> Iterator[Fault]:
    if not isinstance(value, Tensor):
        yield f"a tensor of shape {list(shape)} ({meaning})", f"a {type(value).__name__}"
    if value.shape != shape:
        yield f"shape {list(shape)} ({meaning})", f"shape {list(value.shape)}"


def _refuse_answer(algorithm: Algorithm, method: str, faults: Iterable[Fault]) -> None:
    """UserError with the first of these faults."""
    refuse(
        f"algorithm {name_of(algorithm)}: {method} should return {wanted}, but returned {got}"
        for wanted, got in faults
    )


def all_finite(values: Iterable[Tensor]) -> bool:
    """Whether all numbers of `values` are finite. Waits once for each device."""
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for value in values:
        by_device[value.device].append(value.isfinite().all())
    return all(bool(torch.stack(found).all()) for found in by_device.values())


def finite_rows(*values: Tensor | None) -> Tensor:
    """Which rows [B] hold finite numbers alone in each of `values` [B, ...], on the CPU."""
    given = [value[:, None] for value in values if value is not None]
    rows = [value.flatten(1).isfinite().all(1).cpu() for value in given]
    return torch.stack(rows).all(0)


def check_embeddings(cond: Cond, prompt: str) -> Cond:
    """`cond` of one prompt; `Stopped` if it holds numbers that are not finite."""
    for name, values in real_tensors(cond):
        if not values.isfinite().all():
            raise Stopped(not_finite(f"the text encoder's {name} of {shown(prompt)}", values.dtype))
    return cond


def real_tensors(cond: Cond) -> Iterator[tuple[str, Tensor]]:
    """The tensors of real numbers in `cond`, with names."""
    ragged = [(name, row) for name, rows in cond.ragged.items() for row in rows]
    for name, values in [*cond.tensors.items(), *ragged]:
        if values.is_floating_point():
            yield name, values


def not_finite(what: str, dtype: torch.dtype | None) -> str:
    """A message that says what is not finite, and what helps."""
    name = str(dtype).removeprefix("torch.")
    wider = "compute in float32 (policy.dtype=float32); if it is the same there, its file of weights is damaged"
    damaged = "its file of weights is damaged, or was converted to a dtype in which it overflows; load another one"
    narrow = dtype in (torch.float16, torch.bfloat16)
    computed = "" if dtype is None else f" when computed in {name}"
    return (
        f"{what}: NaN or infinity{computed}, so there is no picture; {wider if narrow else damaged}"
    )
