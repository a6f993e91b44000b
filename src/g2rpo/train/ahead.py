"""Encodes prompts ahead: `g2rpo encode`, and before a policy is built, so that text encoders and
transformer are never on the device together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, count

from g2rpo.config.read import load_config
from g2rpo.config.schema import Config
from g2rpo.core.distributed import ALONE, World
from g2rpo.core.errors import UserError, counted
from g2rpo.core.events import Emit, Line, Progress, cautions, silent
from g2rpo.core.files import in_bytes
from g2rpo.data.prompts import PromptOrder, build_prompts
from g2rpo.models import load
from g2rpo.models.anyflow import DiffusersPolicy
from g2rpo.models.embedding_cache import cache_embeddings
from g2rpo.models.embeddings import CachedEncoder, CachedPolicy
from g2rpo.models.load import warn_of_prompts
from g2rpo.models.sharding import Sharded
from g2rpo.train.ranks import divided


def encode(recipe: str, overrides: Sequence[str], emit: Emit = silent) -> tuple[int, int]:
    """Stores the embeddings of all prompts that `recipe` names, for training and for evaluation;
    returns the number of prompts, and of new ones."""
    config = load_config(recipe, overrides, cautions(emit))
    if config.prompts.cache == "off":
        raise UserError("prompts.cache=off: there is no cache to fill")
    prompts = build_prompts(config.prompts.train, "prompts.train")
    heldout = build_prompts(config.evaluation.prompts, "evaluation.prompts")[
        : config.evaluation.num_prompts
    ]
    loaded = load.load_pipeline(config.policy, tuning="frozen")
    wanted = list(dict.fromkeys([*prompts, *heldout]))
    notify = cautions(emit)
    warn_of_prompts(loaded, [*prompts, *heldout], notify)
    encoder = cache_embeddings(loaded.text, config.policy, config.prompts.cache, notify)
    if not encode_ahead(encoder, wanted, emit):
        raise UserError(
            "the embeddings do not fit on the disk; free some space, or name another one with prompts.cache=FOLDER"
        )
    return len(wanted), encoder.encoded


def policy_after_encoding(
    loaded: load.Loaded,
    cache: str,
    prompts: Iterable[str],
    notify: Callable[[str], None],
    sharding: Sharded | None = None,
    emit: Emit = silent,
) -> CachedPolicy[DiffusersPolicy]:
    """The policy of `loaded` with its embeddings cached as in `cache`; those of `prompts` are
    computed first.

    The text encoders then leave the device. Without a cache, or without disk space for all, they
    move to the device with the first prompt and stay.
    """
    encoder = cache_embeddings(loaded.text, loaded.config, cache, notify)
    encode_ahead(encoder, list(dict.fromkeys(prompts)), emit)
    policy = loaded.policy(sharding)
    return CachedPolicy(policy, encoder)


def encode_ahead(encoder: CachedEncoder, prompts: Sequence[str], emit: Emit = silent) -> bool:
    """Stores the embeddings of `prompts` and parks the text encoders; False, and nothing is parked,
    if they do not fit.

    The size of the first embedding predicts the rest, so a disk that is too small is detected
    before it is filled.
    """
    if encoder.store is None:
        return False
    missing = encoder.missing(prompts)
    if missing:
        if not encoder.fill(missing[:1]):
            return False
        size = in_bytes(encoder.store.size(missing[0]) * len(missing))
        if not encoder.store.fits(len(missing) - 1, like=missing[0]):
            encoder.notify(
                f"embedding cache {encoder.store.folder}: {counted(len(missing), 'prompt')} need {size}, more than is free"
            )
            return False
        emit(Line(f"encoding {counted(len(missing), 'prompt')}, {size} in {encoder.store.folder}"))
        done = count(1)

        def advance() -> None:
            emit(Progress("encoding", "prompts", next(done), len(missing)))

        advance()
        if not encoder.fill(missing[1:], advance):
            return False
    encoder.park()
    return True


def prompts_to_come(
    config: Config,
    prompts: Sequence[str],
    heldout: Sequence[str],
    world: World = ALONE,
    iteration: int = 0,
) -> list[str]:
    """The distinct prompts of this rank from `iteration` on: its training prompts and its held-out
    prompts."""
    order = PromptOrder(prompts, config.trainer.seed)
    size = config.trainer.prompts_per_iteration
    own = divided(config, world).prompts
    batches = [
        own.shard(order.batch(later, size)) for later in range(iteration, config.trainer.iterations)
    ]
    return list(dict.fromkeys(chain(*batches, world.shard_or_all(heldout))))
