"""Saving and restoring a run: checkpoints, the best weights, and the exported ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo.core.errors import Stopped, UserError
from g2rpo.core.files import add_metadata
from g2rpo.core.types import AlgorithmState, Policy, Reward
from g2rpo.runtime.distributed import ALONE
from g2rpo.runtime.folders import remove_unfinished, whole, writing
from g2rpo.runtime.sharding import Replicated
from g2rpo.training.checkpoint import Checkpoint, forget_after, latest_checkpoint, rotate, save_checkpoint
from g2rpo.training.learner import Learner
from g2rpo.training.model_card import copy_card, finished_at
from g2rpo.training.reward_states import restore, states
from g2rpo.training.run_files import RunFiles


@dataclass(kw_only=True)
class Persistence:
    """Saves and restores `learner`, the algorithm's `memory` and the state of `rewards`; keeps `keep` checkpoints.

    `header(iteration)` is the header of an exported safetensors file.
    """

    policy: Policy
    learner: Learner
    memory: AlgorithmState | None
    rewards: Mapping[str, Reward]
    shards: Replicated
    files: RunFiles
    keep: int
    header: Callable[[int], Mapping[str, str]]

    def save(self, iteration: int) -> Path | None:
        """Writes a checkpoint from which `resume` continues bit for bit, and returns its path; None without a run directory.

        Any number of ranks can resume from it. Of sharded weights each rank writes its own pieces.
        Raises `Stopped` instead if the weights of the ranks differ.
        """
        if diverged := self.shards.diverged(list(self.learner.parameters)):
            raise Stopped(f"iteration {iteration}: the weights of ranks {diverged} are not rank 0's; nothing was saved")
        rewards = states(self.rewards, self.shards.world)
        if self.files.run_dir is None:
            return None
        tensors, state = self.learner.stored()
        state["algorithm"] = self.memory.state if self.memory else {}
        state["rewards"] = rewards
        return self._write(self.files.run.checkpoints, iteration, tensors, state, self.keep)

    def resume(self) -> tuple[int | None, list[str]]:
        """Restores the newest checkpoint that is intact and fits; returns its iteration (None if there is none) and what is
        wrong with newer ones."""

        def take(found: Checkpoint) -> None:
            _, tensors, state = found
            self.learner.take(tensors, state)
            if self.memory is not None:
                self.memory.state = state["algorithm"]
            restore(self.rewards, state.get("rewards", {}))

        found, complaints = latest_checkpoint(self.files.run.checkpoints, take)
        if self.shards.world.differing(torch.tensor([found[0] if found else 0])):
            folder = self.files.run.path
            raise UserError(f"ranks see different checkpoints in {folder}: it must be a folder that all of them share")
        if self.files.writes:
            with self.files.holding():
                forget_after(self.files.run.best, found[0] if found else 0)  # of an attempt that is repeated
                if found:  # a process that was killed before rotation leaves one more
                    rotate(self.files.run.checkpoints, found[0], self.keep)
        return (found[0] if found else None), complaints

    def keep_best(self, iteration: int) -> None:
        """Saves the (averaged) weights of the best evaluation."""
        with self.learner.averaged():
            if self.files.run_dir is not None:
                self._write(self.files.run.best, iteration, self.learner.weights(), {}, keep=1)

    def _write(
        self, root: Path, iteration: int, tensors: Mapping[str, Sequence[Tensor]], state: Mapping[str, Any], keep: int
    ) -> Path | None:
        """Writes a checkpoint, and returns its path on the rank that writes the run."""
        if not self.shards.divided and not self.files.writes:
            return None
        world = self.shards.world if self.shards.divided else ALONE
        with self.files.holding():
            path = save_checkpoint(root, iteration, tensors, state, keep, world, self.shards.writers)
        return path if self.files.writes else None

    def take_best(self, iteration: int) -> int:
        """Restores the weights of the best evaluation up to `iteration`, and returns their iteration."""
        found, _ = latest_checkpoint(self.files.run.best, until=iteration)
        if found is None:
            raise Stopped(
                f"stopped by an alarm after iteration {iteration}; {self.files.run.best} has no weights to go back to"
            )
        best, tensors, _ = found
        self.learner.take_weights(tensors["weights"])
        return best

    def export(self, name: str, iteration: int) -> Path:
        """Writes the (averaged) weights as diffusers reads them into the folder `name` of the run, and returns their path. All
        ranks must call it; rank 0 writes. A card of the same weights is kept."""
        folder = self.files.run.path / name
        save: Callable[[Path], Path] = self.policy.save
        with self.learner.averaged(), self.files.holding():
            if not self.files.writes:  # the other ranks' shards are gathered
                return save(folder) if self.shards.divided else folder
            with writing(folder):
                remove_unfinished(self.files.run.path)
                with whole(folder) as unfinished:
                    saved = save(unfinished)
                    if saved.suffix == ".safetensors":
                        add_metadata(saved, self.header(iteration))
                    if finished_at(self.files.run.path) == iteration:
                        copy_card(folder, unfinished)
        return folder / saved.relative_to(unfinished)
