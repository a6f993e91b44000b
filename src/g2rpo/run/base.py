"""The base model's evaluation as a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from g2rpo.config.schema import Config
from g2rpo.evaluation.heldout import (
    Evaluation,
    floors_of,
    load_evaluation,
    load_tensors,
)
from g2rpo.run.files import RunFiles
from g2rpo.runtime.distributed import World


def read_base(path: Path, prompts: Sequence[str], names: Sequence[str], world: World) -> Evaluation:
    """A stored evaluation of all `prompts` by the rewards `names`, in their order; pictures on rank
    0 alone."""
    stored = load_evaluation(path, prompts, names)
    return stored if world.is_main else replace(stored, images=stored.images[:0].clone())


def with_floors(run: RunFiles, config: Config) -> Config:
    """The run's `config` with floors at the base's mean as numbers; as they are where the run does
    not know them."""
    asked = any(entry.floor == "base" for entry in config.rewards.values())
    if not asked or not run.baseline.is_file():
        return config
    stored = load_tensors(run.baseline)
    scores = {
        name.removeprefix("score/"): values
        for name, values in stored.items()
        if name.startswith("score/")
    }
    floors = floors_of(config.rewards, lambda: Evaluation((), stored["images"], scores))
    rewards = {
        name: entry.model_copy(update={"floor": floor} if entry.floor == "base" else {})
        for (name, entry), floor in zip(config.rewards.items(), floors.tolist(), strict=True)
    }
    return config.model_copy(update={"rewards": rewards})
