"""Optional protocols of algorithms beyond `types.Algorithm`. A class that defines the members of one has that capability.

The functions accept any algorithm and return a default for those without the capability.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from g2rpo.core.errors import UserError
from g2rpo.core.types import Algorithm, AlgorithmState, Batch, Network


@runtime_checkable
class Stateful(Protocol):
    """The algorithm has state across iterations (AdaGRPO's averages)."""

    def memory(self) -> AlgorithmState:
        """The state of a new run."""
        ...


@runtime_checkable
class ChoosesPrompts(Stateful, Protocol):
    """Several prompts are drawn for each place of an iteration; the state, a `types.PromptChooser`, chooses one (AdaGRPO)."""

    candidates: int


@runtime_checkable
class KeepsOldWeights(Protocol):
    """The run keeps old weights, which follow the trained ones after each iteration, for `Network.old_velocity` (AWM, DGPO,
    DiffusionNFT)."""

    uses_old: bool
    """Whether old weights are used with these hyper-parameters."""

    def old_decay(self, updates: int) -> float:
        """The decay d in [0, 1] of old <- d old + (1 - d) trained, after the iteration that ends at optimizer step
        `updates`."""
        ...

    def samples_old(self, updates: int) -> bool:
        """Whether the old weights sample the iteration that begins after `updates` optimizer steps."""
        ...


@runtime_checkable
class SumsGroups(Protocol):
    """The loss needs sums over whole groups, in `data["group_sum"]`; a pass may hold only a part of a group (DGPO)."""

    def group_term(self, batch: Batch, network: Network) -> Tensor:
        """The summand of each member of a batch, [B]; computed without gradient before the first update of a rollout."""
        ...


@runtime_checkable
class DifferentiatesRewards(Protocol):
    """The loss calls `Network.reward`; all trained rewards then have to be differentiable (ReFL)."""

    uses_rewards: bool


@runtime_checkable
class DropsMembers(Protocol):
    """Members without any advantage may be left out of an update's mean, and so of the KL term (Flow-GRPO)."""

    drop_zero_advantages: bool


@runtime_checkable
class FitsGrids(Protocol):
    """The published values are for one number of steps (E-GRPO, ReFL)."""

    def fitted(self, num_steps: int) -> dict[str, Any]:
        """The fields that a grid of so many steps needs otherwise; empty where the published ones fit."""
        ...


@runtime_checkable
class LimitsDrift(Protocol):
    """Log-probs of rollout and training pass are compared (`algorithms.policy_gradient`)."""

    def drift_limit(self, sigmas: Tensor, steps: Sequence[int], entries: int, rounding: float) -> float:
        """The largest `log_prob_drift` that a relative difference `rounding` of velocities can cause at the stochastic
        `steps`, for latents with `entries` numbers."""
        ...


def check_complete(algorithm: Algorithm) -> None:
    """UserError if an algorithm defines only some members of a capability: it would silently not have it."""
    kind = type(algorithm).__name__
    if getattr(algorithm, "uses_old", False) and not isinstance(algorithm, KeepsOldWeights):
        raise UserError(f"algorithm {kind}: with uses_old it needs old_decay and samples_old (capabilities.KeepsOldWeights)")
    if getattr(algorithm, "candidates", 1) > 1 and not isinstance(algorithm, ChoosesPrompts):
        raise UserError(f"algorithm {kind}: with candidates it needs memory (capabilities.ChoosesPrompts)")


def state_of(algorithm: Algorithm) -> AlgorithmState | None:
    """The state of a new run."""
    return algorithm.memory() if isinstance(algorithm, Stateful) else None


def candidates_of(algorithm: Algorithm) -> int:
    """How many prompts are drawn for each place of an iteration."""
    return algorithm.candidates if isinstance(algorithm, ChoosesPrompts) else 1


def keeps_old(algorithm: Algorithm) -> bool:
    """Whether the run keeps old weights."""
    return isinstance(algorithm, KeepsOldWeights) and algorithm.uses_old


def differentiates_rewards(algorithm: Algorithm) -> bool:
    """Whether the loss needs the gradient of rewards."""
    return isinstance(algorithm, DifferentiatesRewards) and algorithm.uses_rewards


def drops_members(algorithm: Algorithm) -> bool:
    """Whether members without any advantage are left out of an update's mean."""
    return isinstance(algorithm, DropsMembers) and algorithm.drop_zero_advantages


def drift_limit_of(algorithm: Algorithm, sigmas: Tensor, steps: Sequence[int], entries: int, rounding: float) -> float:
    """The limit of `LimitsDrift`; infinite for algorithms without log-probs."""
    return algorithm.drift_limit(sigmas, steps, entries, rounding) if isinstance(algorithm, LimitsDrift) else math.inf
