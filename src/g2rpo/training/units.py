"""Units of an iteration's rollouts: some prompts of one rank. Ranks that have finished theirs take over those that others have
not begun, and return the results.

Noise is seeded by a prompt's place in the iteration, and a unit has the same prompts and conditioning whoever rolls it out, so
results do not depend on who does; on devices of one kind with equal batch sizes to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count

import torch
from safetensors.torch import load, save
from torch import Tensor

from g2rpo.runtime.distributed import World
from g2rpo.types import Cond, Plan, Rollout, Transition

Unit = tuple[int, int]
"""The index of the work it belongs to (the rank whose prompts they are), and its number there."""
Result = tuple[list[Rollout], Tensor]
"""A unit's rollouts and their rewards [N, R, M, G]."""


@dataclass(frozen=True)
class Work:
    """A rank's prompts, one per row of `cond`, and the place of the first in the iteration; `size` prompts are a unit."""

    cond: Cond
    prompts: Sequence[str]
    first: int
    size: int

    def rows(self, number: int) -> list[int]:
        """The rows of `cond` in a unit."""
        return list(range(len(self.prompts)))[number * self.size : (number + 1) * self.size]

    @property
    def units(self) -> int:
        return -(-len(self.prompts) // self.size)


class Queue:
    """The units of `works`, in the order in which this rank takes them. Of all ranks' works it takes its own first, then its
    neighbours'; all ranks must make the queue."""

    def __init__(self, world: World, works: Sequence[Work]) -> None:
        homes = range(len(works))
        own = count()
        self._next = world.counters().next if len(works) > 1 else lambda home: next(own)
        self._left = {home: works[home].units for home in sorted(homes, key=lambda home: (home - world.rank) % world.size)}

    def take(self) -> Unit | None:
        """A unit that no rank has begun; None if there is none."""
        for home in list(self._left):
            number = self._next(home)
            if number < self._left[home]:
                return home, number
            del self._left[home]
        return None


def works_of_all(world: World, own: Work, prompts: Sequence[Sequence[str]], device: torch.device) -> list[Work]:
    """The work of every rank, by its `prompts`; only `own` if no rank has more than a unit."""
    sizes = world.gather(torch.tensor([own.size])).tolist()
    if all(size >= len(mine) for size, mine in zip(sizes, prompts, strict=True)):
        return [own]
    conds = [_unpack_cond(data).to(device) for data in world.gather_bytes(_pack_cond(own.cond))]
    firsts = [0, *accumulate(map(len, prompts))]
    works = [Work(*each) for each in zip(conds, prompts, firsts, sizes, strict=False)]
    return [own if home == world.rank else work for home, work in enumerate(works)]


def returned(world: World, done: Mapping[Unit, Result], plans: Sequence[Plan], device: torch.device) -> dict[Unit, Result]:
    """The results of this rank's own units, of which other ranks may have done some."""
    others = {unit: (unit[0], _pack(*result)) for unit, result in done.items() if unit[0] != world.rank}
    received = {unit: _unpack(data, plans, device) for unit, data in world.send(others).items()}
    return {**{unit: result for unit, result in done.items() if unit[0] == world.rank}, **received}


def _pack(rollouts: Sequence[Rollout], rewards: Tensor) -> bytes:
    tensors = {"rewards": rewards, "prompts": torch.tensor([rollout.prompt for rollout in rollouts])}
    for index, rollout in enumerate(rollouts):
        tensors[f"{index}.finals"] = rollout.finals
        for place, each in enumerate(rollout.transitions):
            values = {"x": each.x, "x_next": each.x_next, "mean": each.old_mean, "log_prob": each.old_log_prob}
            tensors |= {f"{index}.{place}.{name}": value for name, value in values.items()}
            tensors[f"{index}.{place}.step"] = torch.tensor(each.step)
    return save({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()})


def _unpack(data: bytes, plans: Sequence[Plan], device: torch.device) -> tuple[list[Rollout], Tensor]:
    tensors = load(data)
    prompts = tensors["prompts"].tolist()

    def transition(index: int, place: int) -> Transition:
        x, x_next, mean, log_prob = (
            tensors[f"{index}.{place}.{name}"].to(device) for name in ("x", "x_next", "mean", "log_prob")
        )
        return Transition(int(tensors[f"{index}.{place}.step"]), x, x_next, mean, log_prob)

    rollouts = []
    for index, prompt in enumerate(prompts):
        steps = sum(name.startswith(f"{index}.") and name.endswith(".step") for name in tensors)
        transitions = tuple(transition(index, place) for place in range(steps))
        rollouts.append(Rollout(prompt, plans[index % len(plans)], transitions, tensors[f"{index}.finals"].to(device)))
    return rollouts, tensors["rewards"]


def _pack_cond(cond: Cond) -> bytes:
    ragged = {f"ragged.{name}.{row}": value for name, rows in cond.ragged.items() for row, value in enumerate(rows)}
    whole = {f"whole.{name}": value for name, value in cond.tensors.items()}
    return save({name: value.detach().cpu().contiguous().clone() for name, value in (whole | ragged).items()})


def _unpack_cond(data: bytes) -> Cond:
    tensors = load(data)
    whole = {name.removeprefix("whole."): value for name, value in tensors.items() if name.startswith("whole.")}
    lists: dict[str, dict[int, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("ragged."):
            name, _, row = key.removeprefix("ragged.").rpartition(".")
            lists.setdefault(name, {})[int(row)] = value
    return Cond(whole, {name: tuple(rows[row] for row in sorted(rows)) for name, rows in lists.items()})
