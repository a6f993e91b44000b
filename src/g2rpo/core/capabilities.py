"""Optional protocols of algorithms beyond `types.Algorithm`, and of rewards beyond `types.Reward`.
A class that defines the members of one has that capability.

The functions accept any algorithm or reward and return a default for those without the capability.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from g2rpo.core.errors import UserError
from g2rpo.core.types import (
    Algorithm,
    AlgorithmState,
    Batch,
    CallableReward,
    Network,
    Policy,
    Reward,
)


@runtime_checkable
class Stateful(Protocol):
    """The algorithm has state across iterations."""

    def memory(self) -> AlgorithmState:
        """The state of a new run."""
        ...


@runtime_checkable
class KeepsOldWeights(Protocol):
    """The run keeps old weights, which follow the trained ones after each iteration, for
    `Network.old_velocity` (AWM, DGPO, DiffusionNFT, EPG, DiffusionOPSD)."""

    uses_old: bool
    """Whether old weights are used with these hyper-parameters."""

    def old_decay(self, updates: int) -> float:
        """The decay d in [0, 1] of old <- d old + (1 - d) trained, after the iteration that ends at
        optimizer step `updates`."""
        ...

    def samples_old(self, updates: int) -> bool:
        """Whether the old weights sample the iteration that begins after `updates` optimizer
        steps."""
        ...


@runtime_checkable
class SumsGroups(Protocol):
    """The loss needs sums over whole groups, in `data["group_sum"]`; a pass may hold only a part of
    a group (DGPO)."""

    def group_term(self, batch: Batch, network: Network) -> Tensor:
        """The summand of each member of a batch, [B]; computed without gradient before the first
        update of a rollout."""
        ...


@runtime_checkable
class DifferentiatesRewards(Protocol):
    """The loss calls `Network.reward`; all trained rewards then have to be differentiable
    (ReFL, DiffusionOPSD)."""

    uses_rewards: bool


@runtime_checkable
class DropsMembers(Protocol):
    """Members without any advantage may be left out of an update's mean, and so of the KL term
    (Flow-GRPO)."""

    drop_zero_advantages: bool


@runtime_checkable
class FitsGrids(Protocol):
    """The published values are for one number of steps (E-GRPO)."""

    def fitted(self, num_steps: int) -> dict[str, Any]:
        """The fields that a grid of so many steps needs otherwise; empty where the published ones
        fit."""
        ...


@runtime_checkable
class LimitsDrift(Protocol):
    """Log-probs of rollout and training pass are compared (`algorithms.policy_gradient`)."""

    def drift_limit(
        self, sigmas: Tensor, steps: Sequence[int], entries: int, rounding: float
    ) -> float:
        """The largest `log_prob_drift` that a relative difference `rounding` of velocities can
        cause at the stochastic `steps`, for latents with `entries` numbers."""
        ...


def check_complete(algorithm: Algorithm) -> None:
    """UserError if an algorithm defines only some members of a capability: it would silently not
    have it."""
    kind = type(algorithm).__name__
    if getattr(algorithm, "uses_old", False) and not isinstance(algorithm, KeepsOldWeights):
        raise UserError(
            f"algorithm {kind}: with uses_old it needs old_decay and samples_old (capabilities.KeepsOldWeights)"
        )


def state_of(algorithm: Algorithm) -> AlgorithmState | None:
    """The state of a new run."""
    return algorithm.memory() if isinstance(algorithm, Stateful) else None


def keeps_old(algorithm: Algorithm) -> bool:
    """Whether the run keeps old weights."""
    return isinstance(algorithm, KeepsOldWeights) and algorithm.uses_old


def differentiates_rewards(algorithm: Algorithm) -> bool:
    """Whether the loss needs the gradient of rewards."""
    return isinstance(algorithm, DifferentiatesRewards) and algorithm.uses_rewards


def drops_members(algorithm: Algorithm) -> bool:
    """Whether members without any advantage are left out of an update's mean."""
    return isinstance(algorithm, DropsMembers) and algorithm.drop_zero_advantages


def unguided(policy: Policy) -> AbstractContextManager[None]:
    """While entered, the policy's velocities are without classifier-free guidance, if it has any."""
    context: AbstractContextManager[None] = getattr(policy, "unguided", nullcontext)()
    return context


def drift_limit_of(
    algorithm: Algorithm, sigmas: Tensor, steps: Sequence[int], entries: int, rounding: float
) -> float:
    """The limit of `LimitsDrift`; infinite for algorithms without log-probs."""
    return (
        algorithm.drift_limit(sigmas, steps, entries, rounding)
        if isinstance(algorithm, LimitsDrift)
        else math.inf
    )


@runtime_checkable
class Waits(Protocol):
    """The reward may wait for an answer from elsewhere: pictures are then scored while other
    prompts are rolled out."""

    waits: bool


@runtime_checkable
class TakesOneSize(Protocol):
    """The reward takes pictures of one size only (the testbed's)."""

    side: int
    """Their height and width."""


@runtime_checkable
class SaysWhatIsRight(Protocol):
    """The reward, which defines `right`, says what a right picture does, for the first sentence of
    the report."""

    right_in_words: str | None
    """"Spells {} texts" becomes "Spells 71 % of 192 held-out texts"; words without {}, such as "in
    the asked colour", follow those of another reward."""


@runtime_checkable
class ReadsTargets(Protocol):
    """The reward needs more of a prompt than its text: a quoted text, metadata, an input
    picture."""

    wants: str
    """What that is, in words for messages."""

    def target(self, prompt: str) -> Any:
        """The part of the prompt that `wants` describes, None if absent; ValueError if its metadata
        are malformed. A static method."""
        ...


@runtime_checkable
class ChecksPrompts(Protocol):
    """The class can say which prompts it cannot score (`vlm_judge`)."""

    def fault(self, options: Mapping[str, Any], prompts: Sequence[str]) -> str | None:
        """Why a reward with all these options cannot score these prompts; None if it can. A class
        method, asked before anything is loaded."""
        ...


@runtime_checkable
class ChecksOptions(Protocol):
    """The class checks more of its options than their types (`pairs`)."""

    def check_options(self, options: Mapping[str, Any]) -> None:
        """UserError that begins with the name of an option that is wrong. A class method, asked
        before anything is loaded."""
        ...


@runtime_checkable
class AsksServer(Protocol):
    """The constructor sends a request to a server, with the time limit `timeout_s` of its option
    `endpoint`."""

    asks: bool


def owner_of(reward: Any) -> Any:
    """The object or function behind a `CallableReward`, which has the optional members; any other
    reward itself."""
    while isinstance(reward, CallableReward):
        reward = reward.scorer
    return reward


def waits(reward: Reward) -> bool:
    """Whether a reward may wait for an answer from elsewhere."""
    own = owner_of(reward)
    return isinstance(own, Waits) and own.waits


def words_of_right(reward: Reward) -> str | None:
    """What a right picture does, if the reward says it."""
    own = owner_of(reward)
    return own.right_in_words if isinstance(own, SaysWhatIsRight) else None


def fault_of(kind: type[Reward], options: Mapping[str, Any], prompts: Sequence[str]) -> str | None:
    """Why a reward of this class with all these options cannot score these prompts; None if it can,
    or does not say."""
    if isinstance(kind, ChecksPrompts):
        return kind.fault(options, prompts)
    if not isinstance(kind, ReadsTargets):
        return None
    targets = []
    for prompt in prompts:
        try:
            targets.append(kind.target(prompt))
        except ValueError as error:
            return f"the metadata of prompt {prompt!r}: {error}"
    return None if any(targets) else f"none of {len(prompts)} prompts has {kind.wants}"
