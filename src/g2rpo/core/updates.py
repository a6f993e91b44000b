"""How a rollout's examples are divided into updates of the weights, and an update into passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from g2rpo.core.contracts import all_finite, finite_rows, name_of
from g2rpo.core.data import Example
from g2rpo.core.errors import UserError, shown
from g2rpo.core.types import Algorithm


def without_zero_advantages(examples: Sequence[Example]) -> list[Example]:
    """`examples` in which a member of a prompt counts if it has an advantage other than 0 in any of
    them.

    The others contribute only the KL term, and would make the mean of the rest smaller (Flow-GRPO's
    code).
    """
    alive: dict[int, Tensor] = {}
    for item in examples:
        alive[item.prompt] = alive.get(item.prompt, False) | (item.advantages != 0)
    return [replace(item, counted=alive[item.prompt]) for item in examples]


def without_broken(examples: Sequence[Example]) -> list[Example]:
    """`examples` in which a member with numbers that are not finite does not count. It has those of
    a whole member of its group instead: every group keeps its size, on every rank. A group without a
    whole member does not count, and is another one of the same step, if there is any."""
    if all_finite(value for item in examples for value in (item.x, *item.data.values())):
        return list(examples)
    mended: list[Example | None] = []
    for item in examples:
        tensors = {"": item.x, **item.data}
        own = {name: v for name, v in tensors.items() if len(v) == len(item.advantages)}
        whole = finite_rows(item.advantages, *own.values())
        if not whole.all():
            place = torch.where(whole, torch.arange(len(whole)), int(whole.int().argmax()))
            tensors |= {name: v[place.to(v.device)] for name, v in own.items()}
            x = tensors.pop("")
            item = replace(item, x=x, data=tensors, counted=item.mask & whole)
        mended.append(item if whole.any() else None)
    others = {
        (item.step, item.rows): replace(item, counted=torch.zeros_like(item.mask))
        for item in mended
        if item is not None
    }
    return [
        others.get((item.step, item.rows), item) if own is None else own
        for item, own in zip(examples, mended, strict=True)
    ]


def updates_of(algorithm: Algorithm, examples: Sequence[Example]) -> Iterator[list[Example]]:
    """The examples of each update, by `Algorithm.update_every`. The network sees a latent that
    members share once in every update that has some of them: the weights differ."""
    every = algorithm.update_every
    if every == "rollout":
        yield list(examples)
        return
    if isinstance(every, int):
        for start in range(0, algorithm.group_size, every):
            yield [item.members(start, start + every) for item in examples]
        return
    if isinstance(every, float):
        parts = min(round(1 / every), len(examples))
        yield from (list(examples[part::parts]) for part in range(parts))
        return
    if every != "branch":
        raise UserError(
            f"algorithm {name_of(algorithm)}: update_every is {shown(every)}; use 'rollout', 'branch' or a number"
        )
    by_step: dict[int, list[Example]] = defaultdict(list)
    for item in examples:
        by_step[item.step].append(item)
    yield from (by_step[step] for step in sorted(by_step))  # in the same order on all ranks


def passes(batch: Sequence[Example], size: int) -> Iterator[list[Example]]:
    """`batch` in passes of at most `size` latents; members with latents of their own may be split
    over passes."""
    part: list[Example] = []
    for item in batch:
        # members of a shared latent stay together: one evaluation
        width = size if item.rows > 1 else len(item.advantages)
        for start in range(0, len(item.advantages), width):
            piece = item.members(start, start + width)
            if part and sum(other.rows for other in part) + piece.rows > size:
                yield part
                part = []
            part.append(piece)
    yield part
