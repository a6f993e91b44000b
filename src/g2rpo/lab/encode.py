"""`g2rpo encode`: stores the embeddings of a recipe's prompts."""

from __future__ import annotations

from collections.abc import Sequence

from g2rpo.config.read import load_config
from g2rpo.core.errors import UserError
from g2rpo.core.events import Emit, cautions, silent
from g2rpo.data.prompts import build_prompts
from g2rpo.models.embeddings import encode_ahead
from g2rpo.models.load import load_pipeline


def encode(recipe: str, overrides: Sequence[str], emit: Emit = silent) -> tuple[int, int]:
    """Stores the embeddings of all prompts that `recipe` names, for training and for evaluation;
    returns the number of prompts, and of new ones."""
    notify = cautions(emit)
    config = load_config(recipe, overrides, notify)
    if config.prompts.cache == "off":
        raise UserError("prompts.cache=off: there is no cache to fill")
    prompts = build_prompts(config.prompts.train, "prompts.train")
    heldout = build_prompts(config.evaluation.prompts, "evaluation.prompts")
    wanted = [*prompts, *heldout[: config.evaluation.num_prompts]]
    loaded = load_pipeline(config.policy, tuning="frozen")
    loaded.warn_of(wanted, notify)
    encoder, distinct = loaded.cached(config.prompts.cache, notify), list(dict.fromkeys(wanted))
    if not encode_ahead(encoder, distinct, emit):
        raise UserError(
            "the embeddings do not fit on the disk; free some space, or name another one with prompts.cache=FOLDER"
        )
    return len(distinct), encoder.encoded
