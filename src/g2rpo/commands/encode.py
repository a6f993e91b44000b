"""`g2rpo encode`: text embeddings on disk before they are needed, so that training can let go of the text encoders."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from g2rpo import components
from g2rpo.commands.train import load_config
from g2rpo.embeddings import CachedPolicy
from g2rpo.errors import UserError


def encode(recipe: str, overrides: Sequence[str], console: Console) -> None:
    """Stores the embeddings of all prompts that `recipe` names, for training and for evaluation."""
    config = load_config(recipe, overrides)
    if config.prompts.cache == "off":
        raise UserError("prompts.cache=off: there is no cache to fill")
    prompts = components.build_prompts(config.prompts.train, "prompts.train")
    heldout = components.build_prompts(config.evaluation.prompts, "evaluation.prompts")
    wanted = list(dict.fromkeys([*prompts, *heldout[: config.evaluation.num_prompts]]))
    policy = components.build_policy(config.policy, tuning="frozen")
    cached = components.cache_embeddings(policy, config.policy, config.prompts.cache, warn_on(console))
    if not encode_ahead(cached, wanted, console):
        raise UserError("the cache is not complete; free some space, or name another folder with prompts.cache=FOLDER")
    assert cached.store is not None
    console.print(f"{len(wanted)} prompts, {cached.encoded} newly encoded, in {cached.store.folder}", soft_wrap=True)
