"""The data types of g2rpo, and the three protocols: Policy, Reward, Algorithm.

Time runs from sigma = 1 (noise) to sigma = 0 (image): x = (1 - sigma) * image + sigma * noise, velocity = noise - image.
A *step* is an index on the sigma grid (0 is pure noise, num_steps is the image); an *iteration* is one update of the weights.

Shape legend: P prompts, K plans per prompt, G group members, M tails (granularities) per member, R rewards,
B rows or members of a batch, [...] the latent of one sample.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor


def per_row(value: Tensor, like: Tensor) -> Tensor:
    """`value` [B] (or a scalar) shaped to broadcast against `like` [B, ...], in its dtype and on its device."""
    value = value.to(like)
    return value if value.ndim == 0 else value.reshape(-1, *[1] * (like.ndim - 1))


def precise(x: Tensor) -> Tensor:
    """x in float32 if its own dtype is narrower; steps and log-probs are never taken in bfloat16."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def times(value: Tensor, x: Tensor) -> Tensor:
    """`value` [B] (or a scalar) times x [B, ...], in the dtype of x.

    If x is narrower than `value`, the result is what torch gives for `x * value` with a `value` without dimensions: a CPU
    rounds the product alone, a GPU rounds `value` as well.
    """
    if x.device.type == "cpu":
        return (per_row(value, precise(x)) * precise(x)).to(x.dtype)
    return per_row(value, x) * x


@dataclass(frozen=True)
class Normal:
    """Where one stochastic step lands: independent normals around `mean` [B, ...] with `std` [B] or scalar."""

    mean: Tensor
    std: Tensor

    @property
    def unit(self) -> Tensor:
        """The distance in which log-probs and KLs are measured: one standard deviation."""
        return self.std

    def sample(self, noise: Tensor) -> Tensor:
        """mean + std * noise; `noise` [G, ...] may have more rows than a one-row mean. Narrow noise makes a narrow product."""
        return self.mean + times(self.std.to(noise.dtype), noise)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log density of x [B, ...], as the *mean* over a row's entries, [B].

        The mean (not the sum) is the convention of DDPO and its descendants: a ratio is then a geometric mean per entry,
        and a clip range of 1e-4 is a sensible one.
        """
        mean = precise(self.mean)
        std = per_row(self.std, mean)
        entries = -((precise(x) - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
        return entries.flatten(1).mean(1)


Solver = Literal["euler", "ab2", "dpmpp2m"]
"""How a tail walks (`rollout.tails`)."""

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], Normal]
"""How a stochastic step is taken: (x [B, ...], velocity, sigma, sigma_next) -> where it lands. Sigmas are [B] or scalar."""


@dataclass(frozen=True)
class Plan:
    """How the members of one group are sampled: where noise enters, and how a member is finished.

    Steps `0 .. branch-1` follow the ODE, steps `branch .. merge-1` are stochastic, and from `merge` on every tail is an
    ODE walk of its own. A tail lists the steps it visits: it begins at `merge`, increases, and ends at `num_steps`. A plan
    with branch = merge has no stochastic steps.
    With `shared_noise` all members start from one initial noise, so the walk up to `branch` is the same for all of them.
    `trained` names the stochastic steps to learn from (None: all of them); `solver` is how tails walk. `granularities` name the
    tails in the log, one number each (empty: 1, 2, ...); the smallest is the finest.
    """

    branch: int
    merge: int
    tails: tuple[tuple[int, ...], ...]
    _: KW_ONLY
    shared_noise: bool = True
    trained: tuple[int, ...] | None = None
    solver: Solver = "euler"
    granularities: tuple[int, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.branch <= self.merge:
            raise ValueError(f"a plan needs 0 <= branch <= merge, got branch={self.branch}, merge={self.merge}")
        if self.branch == self.merge and self.shared_noise:
            raise ValueError("a plan without stochastic steps needs shared_noise=False: all members would be alike")
        if not self.tails:
            raise ValueError("a plan needs at least one tail")
        for tail in self.tails:
            if tail[0] != self.merge or any(a >= b for a, b in pairwise(tail)):
                raise ValueError(f"a tail must start at merge={self.merge} and increase, got {tail}")
        if len({tail[-1] for tail in self.tails}) != 1:
            raise ValueError(f"all tails must end at the same step, got {self.tails}")
        if self.granularities and len(self.granularities) != len(self.tails):
            raise ValueError(f"granularities must name every tail once, got {self.granularities} for {len(self.tails)} tails")
        if self.trained is not None and not (self.trained and set(self.trained) <= set(range(self.branch, self.merge))):
            raise ValueError(f"trained must name some of steps {self.branch}..{self.merge - 1}, got {self.trained}")

    def trains(self, step: int) -> bool:
        """Whether the stochastic step `step` is learnt from."""
        return self.trained is None or step in self.trained

    @property
    def tail_names(self) -> tuple[int, ...]:
        """A number for each tail, as the log has it."""
        return self.granularities or tuple(range(1, len(self.tails) + 1))


class Prompt(str):
    """A prompt: its text and what else belongs to it. It is a string, so whatever takes a text takes a prompt.

    `images` are paths of input pictures, `metadata` is plain data for rewards and policies, such as the text that a picture is
    to show. Prompts with different images or metadata differ; one without either equals its text.
    """

    images: tuple[str, ...]
    metadata: Mapping[str, Any]

    def __new__(cls, text: str, images: Sequence[str] = (), metadata: Mapping[str, Any] | None = None) -> Prompt:
        prompt = super().__new__(cls, text)
        prompt.images, prompt.metadata = tuple(images), dict(metadata or {})
        return prompt

    def plain(self) -> str | dict[str, Any]:
        """The text alone where there is nothing else, else all of it, as JSON has it."""
        if not self.images and not self.metadata:
            return str(self)
        return {"prompt": str(self), "images": list(self.images), "metadata": dict(self.metadata)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and plain_prompt(self) == plain_prompt(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def plain_prompt(prompt: str) -> str | dict[str, Any]:
    """A prompt as JSON has it; a string that is no `Prompt` is its text."""
    return prompt.plain() if isinstance(prompt, Prompt) else prompt


@dataclass(frozen=True)
class Cond:
    """What a policy is conditioned on, one row per prompt.

    `tensors` share their first dimension. `ragged` is what has another length for each prompt, such as embeddings of text that
    is not padded: one tensor [length, ...] per row.
    """

    tensors: Mapping[str, Tensor]
    ragged: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)

    @classmethod
    def join(cls, rows: Sequence[Cond]) -> Cond:
        """Rows of several conditionings, one after the other; all have the same names."""
        first = rows[0]
        return cls(
            {name: torch.cat([row.tensors[name] for row in rows]) for name in first.tensors},
            {name: tuple(value for row in rows for value in row.ragged[name]) for name in first.ragged},
        )

    def __len__(self) -> int:
        return next(len(values) for part in (self.tensors, self.ragged) for values in part.values())

    def rows(self, index: Tensor | Sequence[int]) -> Cond:
        """The rows named by `index`, in its order; rows may repeat."""
        return Cond(
            {k: v[torch.as_tensor(index, device=v.device)] for k, v in self.tensors.items()},
            {k: tuple(v[int(i)] for i in index) for k, v in self.ragged.items()},
        )

    def padded(self, name: str) -> tuple[Tensor, Tensor]:
        """A ragged entry as one tensor [rows, longest, ...], zero beyond each row's length, and a mask [rows, longest]."""
        values = self.ragged[name]
        lengths = torch.tensor([len(value) for value in values], device=values[0].device)
        mask = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
        return torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True), mask

    def to(self, device: torch.device | str) -> Cond:
        return Cond(
            {k: v.to(device) for k, v in self.tensors.items()},
            {k: tuple(each.to(device) for each in v) for k, v in self.ragged.items()},
        )


@dataclass(frozen=True)
class Transition:
    """One stochastic step of one group. `x` has one row where the members branch from a shared latent, else G rows."""

    step: int
    x: Tensor  # [1 or G, ...]
    x_next: Tensor  # [G, ...]
    old_mean: Tensor  # [1 or G, ...], where the step was bound before noise entered
    old_log_prob: Tensor  # [G], float32


@dataclass(frozen=True)
class Rollout:
    """One `Plan` executed for one prompt."""

    prompt: int  # row of the conditioning batch
    plan: Plan
    transitions: tuple[Transition, ...]  # of the steps to learn from
    finals: Tensor  # [M, G, ...], latents at sigma = 0


@dataclass(frozen=True)
class Example:
    """What one group teaches at one step: the unit of a training pass.

    `x` are latents that the network sees, [1, ...] where the members share one, else [G, ...]. `data` is what else the loss
    needs, by name, each [1, ...] or [G, ...] likewise. All of a run's examples have the same names.
    """

    prompt: int  # row of the conditioning batch
    step: int
    x: Tensor
    advantages: Tensor  # [G]
    data: Mapping[str, Tensor] = field(default_factory=dict)
    counted: Tensor | None = None  # [G], the members that an update's mean is taken over; None: all

    @property
    def rows(self) -> int:
        """Latents that the network sees."""
        return len(self.x)

    @property
    def mask(self) -> Tensor:
        """Which members count, [G]."""
        return torch.ones_like(self.advantages, dtype=torch.bool) if self.counted is None else self.counted

    def members(self, start: int, stop: int) -> Example:
        """The part of members start .. stop - 1."""
        size = len(self.advantages)

        def part(value: Tensor) -> Tensor:
            return value[start:stop] if len(value) == size else value

        data = {name: part(value) for name, value in self.data.items()}
        return Example(self.prompt, self.step, part(self.x), part(self.advantages), data, part(self.mask))


Draw = Callable[..., torch.Generator]
"""`draw(*purpose)`: a CPU generator for one purpose, such as draw("noise", 3), that belongs to one rollout of one iteration."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The examples of one training pass, B members in all.

    The network sees `x` [rows, ...] at the grid indices `steps` [rows] (CPU) for rows `prompts` of the conditioning; member i
    of `advantages` and of `data` [B, ...] belongs to row `row_of[i]`.
    """

    x: Tensor
    steps: Tensor
    prompts: Sequence[int]
    row_of: Sequence[int]
    advantages: Tensor
    data: Mapping[str, Tensor]
    sigmas: Tensor
    """The sigma grid of the run, [num_steps + 1], on the CPU."""
    first: bool
    """Whether this is the first update of a rollout, so that the weights are those that sampled."""

    @classmethod
    def of(cls, examples: Sequence[Example], sigmas: Tensor, first: bool) -> Batch:
        rows, offset = [], 0
        for example in examples:  # a shared latent serves every member, own latents one each
            members = range(len(example.advantages))
            rows.append([offset + (member if example.rows > 1 else 0) for member in members])
            offset += example.rows

        def by_member(name: str) -> Tensor:
            values = [example.data[name] for example in examples]
            return torch.cat([v.expand(len(e.advantages), *v.shape[1:]) for v, e in zip(values, examples, strict=True)])

        x = torch.cat([example.x for example in examples])
        return cls(
            x=x,
            steps=torch.tensor([example.step for example in examples for _ in example.x]),
            prompts=[example.prompt for example in examples for _ in example.x],
            row_of=[row for own in rows for row in own],
            advantages=torch.cat([example.advantages for example in examples]).to(x.device),
            data={name: by_member(name) for name in examples[0].data},
            sigmas=sigmas,
            first=first,
        )

    def by_member(self, rows: Tensor) -> Tensor:
        """`rows` [rows, ...] of the network, one for each member, [B, ...].

        The gradient of a shared row is one sum over its members. An index would add them up one after the other, and round
        each time in a narrow dtype.
        """
        if len(rows) == len(self.row_of):
            return rows
        members = Counter(self.row_of)
        return torch.cat([row.expand(members[index], *row.shape[1:]) for index, row in enumerate(rows.split(1))])


class Network(Protocol):
    """What a loss may ask of the model in a training pass; rows of `prompts` are the conditioning's."""

    def velocity(self, x: Tensor, sigma: Tensor, prompts: Sequence[int]) -> Tensor:
        """As `Policy.velocity`, under the weights that are trained; carries the gradient."""
        ...

    def base_velocity(self, x: Tensor, sigma: Tensor, prompts: Sequence[int]) -> Tensor:
        """Under the untrained weights, without gradient; for algorithms whose `uses_base` says so."""
        ...


@dataclass(frozen=True)
class Loss:
    """The loss of every member of a batch, [B], to be averaged, with what is worth a look: [B] or [any number] by name."""

    values: Tensor
    log: Mapping[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class Policy(Protocol):
    """A generator that can be trained. It owns guidance, packing, timestep scaling and dtype; callers see sigma only."""

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

    A reward whose scores tell right from wrong may have an attribute `right`, the least score of a right picture: pictures are
    then marked, and the share of right ones is logged.

    Clips of a policy that makes video, [B, T, 3, H, W], are scored frame by frame and the scores averaged. A reward with an
    attribute `video = True` gets whole clips instead.
    """

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores [B], float32 on CPU, of images [B, 3, H, W] in [0, 1], each for its own prompt."""
        ...


def _no_kernel(x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Normal:
    raise NotImplementedError("the algorithm has plans with stochastic steps, but no kernel")


UpdateEvery = Literal["rollout", "branch"] | int
"""When the weights move: once a rollout, after the examples of every step, or after so many members of each group."""


class AlgorithmState(Protocol):
    """What an algorithm carries from one iteration to the next. It is saved in checkpoints and alike on all ranks."""

    state: dict[str, Any]
    """Plain data: numbers, words, lists and mappings with words for keys."""

    def at(self, iteration: int) -> Algorithm:
        """The algorithm, itself without state, of an iteration."""
        ...

    def observe(self, iteration: int, steps: Sequence[int], rewards: Tensor, weights: Tensor) -> dict[str, float]:
        """Takes in rewards [N, R, M, G] of all ranks' N groups, which branched at `steps`; returns what to log."""
        ...


@runtime_checkable
class Algorithm(Protocol):
    """What is sampled, what a reward says about it, what is learnt from it, and the loss. Fields are the hyper-parameters.

    A class that inherits from this protocol needs `plans`, `advantages`, `examples` and `loss`; the rest has defaults.
    `algorithms.policy_gradient` has `examples` and `loss` for all that learn from stochastic steps.
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
            """Whether the loss asks for the untrained model's velocity."""
            return False

        @property
        def drop_zero_advantages(self) -> bool:
            """Whether members without any advantage are left out of an update's mean, and so of the KL term."""
            return False

    else:
        group_size: int
        update_every = "rollout"
        advantage_clip = math.inf
        uses_base = False
        drop_zero_advantages = False

    def kernel(self, sigmas: Tensor) -> Kernel:
        """How a stochastic step is taken in a run on the grid `sigmas`; only plans with stochastic steps need one."""
        return _no_kernel

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        """The plans of an iteration, at least one: a function of its arguments, chance included.

        Every prompt of the iteration is sampled with all of them; `plans` does not see the prompts, so plans cannot depend on
        them. They have equally many tails, which end at `num_steps`. ValueError for hyper-parameters that do not fit.
        """
        ...

    def advantages(self, rewards: Tensor, weights: Tensor) -> Tensor:
        """Advantages [N, G], finite, from rewards [N, R, M, G] of N groups, whose entries may be NaN, and weights [R]."""
        ...

    def examples(self, rollout: Rollout, advantages: Tensor, draw: Draw) -> list[Example]:
        """What a rollout with `advantages` [G] teaches; as many examples of as many rows for every rollout of a plan.

        Chance comes from `draw` alone, so that a run stays a function of its config.
        """
        ...

    def loss(self, batch: Batch, network: Network) -> Loss:
        """The loss of the members of a batch, before averaging."""
        ...

    def metrics(self, log: Mapping[str, Tensor]) -> dict[str, float]:
        """What to log of an iteration from what the losses logged, all members of all ranks in one tensor by name."""
        return {name: float(values.double().mean()) for name, values in log.items()}

    def drift_limit(self, sigmas: Tensor, steps: Sequence[int], entries: int, dtype: torch.dtype) -> float:
        """The largest `log_prob_drift` that rounding in `dtype` explains, for the stochastic `steps` of latents of `entries`
        numbers; infinite for algorithms without log-probs."""
        return math.inf

    def memory(self, num_steps: int, evaluations: Callable[[Sequence[Plan], int], int]) -> AlgorithmState | None:
        """The state of a new run, for algorithms that have one; `evaluations(plans, group_size)` prices plans."""
        return None
