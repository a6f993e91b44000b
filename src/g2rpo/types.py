"""The three protocols: Policy, Reward, Algorithm. The data types they exchange are in `data.py`; import either from here.

Time runs from sigma = 1 (noise) to sigma = 0 (image): x = (1 - sigma) * image + sigma * noise, velocity = noise - image.
A *step* is an index on the sigma grid (0 is pure noise, num_steps is the image); an *iteration* is one update of the weights.

Shape legend: P prompts, K plans per prompt, G group members, M tails (granularities) per member, R rewards,
B rows or members of a batch, [...] the latent of one sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from g2rpo.data import Batch, Cond, Example, Loss, Normal, Plan, Prompt, Rollout, Transition, per_row, plain_prompt  # noqa: F401


@runtime_checkable
class Policy(Protocol):
    """A generator that can be trained. Guidance, packing, timestep scaling and dtype are inside; callers see sigma only.

    Three attributes are optional: `input_pictures`, the least and the most pictures of a prompt that the model takes, (0, 0)
    without; `seconds`, how long a clip is, 1/16 per frame without; and `in_loss`, a context like `base` that is entered where
    `velocity` is for a loss.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def shift(self) -> float:
        """The time shift (of `flow.sigma_grid`) with which the model is deployed."""
        ...

    def encode(self, prompts: Sequence[str]) -> Cond:
        """Conditioning for each prompt."""
        ...

    def noise(self, generators: Sequence[torch.Generator]) -> Tensor:
        """One initial latent per generator: [len(generators), ...], float32, standard normal."""
        ...

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Velocity at x [B, ...] for sigma [B], which may differ per row, and cond of B rows; differentiable."""
        ...

    def decode(self, x: Tensor) -> Tensor:
        """Images [B, 3, H, W], or clips [B, T, 3, H, W], float32 in [0, 1], of latents at sigma = 0."""
        ...

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimizer updates, float32, in an order that never changes."""
        ...

    def base(self) -> AbstractContextManager[None]:
        """While entered, `velocity` is the untrained model's (for the KL term and for before/after pictures)."""
        ...

    def save(self, directory: Path) -> Path:
        """Writes the trained weights as their ecosystem reads them, and returns where."""
        ...


@runtime_checkable
class Reward(Protocol):
    """Scores pictures: raw, unweighted, higher is better. NaN means "no score" and is masked out of its group.

    If a score separates right pictures from wrong ones, an attribute `right` may give the least score of a right picture:
    pictures are then marked, and the share of right ones is logged. `right_in_words` says what a right picture does, for the
    first sentence of the report: "Spells {} texts" becomes "Spells 71 % of 192 unseen texts"; words without {}, such as "in the
    asked colour", follow those of another reward.

    Clips of a video policy, [B, T, 3, H, W], are scored by their frames (`rollout.frames`). A reward with an attribute
    `video = True` gets whole clips instead, one with `latent = True` the final latents [B, ...] (as `Policy.decode` takes
    them): where all rewards do, training decodes nothing.

    For pictures that require a gradient, one with `differentiable = True` returns scores that carry it, on any device;
    algorithms with `uses_rewards` need that.

    Where one waits for an answer from elsewhere (`waits = True`), pictures are scored while other prompts are rolled out.

    A reward may change as the run goes on: its attribute `state`, plain data and tensors, is saved in checkpoints and set again
    on resuming. It must be the same on all ranks, which score different pictures; so it changes in a method
    `observe(iteration, scores)`, called on every rank after an iteration with the scores [N, M, G] of all ranks' N groups.
    """

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores [B], float32 on CPU, of images [B, 3, H, W] in [0, 1], each for its own prompt."""
        ...


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], Normal]
"""The transition kernel p(x_next | x): (x [B, ...], velocity, sigma, sigma_next) -> Normal. Sigmas are [B] or scalar."""

Draw = Callable[..., torch.Generator]
"""`draw(*purpose)`: a CPU generator for one purpose, such as draw("noise", 3), that belongs to one rollout of one iteration."""

UpdateEvery = Literal["rollout", "branch"] | int
"""When the weights are updated: once a rollout, after the examples of every step, or after this many members of each group."""


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
        """Under the old weights, without gradient; for algorithms with `uses_old`. A loss calls it before `velocity`."""
        ...

    def reward(self, x: Tensor, prompts: Sequence[int]) -> Tensor:
        """The weighted sum [B] of the scores of latents x at sigma = 0, with the gradient of decoding and rewards; for
        algorithms with `uses_rewards`."""
        ...


class AlgorithmState(Protocol):
    """What an algorithm keeps from one iteration to the next. It is saved in checkpoints and equal on all ranks."""

    state: dict[str, Any]
    """Plain data, as JSON holds it: numbers, strings, lists, mappings with string keys."""

    def at(self, iteration: int) -> Algorithm:
        """The stateless algorithm of an iteration."""
        ...

    def observe(self, iteration: int, steps: Sequence[int], rewards: Tensor, weights: Tensor) -> dict[str, float]:
        """Updates the state from rewards [N, R, M, G] of all ranks' N groups with branch `steps`; returns what to log."""
        ...


@runtime_checkable
class PromptChooser(AlgorithmState, Protocol):
    """The state of an algorithm with several `candidates`."""

    def choose(self, iteration: int, rewards: Tensor, weights: Tensor) -> list[int]:
        """Which of its candidates takes each of P places, from rewards [P, candidates, R] of their ODE pictures; called before
        `at`."""
        ...


@runtime_checkable
class Algorithm(Protocol):
    """How members are sampled, their advantages, the training examples and the loss. Fields are the hyper-parameters.

    A class that inherits from this protocol needs `plans`, `advantages`, `examples` and `loss`; the rest has defaults.
    `algorithms.policy_gradient` has `examples` and `loss` for algorithms that learn from stochastic steps.
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
        def candidates(self) -> int:
            """Prompts drawn for each place of an iteration; if several, its state, a `PromptChooser`, takes one."""
            return 1

        @property
        def uses_base(self) -> bool:
            """Whether the loss calls `Network.base_velocity`."""
            return False

        @property
        def uses_old(self) -> bool:
            """Whether the run keeps old weights, which follow the trained ones after each iteration (`old_decay`)."""
            return False

        @property
        def uses_rewards(self) -> bool:
            """Whether the loss calls `Network.reward`; all trained rewards then have to be differentiable."""
            return False

        @property
        def uses_group_sums(self) -> bool:
            """Whether the loss needs `data["group_sum"]`: sums of `group_term` over a group, which a pass may have in part."""
            return False

        @property
        def drop_zero_advantages(self) -> bool:
            """Whether members without any advantage are left out of an update's mean, and so of the KL term."""
            return False

    else:
        group_size: int
        update_every = "rollout"
        advantage_clip = math.inf
        candidates = 1
        uses_base = False
        uses_old = False
        uses_rewards = False
        uses_group_sums = False
        drop_zero_advantages = False

    def old_decay(self, updates: int) -> float:
        """What the old weights keep of themselves after an iteration, `updates` optimizer steps into the run, in [0, 1]."""
        return 0.0

    def samples_old(self, updates: int) -> bool:
        """Whether the old weights sample the iteration that begins after `updates` optimizer steps."""
        return False

    def kernel(self, sigmas: Tensor) -> Kernel:
        """The transition kernel of a run on the grid `sigmas`; only plans with stochastic steps need one."""
        return no_kernel

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        """The plans of an iteration, at least one: a function of its arguments, random choices included.

        Every prompt of the iteration is sampled with all of them; `plans` does not see the prompts, so plans cannot depend on
        them. They have equally many tails, which end at `num_steps`. ValueError for hyper-parameters that do not fit.
        """
        ...

    def advantages(self, rewards: Tensor, weights: Tensor) -> Tensor:
        """Advantages [N, G], finite, from rewards [N, R, M, G] of N groups, whose entries may be NaN, and weights [R]."""
        ...

    def examples(self, rollout: Rollout, advantages: Tensor, draw: Draw) -> list[Example]:
        """Training examples of a rollout with `advantages` [G]; as many, of as many rows, for every rollout of a plan.

        Random numbers come from `draw` alone, so that a run stays a function of its config.
        """
        ...

    def loss(self, batch: Batch, network: Network) -> Loss:
        """The loss of the members of a batch, before averaging."""
        ...

    def group_term(self, batch: Batch, network: Network) -> Tensor:
        """A number of each member of a batch, [B], taken without gradient before the first update of a rollout; for algorithms
        with `uses_group_sums`."""
        return torch.zeros_like(batch.advantages)

    def metrics(self, log: Mapping[str, Tensor]) -> dict[str, float]:
        """The logged numbers of an iteration from `Loss.log`: by name, one tensor of all members of all ranks."""
        return {name: float(values.double().mean()) for name, values in log.items()}

    def drift_limit(self, sigmas: Tensor, steps: Sequence[int], entries: int, rounding: float) -> float:
        """The largest `log_prob_drift` that velocities explain which differ by `rounding`, relative to their size, for the
        stochastic `steps` of latents of `entries` numbers; infinite for algorithms without log-probs."""
        return math.inf

    def memory(self) -> AlgorithmState | None:
        """The state of a new run, for algorithms that have one."""
        return None
