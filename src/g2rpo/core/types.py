"""What can be replaced: Policy, Reward, Algorithm. `Reward` is in `rewards.py`, the data types that
they exchange are in `data.py` and `plans.py`; import all of them from here.

Time runs from sigma = 1 (noise) to sigma = 0 (image): x = (1 - sigma) * image + sigma * noise,
velocity = noise - image. A *step* is an index on the sigma grid (0 is pure noise, num_steps is the
image); an *iteration* is one rollout and the updates from it.

Shape legend: P prompts, K plans per prompt, G group members, M tails (granularities) per member, R
rewards, B rows or members of a batch, [...] the latent of one sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from g2rpo.core.data import (  # noqa: F401
    Batch,
    Cond,
    Example,
    Loss,
    Prompt,
    plain_prompt,
)
from g2rpo.core.noise import Normal, per_row  # noqa: F401
from g2rpo.core.plans import Plan, Rollout, Transition  # noqa: F401
from g2rpo.core.rewards import (  # noqa: F401
    CallableReward,
    Frames,
    Reward,
    RewardModel,
    Scorer,
    as_reward,
    as_rewards,
)


@runtime_checkable
class Policy(Protocol):
    """A generator that can be trained. Guidance, packing, timestep scaling and dtype are inside;
    callers see sigma only.

    Optional attributes: `input_pictures`, the least and the largest number of input pictures of a
    prompt (default (0, 0)); `seconds`, the duration of a clip (default 1/16 per frame); `dtype`, in
    which its networks compute, for messages; `adapter_file` (`models.adapters.AdapterFile`), by
    which checkpoints hold the trained parameters as an adapter; `in_loss`, a context like `base`
    that is entered while velocities are computed for a loss; `unguided`, a context in which
    velocities are without classifier-free guidance, for a policy that has it; `merged`, a context
    in which velocities, which no loss compares with its own, may be rounded otherwise, if that is
    faster.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def shift(self) -> float:
        """The time shift (of `flow.sigma_grid`) with which the model is deployed."""
        ...

    def encode(self, prompts: Sequence[str]) -> Cond:
        """Conditioning for each prompt; one may be empty (guidance by hand)."""
        ...

    def noise(self, generators: Sequence[torch.Generator]) -> Tensor:
        """One initial latent per generator: [len(generators), ...], float32, standard normal."""
        ...

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Velocity at x [B, ...] for sigma [B], which may differ per row, and cond of B rows;
        differentiable."""
        ...

    def decode(self, x: Tensor) -> Tensor:
        """Images [B, 3, H, W], or clips [B, T, 3, H, W], float32 in [0, 1], of latents at sigma =
        0."""
        ...

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimizer updates, float32, in an order that never changes."""
        ...

    def base(self) -> AbstractContextManager[None]:
        """While entered, `velocity` is the untrained model's (for the KL term and for before/after
        pictures); it may be entered again meanwhile."""
        ...

    def save(self, directory: Path) -> Path:
        """Writes the trained weights in the format of their ecosystem; returns the path."""
        ...


def unguided(policy: Policy) -> AbstractContextManager[None]:
    """While entered, the policy's velocities are without classifier-free guidance, if it has any."""
    context: AbstractContextManager[None] = getattr(policy, "unguided", nullcontext)()
    return context


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], Normal]
"""The transition kernel p(x_next | x): (x [B, ...], velocity, sigma, sigma_next) -> Normal. Sigmas
are [B] or scalar. Of a step that is `Plan.corrected`, x and velocity are those at sigma_next."""

Draw = Callable[..., torch.Generator]
"""`draw(*purpose)`: a CPU generator for one purpose, such as draw("noise", 3), within one rollout
of one iteration."""

UpdateEvery = Literal["rollout", "branch"] | int | float
"""When the weights are updated: once a rollout, after the examples of every step, after this many
members of each group, or after this share (below 1) of the examples, which are dealt out in
turn."""


def no_kernel(x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Normal:
    """The kernel of algorithms whose plans have no stochastic steps."""
    raise NotImplementedError("the algorithm has plans with stochastic steps, but no kernel")


class Network(Protocol):
    """The model in a training pass, as a loss sees it; `prompts` are rows of the conditioning."""

    def velocity(self, x: Tensor, sigma: Tensor, prompts: Sequence[int]) -> Tensor:
        """As `Policy.velocity`, under the weights that are trained; carries the gradient."""
        ...

    def base_velocity(self, x: Tensor, sigma: Tensor, prompts: Sequence[int]) -> Tensor:
        """Under the untrained weights, without gradient; for algorithms with `uses_base`."""
        ...

    def old_velocity(self, x: Tensor, sigma: Tensor, prompts: Sequence[int]) -> Tensor:
        """Under the old weights, without gradient; for algorithms that keep them. A loss calls it
        before `velocity`."""
        ...

    def unguided(self) -> AbstractContextManager[None]:
        """While entered, velocities are without the policy's classifier-free guidance."""
        ...

    def reward(self, x: Tensor, prompts: Sequence[int]) -> Tensor:
        """The weighted sum [B] of the scores of latents x at sigma = 0, with the gradient of
        decoding and rewards; for algorithms that differentiate rewards."""
        ...


class AlgorithmState(Protocol):
    """What an algorithm keeps from one iteration to the next. It is saved in checkpoints and equal
    on all ranks."""

    state: dict[str, Any]
    """Plain data, as JSON holds it: numbers, strings, lists, mappings with string keys."""

    def at(self, iteration: int) -> Algorithm:
        """The stateless algorithm of an iteration."""
        ...

    def observe(
        self, iteration: int, steps: Sequence[int], rewards: Tensor, weights: Tensor
    ) -> dict[str, float]:
        """Updates the state from rewards [N, R, M, G] of all ranks' N groups with branch `steps`;
        returns what to log."""
        ...


@runtime_checkable
class Algorithm(Protocol):
    """How members are sampled, their advantages, the training examples and the loss. Fields are the
    hyper-parameters.

    A class that inherits from this protocol needs `plans`, `advantages`, `examples` and `loss`; the
    rest has defaults. `algorithms.policy_gradient` has `examples` and `loss` for algorithms that
    learn from stochastic steps.
    """

    if TYPE_CHECKING:  # read-only, as the fields of frozen dataclasses are

        @property
        def group_size(self) -> int: ...

        @property
        def update_every(self) -> UpdateEvery:
            return "rollout"

        @property
        def advantage_clip(self) -> float:
            """The largest size of an advantage; the share at it is logged."""
            return math.inf

        @property
        def uses_base(self) -> bool:
            """Whether the loss calls `Network.base_velocity`."""
            return False

        @property
        def uses_old(self) -> bool:
            """Whether the run keeps old weights, which follow the trained ones after each
            iteration, for `Network.old_velocity`."""
            return False

    else:
        group_size: int
        update_every = "rollout"
        advantage_clip = math.inf
        uses_base = False
        uses_old = False

    uses_rewards: ClassVar[bool] = False
    """Whether the loss calls `Network.reward`; all trained rewards then have to be
    differentiable."""
    drop_zero_advantages: ClassVar[bool] = False
    """Whether members without any advantage are left out of an update's mean, so that groups of
    equal rewards do not strengthen the KL term (Flow-GRPO)."""
    sums_groups: ClassVar[bool] = False
    """Whether the loss needs sums of `group_term` over whole groups, in `data["group_sum"]`; a pass
    may hold only a part of a group (DGPO)."""

    def memory(self) -> AlgorithmState | None:
        """The state of a new run, of an algorithm that has state across iterations."""
        return None

    def old_decay(self, updates: int) -> float:
        """The decay d in [0, 1] of old <- d old + (1 - d) trained, after the iteration that ends at
        optimizer step `updates`."""
        return 0.0

    def samples_old(self, updates: int) -> bool:
        """Whether the old weights sample the iteration that begins after `updates` optimizer
        steps."""
        return False

    def fitted(self, num_steps: int) -> dict[str, Any]:
        """The fields that a grid of so many steps needs otherwise; empty where the published ones
        fit (E-GRPO)."""
        return {}

    def drift_limit(
        self, sigmas: Tensor, steps: Sequence[int], entries: int, rounding: float
    ) -> float:
        """The largest `log_prob_drift` that a relative difference `rounding` of velocities can
        cause at the stochastic `steps`, for latents with `entries` numbers; infinite for algorithms
        without log-probs."""
        return math.inf

    def group_term(self, batch: Batch, network: Network) -> Tensor:
        """The summand of each member of a batch, [B], if `sums_groups`; computed without gradient
        before the first update of a rollout."""
        return torch.zeros_like(batch.advantages)

    def kernel(self, sigmas: Tensor) -> Kernel:
        """The transition kernel of a run on the grid `sigmas`; only plans with stochastic steps
        need one."""
        return no_kernel

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        """The plans of an iteration, at least one: a function of its arguments, random choices
        included.

        Every prompt of the iteration is sampled with all of them; `plans` does not see the prompts,
        so plans cannot depend on them. They have equally many tails, which end at `num_steps`.
        ValueError for hyper-parameters that do not fit.
        """
        ...

    def advantages(self, rewards: Tensor, weights: Tensor) -> Tensor:
        """Advantages [N, G], finite, from rewards [N, R, M, G] of N groups, whose entries may be
        NaN, and weights [R]."""
        ...

    def examples(self, rollout: Rollout, advantages: Tensor, draw: Draw) -> list[Example]:
        """Training examples of a rollout with `advantages` [G]; as many, of as many rows, for every
        rollout of a plan.

        Random numbers come from `draw` alone, so that a run stays a function of its config.
        """
        ...

    def loss(self, batch: Batch, network: Network) -> Loss:
        """The loss of the members of a batch, before averaging."""
        ...

    def metrics(self, log: Mapping[str, Tensor]) -> dict[str, float]:
        """The logged numbers of an iteration from `Loss.log`: by name, one tensor of all members of
        all ranks. Means; NaN is a member without a value."""
        return {name: float(own[~own.isnan()].double().mean()) for name, own in log.items()}
