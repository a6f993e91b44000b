"""Saving and restoring a run: checkpoints, the best weights, the exported ones, and the state of
rewards, such as a head that clicks have taught, which is the same on all ranks."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo.core.distributed import ALONE, World
from g2rpo.core.errors import Stopped, UserError
from g2rpo.core.files import add_metadata, whole, writing
from g2rpo.core.rewards import Reward
from g2rpo.core.types import AlgorithmState, Policy
from g2rpo.models.adapters import AdapterFile
from g2rpo.models.sharding import Replicated
from g2rpo.train.learner import Learner
from g2rpo.train.model_card import copy_card
from g2rpo.train.run.checkpoint import (
    Checkpoint,
    forget_after,
    latest_checkpoint,
    rotate,
    save_checkpoint,
)
from g2rpo.train.run.folder import Run


@dataclass(kw_only=True)
class Persistence:
    """Saves and restores `learner`, the algorithm's `memory` and the state of `rewards`; keeps
    `keep` checkpoints.

    `header(iteration)` is the header of an exported safetensors file.
    """

    policy: Policy
    learner: Learner
    algorithm_state: AlgorithmState | None
    rewards: Mapping[str, Reward]
    shards: Replicated
    run: Run
    keep: int
    header: Callable[[int], Mapping[str, str]]

    def save(self, iteration: int) -> Path | None:
        """Writes a checkpoint from which `resume` continues bit for bit, and returns its path; None
        without a run directory.

        Any number of ranks can resume from it. Of sharded weights each rank writes its own pieces.
        Raises `Stopped` instead if the weights of the ranks differ.
        """
        if diverged := self.shards.diverged(list(self.learner.parameters)):
            raise Stopped(
                f"iteration {iteration}: the weights of ranks {diverged} are not rank 0's; nothing was saved"
            )
        rewards = states_of(self.rewards, self.shards.world)
        if self.run.folder is None:
            return None
        tensors, state = self.learner.stored()
        state["algorithm"] = self.algorithm_state.state if self.algorithm_state else {}
        state["rewards"] = rewards
        path = self._write(self.run.checkpoints, iteration, tensors, state, self.keep)
        if path is not None:
            self.run.mark_saved()
        return path

    def resume(self) -> tuple[int | None, list[str]]:
        """Restores the newest checkpoint that is intact and fits; returns its iteration (None if
        there is none) and what is wrong with newer ones."""

        def take(found: Checkpoint) -> None:
            _, tensors, state = found
            self.learner.take(tensors, state)
            if self.algorithm_state is not None:
                self.algorithm_state.state = state["algorithm"]
            restore(self.rewards, state.get("rewards", {}))

        found, complaints = latest_checkpoint(self.run.checkpoints, take)
        if self.shards.world.differing(torch.tensor([found[0] if found else 0])):
            folder = self.run.path
            raise UserError(
                f"ranks see different checkpoints in {folder}: it must be a folder that all of them share"
            )
        if self.run.writes:
            with self.run.holding():
                # of an attempt that is repeated
                forget_after(self.run.best, found[0] if found else 0)
                if found:  # a process that was killed before rotation leaves one more
                    rotate(self.run.checkpoints, found[0], self.keep)
                    self.run.mark_saved()
        return (found[0] if found else None), complaints

    def keep_best(self, iteration: int) -> None:
        """Saves the (averaged) weights of the best evaluation so far, in place of those before."""
        if self.run.folder is not None:
            with self.learner.averaged():
                self._write(self.run.best, iteration, self.learner.weights(), {}, keep=1)

    def _write(
        self,
        root: Path,
        iteration: int,
        tensors: Mapping[str, Sequence[Tensor]],
        state: Mapping[str, Any],
        keep: int,
    ) -> Path | None:
        """Writes a checkpoint, and returns its path on the rank that writes the run."""
        if not self.shards.divided and not self.run.writes:
            return None
        world = self.shards.world if self.shards.divided else ALONE
        file = None if self.shards.divided else getattr(self.policy, "adapter_file", None)
        if file is not None:
            file = AdapterFile(file.factors, {**file.header, **self.header(iteration)})
        with self.run.holding():
            path = save_checkpoint(
                root, iteration, tensors, state, keep, world, self.shards.writers, file
            )
        return path if self.run.writes else None

    def export(self, name: str, iteration: int) -> Path:
        """Writes the (averaged) weights as diffusers reads them into the folder `name` of the run,
        and returns their path. All ranks must call it; rank 0 writes. A card of the same weights is
        kept."""
        folder = self.run.path / name
        save: Callable[[Path], Path] = self.policy.save
        with self.learner.averaged(), self.run.holding():
            if not self.run.writes:  # the other ranks' shards are gathered
                return save(folder) if self.shards.divided else folder
            with writing(folder), whole(folder) as unfinished:
                saved = save(unfinished)
                if saved.suffix == ".safetensors":
                    add_metadata(saved, self.header(iteration))
                if self.run.finished_at() == iteration:
                    copy_card(folder, unfinished)
            self.run.mark_saved()
        return folder / saved.relative_to(unfinished)


def stateful(rewards: Mapping[str, Reward]) -> dict[str, Reward]:
    """The rewards that have a state, by name; UserError if it holds what a checkpoint cannot."""
    found = {name: reward for name, reward in rewards.items() if reward.state is not None}
    for name, reward in found.items():
        if (fault := _foreign_type(reward.state)) is not None:
            raise UserError(
                f"reward '{name}': its state may hold numbers, words, lists, mappings and tensors, not {fault}"
            )
    return found


def _foreign_type(value: Any) -> str | None:
    """The type of the first thing in `value` that is neither plain data nor a tensor."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()] if type(value) is dict else object()
    if type(value) in (list, tuple):
        return next((fault for each in value if (fault := _foreign_type(each)) is not None), None)
    return (
        None
        if value is None or type(value) in (bool, int, float, str, Tensor)
        else type(value).__name__
    )


def states_of(rewards: Mapping[str, Reward], world: World) -> dict[str, Any]:
    """The states of all rewards that have one. Raises `Stopped` if those of the ranks differ."""
    found = {name: reward.state for name, reward in stateful(rewards).items()}
    for name, state in found.items():
        if differing := world.differing(_digest_of_states(state)):
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


def _digest_of_states(value: Any) -> Tensor:
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
