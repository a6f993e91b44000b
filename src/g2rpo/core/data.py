"""The data types that the protocols exchange; `types.py` has the legend of times and shapes.

In the order of an iteration: `Prompt`, `Cond`, `Precision`, `Example`, `Batch`, `Loss`; between
them are the plans and rollouts of `plans.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unicodedata import normalize

import torch
from torch import Tensor


class Prompt(str):
    """A prompt: a string (its text) with optional input pictures and metadata.

    `images` are paths of input pictures, `metadata` is plain data for rewards and policies, such as
    the text that a picture is to show. Prompts with different images or
    metadata differ; one without either equals its text.
    """

    images: tuple[str, ...]
    metadata: Mapping[str, Any]

    def __new__(
        cls,
        text: str,
        images: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> Prompt:
        prompt = super().__new__(cls, text)
        prompt.images = tuple(images)
        prompt.metadata = dict(metadata or {})
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


def as_prompt(prompt: str) -> Prompt:
    """The prompt itself, or a string as one without pictures and metadata."""
    return prompt if isinstance(prompt, Prompt) else Prompt(prompt)


def spelling_apart(text: str) -> str:
    """`text` without what differs between two spellings of one prompt: case, spaces, and whether an
    accent is a character of its own."""
    return " ".join(normalize("NFC", text.casefold()).split())


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

    @property
    def nbytes(self) -> int:
        every = (*self.tensors.values(), *(value for own in self.ragged.values() for value in own))
        return sum(value.nbytes for value in every)

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
class Example:
    """The training data of one group at one step.

    `x` are latents that the network sees, [1, ...] where the members share one, else [G, ...].
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
        (`Algorithm.sums_groups`)."""
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
