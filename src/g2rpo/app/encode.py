"""`g2rpo encode`: text embeddings on disk before they are needed, so that training can let go of the text encoders."""

from __future__ import annotations

from collections.abc import Sequence

from g2rpo.app.ahead import encode_ahead, of_controls
from g2rpo.app.events import Emit, cautions, silent
from g2rpo.assembly import components
from g2rpo.assembly.config import load_config
from g2rpo.assembly.embeddings import cache_embeddings
from g2rpo.assembly.prompts import build_prompts
from g2rpo.core.errors import UserError


def encode(recipe: str, overrides: Sequence[str], emit: Emit = silent) -> tuple[int, int]:
    """Stores the embeddings of all prompts that `recipe` names, for training and for evaluation; returns the number
    of prompts, and of new ones."""
    config = load_config(recipe, overrides, cautions(emit))
    if config.prompts.cache == "off":
        raise UserError("prompts.cache=off: there is no cache to fill")
    prompts = build_prompts(config.prompts.train, "prompts.train")
    heldout = build_prompts(config.evaluation.prompts, "evaluation.prompts")
    heldout = heldout[: config.evaluation.num_prompts]
    loaded = components.load_pipeline(config.policy, tuning="frozen")
    wanted = list(dict.fromkeys([*prompts, *heldout, *of_controls(config, loaded, heldout)]))
    encoder = cache_embeddings(loaded.text, config.policy, config.prompts.cache, cautions(emit))
    if not encode_ahead(encoder, wanted, emit):
        raise UserError("the embeddings do not fit on the disk; free some space, or name another one with prompts.cache=FOLDER")
    return len(wanted), encoder.encoded
