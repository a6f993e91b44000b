"""State of rewards, such as a head that clicks have taught: saved in checkpoints, the same on all
ranks."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo.core.distributed import World
from g2rpo.core.errors import Stopped, UserError
from g2rpo.core.types import Reward
from g2rpo.train.run.checkpoint import latest_checkpoint
from g2rpo.train.run.folder import Run


def stateful(rewards: Mapping[str, Reward]) -> dict[str, Reward]:
    """The rewards that have a state, by name; UserError if it holds what a checkpoint cannot."""
    found = {name: reward for name, reward in rewards.items() if reward.state is not None}
    for name, reward in found.items():
        if (fault := _fault(reward.state)) is not None:
            raise UserError(
                f"reward '{name}': its state may hold numbers, words, lists, mappings and tensors, not {fault}"
            )
    return found


def _fault(value: Any) -> str | None:
    """The type of the first thing in `value` that is neither plain data nor a tensor."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()] if type(value) is dict else object()
    if type(value) in (list, tuple):
        return next((fault for each in value if (fault := _fault(each)) is not None), None)
    return (
        None
        if value is None or type(value) in (bool, int, float, str, Tensor)
        else type(value).__name__
    )


def states_of(rewards: Mapping[str, Reward], world: World) -> dict[str, Any]:
    """The states of all rewards that have one. Raises `Stopped` if those of the ranks differ."""
    found = {name: reward.state for name, reward in stateful(rewards).items()}
    for name, state in found.items():
        if differing := world.differing(_digest(state)):
            raise Stopped(
                f"reward '{name}': the state of ranks {differing} is not rank 0's; change it on all alike. Nothing was saved"
            )
    return found


def restore(rewards: Mapping[str, Reward], stored: Mapping[str, Any]) -> None:
    """Sets the states that `states_of` returned; KeyError if one is missing."""
    for name in stateful(rewards).keys() | (stored.keys() & rewards.keys()):
        # a checkpoint's tensors are mapped from its file
        rewards[name].state = copy.deepcopy(stored[name])


def take_stored(rewards: Mapping[str, Reward], run: Path, notify: Callable[[str], None]) -> None:
    """Sets the states of rewards that have one to those of a run's newest checkpoint, if there is
    one."""
    if not (found := stateful(rewards)):
        return
    newest, _ = latest_checkpoint(Run(run).checkpoints)
    iteration, _, state = newest or (0, {}, {})
    kept = {name: value for name, value in state.get("rewards", {}).items() if name in found}
    restore({name: found[name] for name in kept}, kept)
    for name in found:
        notify(
            f"reward {name}: "
            + (f"as after iteration {iteration} of {run}" if name in kept else "as at the start")
        )


def _digest(value: Any) -> Tensor:
    """A digest of the states, as 32 numbers."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype} {list(value.shape)}".encode())
            digest.update(
                value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
        elif isinstance(value, Mapping | list | tuple):
            digest.update(f"{type(value).__name__} {len(value)}".encode())
            for each in value.items() if isinstance(value, Mapping) else value:
                add(each)
        else:
            digest.update(repr(value).encode())

    add(value)
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
