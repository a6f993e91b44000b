"""What some algorithms ask of a run beyond `types.Algorithm`: a class that has the members of one of these has it.

The functions answer for any algorithm, with what holds for those without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from g2rpo.core.errors import UserError
from g2rpo.core.types import Algorithm, AlgorithmState, Batch, Network


@runtime_checkable
class Stateful(Protocol):
    """Something is kept from one iteration to the next (AdaGRPO's averages)."""

    def memory(self) -> AlgorithmState:
        """The state of a new run."""
        ...


@runtime_checkable
class ChoosesPrompts(Stateful, Protocol):
    """Several prompts are drawn for each place of an iteration, and the state, a `types.PromptChooser`, takes one (AdaGRPO)."""

    candidates: int


@runtime_checkable
class KeepsOldWeights(Protocol):
    """The run keeps old weights, which follow the trained ones after each iteration, for `Network.old_velocity` (AWM, DGPO,
    DiffusionNFT)."""

    uses_old: bool
    """Whether it does with these hyper-parameters."""

    def old_decay(self, updates: int) -> float:
        """What the old weights keep of themselves after an iteration, `updates` optimizer steps into the run, in [0, 1]."""
        ...

    def samples_old(self, updates: int) -> bool:
        """Whether the old weights sample the iteration that begins after `updates` optimizer steps."""
        ...


@runtime_checkable
class SumsGroups(Protocol):
    """The loss needs sums over whole groups, of which a pass may have a part: `data["group_sum"]` (DGPO)."""

    def group_term(self, batch: Batch, network: Network) -> Tensor:
        """A number of each member of a batch, [B], taken without gradient before the first update of a rollout."""
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
class LimitsDrift(Protocol):
    """Log-probs of rollout and training pass are compared (`algorithms.policy_gradient`)."""

    def drift_limit(self, sigmas: Tensor, steps: Sequence[int], entries: int, rounding: float) -> float:
        """The largest `log_prob_drift` that velocities explain which differ by `rounding`, relative to their size, for the
        stochastic `steps` of latents of `entries` numbers."""
        ...


def check_complete(algorithm: Algorithm) -> None:
    """UserError for an algorithm with a part of a capability's members, which would silently be without it."""
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
