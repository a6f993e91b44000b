"""The testbed: two complete, tiny text-to-image tasks inside the package, scenes and words, each
with prompts, a FLUX pipeline and rewards.

Importing this package is fast: torch, diffusers and transformers are imported by its modules only.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from g2rpo.testbed.grammar import SceneSplit

__all__ = ["assets_dir", "pipeline_dir", "prompts"]


def assets_dir() -> Path:
    """The folder of the shipped weights: `pipeline/`, `clip/`, `preference/` of scenes,
    `words/pipeline/`, and their cards."""
    return Path(__file__).parent / "assets"


def pipeline_dir(task: str = "testbed") -> Path:
    """The tiny FLUX pipeline of scenes ("testbed") or of "words", for
    `FluxPipeline.from_pretrained`."""
    return assets_dir() / "words" / "pipeline" if task == "words" else assets_dir() / "pipeline"


def prompts(split: SceneSplit, task: str = "testbed") -> list[str]:
    """The prompts of "train" (2000) or "heldout" in a fixed shuffled order: 400 of scenes, whose
    compositions training has not seen, or 262 of words."""
    if task == "words":
        from g2rpo.testbed.words import language

        return list(language.word_prompts(split))
    from g2rpo.testbed import grammar

    return list(grammar.scene_prompts(split))
