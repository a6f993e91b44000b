"""The testbed: two complete, tiny text-to-image tasks inside the package, scenes and words, each
with prompts, a FLUX pipeline and rewards.

Importing this package is fast: torch, diffusers and transformers are imported by its modules only.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from g2rpo.data.testbed.scenes import SceneSplit

__all__ = ["assets_dir", "knows", "pipeline_dir", "prompts", "why_unknown"]


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
        from g2rpo.data.testbed import words

        return list(words.word_prompts(split))
    from g2rpo.data.testbed import scenes

    return list(scenes.scene_prompts(split))


def knows(task: str) -> str:
    """What the model of a task can draw, in words; "" for a model that is not of the testbed."""
    if task == "words":
        from g2rpo.data.testbed.words import INK_COLOURS

        return f"a word of three to six letters in quotes and a colour, such as 'tiger' in red ({', '.join(INK_COLOURS)})"
    if task == "testbed":
        from g2rpo.data.testbed import scenes

        kinds = (scenes.COUNTS, scenes.SIZES, scenes.COLOURS, scenes.SHAPES, scenes.RELATIONS)
        listed = "; ".join(", ".join(words) for words in kinds)
        return f"one or two groups of shapes, such as two small red circles above a blue square ({listed})"
    return ""


def why_unknown(task: str, prompt: str) -> str:
    """Why a prompt is none of the task's; "" if it is one, or if the model is not of the
    testbed."""
    if task == "words":
        from g2rpo.data.testbed.words import parse_word

        return "" if parse_word(prompt) else f"it takes {knows(task)}"
    if task == "testbed":
        from g2rpo.data.testbed.scenes import parse

        try:
            parse(prompt)
        except ValueError as error:
            return str(error)
    return ""
