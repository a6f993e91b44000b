"""The data types that the protocols exchange; `types.py` has the legend of times and shapes.

In the order of an iteration: `Prompt`, `Cond`, `Precision`, `Plan`, `Transition`, `Rollout`,
`Example`, `Batch`, `Loss`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from g2rpo.core.errors import refuse


class Prompt(str):
    """A prompt: a string (its text) with optional input pictures and metadata.

    `images` are paths of input pictures, `metadata` is plain data for rewards and policies, such as
    the text that a picture is to show. `encoded` are paths of tensors that it was encoded to
    before, by the name of what a policy is conditioned on. Prompts with different images or
    metadata differ; one without either equals its text.
    """

    images: tuple[str, ...]
    metadata: Mapping[str, Any]
    encoded: Mapping[str, str]

    def __new__(
        cls,
        text: str,
        images: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        encoded: Mapping[str, str] | None = None,
    ) -> Prompt:
        prompt = super().__new__(cls, text)
        prompt.images, prompt.metadata, prompt.encoded = (
            tuple(images),
            dict(metadata or {}),
            dict(encoded or {}),
        )
        return prompt

    def plain(self) -> str | dict[str, Any]:
        """For JSON: the text alone if there is nothing else, otherwise a mapping."""
        if not self.images and not self.metadata:
            return str(self)
        return {"prompt": str(self), "images": list(self.images), "metadata": dict(self.metadata)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and plain_prompt(self) == plain_prompt(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class Judged(Prompt):
    """A prompt with files of pictures of it, and of each whether people found it good: a pair of a
    chosen and a rejected picture, or one picture with its mark. Its text alone, with metadata and
    input pictures, makes it equal to another prompt."""

    pictures: tuple[str, ...]
    good: tuple[bool, ...]

    @classmethod
    def of(cls, prompt: Prompt, pictures: Sequence[str], good: Sequence[bool]) -> Judged:
        judged = cls(prompt, prompt.images, prompt.metadata, prompt.encoded)
        judged.pictures, judged.good = tuple(pictures), tuple(good)
        return judged


def as_prompt(prompt: str) -> Prompt:
    """The prompt itself, or a string as one without pictures and metadata."""
    return prompt if isinstance(prompt, Prompt) else Prompt(prompt)


def plain_prompt(prompt: str) -> str | dict[str, Any]:
    """`Prompt.plain` of any string."""
    return prompt.plain() if isinstance(prompt, Prompt) else prompt


@dataclass(frozen=True)
class Cond:
    """What a policy is conditioned on, one row per prompt.

    `tensors` share their first dimension. `ragged` has one tensor [length, ...] per row, for what
    differs in length from prompt to prompt, such as embeddings of text without padding.
    """

    tensors: Mapping[str, Tensor]
    ragged: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)

    @classmethod
    def join(cls, rows: Sequence[Cond]) -> Cond:
        """Conditionings with the same names, concatenated by rows."""
        first = rows[0]
        return cls(
            {name: torch.cat([row.tensors[name] for row in rows]) for name in first.tensors},
            {
                name: tuple(value for row in rows for value in row.ragged[name])
                for name in first.ragged
            },
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
        """A ragged entry as one tensor [rows, longest, ...], zero beyond each row's length, and a
        mask [rows, longest]."""
        values = self.ragged[name]
        lengths = torch.tensor([len(value) for value in values], device=values[0].device)
        mask = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
        return torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True), mask

    def to(self, device: torch.device | str) -> Cond:
        return Cond(
            {k: v.to(device) for k, v in self.tensors.items()},
            {k: tuple(each.to(device) for each in v) for k, v in self.ragged.items()},
        )


Row = dict[str, Any]
"""A line of a table or a log."""

Solver = Literal["euler", "dpmpp2m"]
"""The ODE solver of a tail (`rollout.tails`)."""


@dataclass(frozen=True)
class Precision:
    """Dtypes of rollout and training pass.

    network: of the network's calls. anchor: of the latents at which noise enters. sample: of the
    latents after the noise; before log-probs are taken, so that these belong to the stored latents.
    step: of velocities and noise, and so of their products with a step's coefficients (`times`).
    """

    network: torch.dtype = torch.float32
    anchor: torch.dtype = torch.float32
    sample: torch.dtype = torch.float32
    step: torch.dtype = torch.float32

    @property
    def eps(self) -> float:
        """The largest machine epsilon among the four dtypes."""
        return max(
            torch.finfo(dtype).eps for dtype in (self.network, self.anchor, self.sample, self.step)
        )


FLOAT32 = Precision()


@dataclass(frozen=True)
class Plan:
    """How the members of one group are sampled: where noise enters, and how a member is finished.

    Steps `0 .. branch-1` follow the ODE, steps `branch .. merge-1` are stochastic, and each tail is
    an ODE trajectory from `merge` on. A tail lists the steps it visits: it begins at `merge`,
    increases, and ends at `num_steps`. A plan with branch = merge has no stochastic steps. With
    `merged` there is one stochastic step, from `branch` to `merge`. With `shared_noise` all members
    start from one initial noise and share the trajectory up to `branch`. Without it, their initial
    noises may have something in `common`, a number from 0 to 1: common * shared + sqrt(1 -
    common^2) * own. `trained` are the stochastic steps to learn from (None: all of them); `solver`
    integrates the tails. `granularities` name the tails in the log, one number each (empty: 1, 2,
    ...); the smallest is the finest. With `kept_sigma` the latents that the first tail passes
    nearest to this sigma are kept, for an algorithm that learns from states of the ODE. With
    `baseline` the ODE's own picture of the prompt is sampled too, once for all plans, and scored
    with every group; `Algorithm.advantages` then gets rewards less those of that picture. With
    `corrected` a stochastic step is the ODE's step and then a stochastic one in place: the kernel
    gets the latent where the ODE's step ends, and its velocity there without classifier-free
    guidance, so each stochastic step takes a second evaluation.
    """

    branch: int
    merge: int
    tails: tuple[tuple[int, ...], ...]
    _: KW_ONLY
    shared_noise: bool = True
    common: float = 0.0
    merged: bool = False
    baseline: bool = False
    corrected: bool = False
    trained: tuple[int, ...] | None = None
    solver: Solver = "euler"
    granularities: tuple[int, ...] = field(default=(), compare=False)
    kept_sigma: float | None = None

    def __post_init__(self) -> None:
        refuse(self._faults(), ValueError)

    def _faults(self) -> Iterator[str]:
        if not 0 <= self.branch <= self.merge:
            yield f"a plan needs 0 <= branch <= merge, got branch={self.branch}, merge={self.merge}"
        if self.branch == self.merge and self.shared_noise:
            yield "a plan without stochastic steps needs shared_noise=False: all members would be alike"
        if not 0 <= self.common <= 1 or (self.common and self.shared_noise):
            yield f"common must be from 0 to 1, and needs shared_noise=False, got {self.common}"
        if self.baseline and not self.shared_noise:
            yield "a baseline needs shared_noise=True: members without it have no ODE in common"
        if not self.tails:
            yield "a plan needs at least one tail"
        for tail in self.tails:
            if tail[:1] != (self.merge,) or any(a >= b for a, b in pairwise(tail)):
                yield f"a tail must start at merge={self.merge} and increase, got {tail}"
        if self.kept_sigma is not None and any(len(tail) < 3 for tail in self.tails[:1]):
            yield f"a kept latent needs a first tail of two steps, got {self.tails[0]}"
        if len({tail[-1] for tail in self.tails}) != 1:
            yield f"all tails must end at the same step, got {self.tails}"
        if self.corrected and any(tail[-1] == self.merge for tail in self.tails):
            yield f"a corrected step cannot be the last, got merge={self.merge}: there is no noise at sigma = 0"
        if self.granularities and len(self.granularities) != len(self.tails):
            yield f"granularities must name every tail once, got {self.granularities} for {len(self.tails)} tails"
        if self.trained is not None and not (
            self.trained and set(self.trained) <= set(self.stochastic)
        ):
            yield f"trained must name some of steps {[*self.stochastic]}, got {self.trained}"

    @property
    def stochastic(self) -> range:
        """The stochastic steps, by the grid indices at which they begin."""
        return range(self.branch, min(self.merge, self.branch + 1) if self.merged else self.merge)

    def after(self, step: int) -> int:
        """The grid index at which the stochastic step `step` ends."""
        return self.merge if self.merged else step + 1

    def trains(self, step: int) -> bool:
        """Whether the stochastic step `step` is learnt from."""
        return self.trained is None or step in self.trained

    def kept_step(self, sigmas: Tensor) -> int | None:
        """The step inside the first tail whose sigma, of the grid's [num_steps + 1], is nearest to
        `kept_sigma`; None without one."""
        kept = self.kept_sigma
        if kept is None:
            return None
        return min(self.tails[0][1:-1], key=lambda step: abs(float(sigmas[step]) - kept))

    def walks(self, sigmas: Tensor) -> tuple[tuple[int, ...], ...]:
        """The tails, and after them the first up to its kept step, if it has one."""
        kept, (first, *_) = self.kept_step(sigmas), self.tails
        return self.tails if kept is None else (*self.tails, first[: first.index(kept) + 1])

    @property
    def tail_names(self) -> tuple[int, ...]:
        """The number of each tail in the log."""
        return self.granularities or tuple(range(1, len(self.tails) + 1))


@dataclass(frozen=True)
class Transition:
    """One stochastic step of one group. `x` has one row where the members branch from a shared
    latent, else G rows."""

    step: int
    x: Tensor  # [1 or G, ...]
    x_next: Tensor  # [G, ...]
    old_mean: Tensor  # [1 or G, ...], the mean of the transition kernel p(x_next | x)
    old_log_prob: Tensor  # [G], float32


@dataclass(frozen=True)
class Rollout:
    """One `Plan` executed for one prompt."""

    prompt: int  # row of the conditioning batch
    plan: Plan
    transitions: tuple[Transition, ...]  # of the steps to learn from
    finals: Tensor  # [M, G, ...], latents at sigma = 0
    kept: tuple[int, Tensor] | None = None  # the step that `plan.kept_sigma` names, [G, ...] there
    ode: Tensor | None = None  # [...], the ODE's own latent at sigma = 0, of a plan with a baseline

    @classmethod
    def of(
        cls,
        prompt: int,
        plan: Plan,
        transitions: Sequence[Transition],
        ends: Tensor,
        sigmas: Tensor,
        ode: Tensor | None = None,
    ) -> Rollout:
        """From the latents [walks, G, ...] at the end of each of `plan.walks(sigmas)`."""
        step, tails = plan.kept_step(sigmas), len(plan.tails)
        kept = None if step is None else (step, ends[tails])
        return cls(prompt, plan, tuple(transitions), ends[:tails], kept, ode)

    @property
    def pictures(self) -> int:
        """How many are decoded and scored: each tail's, of the members and the baseline."""
        tails, members = self.finals.shape[:2]
        return tails * (members + (self.ode is not None))

    @property
    def scored(self) -> Tensor:
        """The latents of these pictures [M, G, ...], or [M, G + 1, ...] with the ODE's at the end."""
        if self.ode is None:
            return self.finals
        return torch.cat([self.finals, self.ode.expand_as(self.finals[:, :1])], 1)


@dataclass(frozen=True)
class Example:
    """The training data of one group at one step.

    `x` are latents that the network sees, [1, ...] where the members share one, else [G, ...]; of a
    pair that is one member, [2, ...].
    `data` has the loss's other tensors by name, each [1, ...] or [G, ...] as well. All examples of
    a run have the same names.
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
        return (
            torch.ones_like(self.advantages, dtype=torch.bool)
            if self.counted is None
            else self.counted
        )

    def with_group_sum(self, total: Tensor) -> Example:
        """A copy with `data["group_sum"]`, the sum over the whole group
        (`capabilities.SumsGroups`)."""
        return replace(self, data={**self.data, "group_sum": total[None]})

    def members(self, start: int, stop: int) -> Example:
        """The same for members start .. stop - 1 only."""
        size = len(self.advantages)

        def part(value: Tensor) -> Tensor:
            return value[start:stop] if len(value) == size else value

        data = {name: part(value) for name, value in self.data.items()}
        return Example(
            self.prompt, self.step, part(self.x), part(self.advantages), data, part(self.mask)
        )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The examples of one training pass, B members in all.

    The network sees `x` [rows, ...] at the grid indices `steps` [rows] (CPU) for rows `prompts` of
    the conditioning; member i of `advantages` and of `data` [B, ...] belongs to row `row_of[i]`.
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
    """Whether this is the first update after a rollout: the weights are still those of the
    rollout."""

    @classmethod
    def of(cls, examples: Sequence[Example], sigmas: Tensor, first: bool) -> Batch:
        rows, offset = [], 0
        for example in examples:  # a shared latent is the row of every member
            members = range(len(example.advantages))
            rows.append([offset + (member if example.rows > 1 else 0) for member in members])
            offset += example.rows

        def by_member(name: str) -> Tensor:
            values = [example.data[name] for example in examples]
            return torch.cat(
                [
                    v.expand(len(e.advantages), *v.shape[1:])
                    for v, e in zip(values, examples, strict=True)
                ]
            )

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

    def sigma(self, ahead: int = 0) -> Tensor:
        """The sigma of every row [rows], `ahead` steps after its own, on the device of `x`."""
        return self.sigmas[self.steps + ahead].to(self.x.device)

    def by_member(self, rows: Tensor) -> Tensor:
        """`rows` [rows, ...] of the network, one for each member, [B, ...].

        The gradient of a shared row is one sum over its members. Indexing would accumulate it
        member by member, with a rounding each time in a narrow dtype.
        """
        if len(rows) == len(self.row_of):
            return rows
        members = Counter(self.row_of)
        return torch.cat(
            [row.expand(members[index], *row.shape[1:]) for index, row in enumerate(rows.split(1))]
        )


@dataclass(frozen=True)
class Loss:
    """The loss of every member of a batch, [B], to be averaged; and what to log, by name, [B] or
    [any number]."""

    values: Tensor
    log: Mapping[str, Tensor] = field(default_factory=dict)
