"""The testbed: a complete, tiny text-to-image task inside the package, with prompts, scenes, a FLUX pipeline and rewards.

Importing this package is fast: torch, diffusers and transformers are imported by its modules only.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from g2rpo.testbed.grammar import Split

__all__ = ["assets_dir", "pipeline_dir", "prompts"]


def assets_dir() -> Path:
    """The folder of the shipped weights: `pipeline/`, `clip/`, `preference/`, and the card."""
    return Path(__file__).parent / "assets"


def pipeline_dir() -> Path:
    """The tiny FLUX pipeline, for `FluxPipeline.from_pretrained`."""
    return assets_dir() / "pipeline"


def prompts(split: Split) -> list[str]:
    """The prompts of "train" (2000) or "heldout" (400), in a fixed shuffled order; the two share no composition."""
    from g2rpo.testbed import grammar

    return list(grammar.prompts(split))
