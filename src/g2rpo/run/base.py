"""The base model's evaluation as a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from g2rpo.evaluation.heldout import (
    Evaluation,
    load_evaluation,
)
from g2rpo.runtime.distributed import World


def read_base(path: Path, prompts: Sequence[str], names: Sequence[str], world: World) -> Evaluation:
    """A stored evaluation of all `prompts` by the rewards `names`, in their order; pictures on rank
    0 alone."""
    stored = load_evaluation(path, prompts, names)
    return stored if world.is_main else replace(stored, images=stored.images[:0].clone())
