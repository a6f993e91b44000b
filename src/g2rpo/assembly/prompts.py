"""Prompts from a source named in a config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from g2rpo.config.given import refuse_mention
from g2rpo.config.schema import Config
from g2rpo.core.capabilities import judged_by
from g2rpo.core.data import Judged, spelling_apart
from g2rpo.core.errors import UserError, counted, did_you_mean, placed
from g2rpo.core.input_pictures import images_of
from g2rpo.prompts.judged import Kind, held_out
from g2rpo.prompts.sources import STARTER, read_prompts
from g2rpo.rewards.votes import judged_in

TESTBED_LISTS = ("testbed:train", "testbed:heldout", "words:train", "words:heldout")
LISTS = (*TESTBED_LISTS, *STARTER)
"""Prompts that come with the package."""


def build_prompts(source: str, key: str, kind: Kind | None = None) -> list[str]:
    """The prompts of a list that comes with the package, or of a source for `read_prompts`; with a
    `kind` the pairs or marks of one for `read_judged`, or of votes. `key` names the config
    entry."""
    refuse_mention(key, source)
    if kind is not None:
        with placed(f"{key}={source}: ", UserError):
            return cast("list[str]", judged_in(source, kind))
    named = source == "testbed" or source.startswith(("testbed:", "words:", "starter:"))
    if named and source not in LISTS:
        raise UserError(f"{key}={source}: unknown list.{did_you_mean(source, LISTS)}")
    if source not in TESTBED_LISTS:
        with placed(f"{key}={source}: ", UserError):
            return list[str](read_prompts(source))
    from g2rpo.testbed import prompts

    world, _, split = source.partition(":")
    return list(prompts("train" if split == "train" else "heldout", world))


def divided_prompts(config: Config, prompts: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """(to learn from, held out): the latter only of pictures that people judged."""
    judged = [prompt for prompt in prompts if isinstance(prompt, Judged)]
    if judged_by(config.algorithm) is None or len(judged) < len(prompts):
        return prompts, ()
    share: float = getattr(config.algorithm, "held_out", 0.0)
    return held_out(judged, share, config.trainer.seed)


def starter_caution(train: str, heldout: str) -> str | None:
    """A caution about one's own training prompts that are evaluated on the starter set."""
    if train in LISTS or not heldout.startswith("starter:"):
        return None
    return (
        f"prompts.train={train}, but held-out pictures are of {heldout}, which comes with the package; "
        "evaluation.prompts=FILE takes prompts like your own that are not trained on"
    )


def trained_on(prompts: Sequence[str], heldout: Sequence[str]) -> str | None:
    """A caution about held-out prompts that are training prompts too, with the same input
    pictures."""
    known, held = (
        [(spelling_apart(prompt), *images_of(prompt)) for prompt in each]
        for each in (prompts, heldout)
    )
    if not (shared := sum(map({*known}.__contains__, held))):
        return None
    are = "is a training prompt" if shared == 1 else "are training prompts"
    return (
        f"{shared} of {counted(len(heldout), 'held-out prompt')} {are} too: their scores do not tell how the model does on "
        "others; evaluation.prompts=FILE takes prompts that are not trained on"
    )
